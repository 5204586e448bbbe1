"""Linear attention over all pairs in Triton's interpreter, and defects that the calls find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    document,
    elu_plus_one,
    favor,
    identity,
    linear,
    prefix_lm,
    relu,
    sliding_window,
    where,
)
from support.over_pairs import DECAY, PairCall, check_pairs, pasted
from support.slip import with_slip
from support.small_sums import NONE, SUBNORMAL, TINY, results_with, unequal
from support.variants import rendered_module


def both_signs(x: Any) -> Any:
    """A feature map of a user's own: two features of each element."""
    return [where(x > 0, x, 0.0), where(x < 0, -x, 0.0)]


CALLS = {
    "window": (
        AttentionSpec(
            (24, 40), "float32", mask=sliding_window(20, 0), normaliser=linear(elu_plus_one())
        ),
        PairCall(70, 70),
    ),
    "prefix": (
        AttentionSpec(32, "float32", mask=prefix_lm(11), normaliser=linear(relu())),
        PairCall(40, 40, q_heads=1, kv_heads=1),
    ),
    "pasted": (
        AttentionSpec(16, "float32", mask=pasted, normaliser=linear(both_signs)),
        PairCall(50, 50),
    ),
    "aligned": (
        AttentionSpec(
            16,
            "float32",
            mask=causal(),
            align="bottom_right",
            normaliser=linear(identity(), normalise=False),
        ),
        PairCall(35, 70),
    ),
    "hidden": (
        AttentionSpec(16, "float32", mask=document(), normaliser=linear(elu_plus_one())),
        PairCall(40, 40, hidden=True),
    ),
    "random": (
        AttentionSpec(32, "float32", mask=sliding_window(20, 0), normaliser=linear(favor(64))),
        PairCall(40, 40),
    ),
    "decays": (
        AttentionSpec(
            16, "float32", mask=sliding_window(30, 0), normaliser=linear(relu(), decay=DECAY)
        ),
        PairCall(50, 50, steep=True),
    ),
    "more queries than decays": (
        AttentionSpec(
            16,
            "float32",
            mask=causal(),
            align="top_left",
            normaliser=linear(identity(), decay=DECAY, normalise=False),
        ),
        PairCall(50, 30),
    ),
    "decays of heads": (
        AttentionSpec(
            16, "float32", mask=causal() & document(), normaliser=linear(
                elu_plus_one(), decay=(-0.1, -0.5), algorithm="quadratic"
            )
        ),
        PairCall(40, 40),
    ),
}  # fmt: skip

#: By what an output is divided.
DIVISOR = "tl.where(tl.abs(l_i) < 1.1754943508222875e-38, 0.0, 1.0 / l_i)[:, None]"

#: Defects: the text, what stands in its place, and the call that finds it.
DEFECTS = {
    "hidden keys": ("seen = tl.where(visible, scores, 0.0)", "seen = scores", "window"),
    "no division": (DIVISOR, "1.0", "window"),
    "0 / 0": (DIVISOR, "(1.0 / l_i)[:, None]", "pasted"),
    "gradients of 0 / 0": (
        "tl.where(has_inverse[:, None], grad_out * inverse[:, None], 0.0)",
        "grad_out * inverse[:, None]", "pasted"),
    "gradients of hidden keys by q": (
        "ds = tl.where(shown, dp - delta[:, None], 0.0)", "ds = dp - delta[:, None]", "prefix"),
    "gradients of hidden keys by k": (
        "ds = tl.where(shown, dp - delta[None, :], 0.0)", "ds = dp - delta[None, :]", "prefix"),
    "gradients that are not divided": ("grad_out * inverse[:, None]", "grad_out", "window"),
    "no gradient of sums": ("delta -= grad_lse", "delta -= 0.0 * grad_lse", "window"),
    "no gradient by the output": ("tl.sum(out * divided", "0.0 * tl.sum(out * divided", "window"),
    "no scale": ("scale_out = scale", "scale_out = 1.0", "aligned"),
    "no scale of gradients by v": ("(grad_v * scale)", "(grad_v)", "aligned"),
    "an LSE without the scale": (" + math.log(scale)", "", "window"),
    "no slope": ("grad = grad_0 * (", "grad = grad_0 * (1.0 + 0.0 * ", "window"),
    "one piece's slope": ("grad += grad_1", "grad += 0.0 * grad_1", "pasted"),
    "features of hidden queries": ("q = torch.where(queries_shown, q, 0.0)", "q = q", "hidden"),
    "features of hidden keys": ("k = torch.where(keys_shown.mT, k, 0.0)", "k = k", "hidden"),
    "no gradient of random features": ("total += tl.sum(terms", "total += 0.0 * tl.sum(terms",
                                       "random"),
    "sums of another head": ("sums.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)",
                             "sums.repeat(1, q.shape[1] // k.shape[1], 1)", "decays"),
    "whole numbers alone": ("rest = (sums - whole)", "rest = (0.0 * sums)", "decays"),
    "infinite logarithms": (".clamp(min=-111.0)", "", "decays"),
    "gradients of weights of 0": ("ds = tl.where(shown, ds * slope, 0.0)",
                                  "ds = tl.where(scores == 0.0, 0.0, ds * slope)",
                                  "more queries than decays"),
    "decays behind the last key": ("tl.minimum(q_idx, kv_len - 1)", "q_idx",
                                   "more queries than decays"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    spec, call = CALLS[name]
    check_pairs(rendered_module(spec), spec, call)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]
    spec, found_by = CALLS[call]
    module = rendered_module(spec, edit_source=with_slip(old, new))
    if name == "infinite logarithms":  # of which differences are no numbers of int32
        with pytest.raises(InterpreterError, match="int32 overflow in sub"):
            check_pairs(module, spec, found_by)
        return
    with pytest.raises(AssertionError, match="error"):
        check_pairs(module, spec, found_by)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_decays_may_be_large(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind 200,000 keys that forget everything: float32 does not hold such whole numbers."""
    of = linear(relu(), decay=DECAY)
    module = rendered_module(AttentionSpec(16, dtype, mask=sliding_window(9, 0), normaliser=of))
    sums_of = module._decays_of_keys
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 40, 16, generator=generator).to(getattr(torch, dtype))
               for _ in range(3))  # fmt: skip
    decay = -torch.rand(1, 1, 40, generator=generator)

    def far(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        whole, rest = sums_of(*given)
        return whole - 22_222_222, rest

    def results() -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, decay)]
        out = module.attention(*leaves[:3], decay=leaves[3])
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)

    near = results()
    monkeypatch.setattr(module, "_decays_of_keys", far)
    assert all(map(torch.equal, results(), near))


WINDOW = AttentionSpec(16, "float32", mask=sliding_window(20, 0), normaliser=linear(elu_plus_one()))


@pytest.mark.parametrize("run", ["attention", "reference"])
def test_a_subnormal_sum_counts_as_none(run: str) -> None:
    module = rendered_module(WINDOW)
    found = (results_with(module, WINDOW, x, run=run) for x in (SUBNORMAL, NONE))
    assert not unequal(*found)


def test_a_subnormal_sum_is_found_to_be_divided_by() -> None:
    edit = with_slip("tl.abs(l_i) < 1.1754943508222875e-38", "l_i == 0.0")
    module = rendered_module(WINDOW, edit_source=edit)
    assert "out" in unequal(*(results_with(module, WINDOW, x) for x in (SUBNORMAL, NONE)))


@pytest.mark.parametrize("least", ["7.888609052210118e-31", "1.1754943508222875e-38"])
def test_what_tiny_sums_divide_may_overflow(least: str) -> None:
    """So these have no gradient; with that of a sum from 2^-126 on, others were NaN."""
    edit = with_slip("tl.abs(lse) >= 7.888609052210118e-31", f"tl.abs(lse) >= {least}")
    module = rendered_module(WINDOW, edit_source=edit)
    found = [results_with(module, WINDOW, x, of_lse=0.0) for x in (TINY, NONE)]
    of_sums = [{name: x[name] for name in "qkv"} for x in found]
    assert bool(unequal(*of_sums)) == (least != "7.888609052210118e-31")


@pytest.mark.parametrize("decay", [None, DECAY])
def test_both_algorithms_agree(decay: Tensor | None) -> None:
    """On a mask that either can have, to a few roundings of float32."""
    linearly = AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=decay)
    )
    pairwise = replace(linearly, normaliser=replace(linearly.normaliser, algorithm="quadratic"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 50, 16, generator=generator) for heads in (2, 1, 1))
    given = {} if decay is None else {"decay": -torch.rand(1, 1, 50, generator=generator)}
    results = []
    for spec in (linearly, pairwise):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *given.values())]
        module = rendered_module(spec)
        out, lse = module.attention(
            *leaves[:3], **dict(zip(given, leaves[3:], strict=True)), return_lse=True
        )
        results.append((out, lse, *torch.autograd.grad((out * v).sum() + lse.sum(), leaves)))
    assert all(torch.allclose(*x, atol=1e-4, rtol=1e-4) for x in zip(*results, strict=True))

"""Parts of the keys, each called by itself, merged to the output of all."""

from __future__ import annotations

import functools
import math
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, sigmoid_attention
from support.fake_gpu import fake_gpu, is_address, module_on
from support.variants import rendered_module, shipped_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

D = 64
SPECS = {
    "full": AttentionSpec(D, "float32"),
    "sigmoid": AttentionSpec(D, "float32", normaliser=sigmoid_attention()),
}


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name])


def _inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 20, D, requires_grad=True)
    return q, *(torch.randn(2, 2, 50, D, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize("name", ["full", "sigmoid"])
@pytest.mark.parametrize("ends", [(50,), (1, 50), (20, 20, 33, 50), (0, 50)], ids=str)
def test_parts_are_the_whole(name: str, ends: tuple[int, ...]) -> None:
    """Output, LSE and gradients of both; a part may have no key."""
    module = _module(name)
    q, k, v = _inputs()
    whole = module.attention(q, k, v, return_lse=True)
    begins = (0, *ends[:-1])
    parts = [
        module.attention(q, k[:, :, begin:end], v[:, :, begin:end], return_lse=True)
        for begin, end in zip(begins, ends, strict=True)
    ]
    merged = module.merge(*zip(*parts, strict=True))
    for mine, right in zip(merged, whole, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    grads = [torch.randn_like(x) for x in whole]
    for mine, right in zip(
        torch.autograd.grad(merged, (q, k, v), grads),
        torch.autograd.grad(whole, (q, k, v), grads),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_rows_without_keys_in_any_part() -> None:
    module = _module("full")
    outs = torch.zeros(2, 1, 1, 3, D, requires_grad=True)
    lses = torch.tensor([[0.5, -math.inf, -math.inf], [1.0, 2.0, -math.inf]]).view(2, 1, 1, 3)
    lses.requires_grad_()
    out, lse = module.merge(outs, lses)
    assert lse[0, 0, 1] == 2.0 and lse[0, 0, 2] == -math.inf and not out.any()
    grads = torch.autograd.grad((out.sum() + lse[..., :2].sum()), (outs, lses))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][..., 2].any() and grads[1][0, 0, 0, 1] == 0


def test_shares_do_not_overflow() -> None:
    outs = [torch.full((1, 1, 1, D), x) for x in (1.0, 3.0)]
    lses = [torch.full((1, 1, 1), x) for x in (3e38, 3e38)]
    out, lse = _module("full").merge(outs, lses)
    assert (out == 2.0).all() and lse == 3e38
    out, _ = _module("full").merge(outs, [torch.zeros(1, 1, 1), torch.full((1, 1, 1), 200.0)])
    assert (out == 3.0).all()


def test_outputs_keep_their_dtype() -> None:
    parts = [torch.randn(1, 1, 5, D).bfloat16() for _ in range(2)]
    out, lse = _module("full").merge(parts, [torch.zeros(1, 1, 5)] * 2)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, ((parts[0].float() + parts[1].float()) / 2).bfloat16())


OUT, LSE = torch.zeros(1, 2, 3, D), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "outs: got 0 for 0 lses; pass one of each call"),
        ([OUT], [LSE, LSE], "outs: got 1 for 2 lses; pass one of each call"),
        (
            [OUT, OUT[:, :1]],
            [LSE, LSE[:, :1]],
            f"outs[1]: got shape (1, 1, 3, {D}), outs[0] has (1, 2, 3, {D}); pass equal shapes",
        ),
        ([OUT], [LSE[..., :2]], "lses[0]: got shape (1, 2, 2); pass (1, 2, 3)"),
    ],
)
def test_what_does_not_fit_is_named(
    outs: list[torch.Tensor], lses: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _module("full").merge(outs, lses)


def test_a_variant_with_a_sink_has_none() -> None:
    """Each call would count the sink."""
    assert not hasattr(shipped_module("sinks_softmax_d64"), "merge")
    assert hasattr(shipped_module("causal_d128"), "merge")


def test_compiled_without_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    module = rendered_module(SPECS["full"])
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where torch looks for its names
    parts = [torch.randn(1, 2, 3, D, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 2, 3, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(module.merge, fullgraph=True, backend="aot_eager")
    got, right = compiled(parts, lses), module.merge(parts, lses)
    for mine, same in zip(got, right, strict=True):
        torch.testing.assert_close(mine, same)
    grads = [torch.autograd.grad(x[0].sum() + x[1].sum(), (*parts, *lses)) for x in (got, right)]
    for mine, same in zip(*grads, strict=True):
        torch.testing.assert_close(mine, same)


def test_a_repeated_launch_passes_what_an_ordinary_one_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of either pass, and of other parts: their number, their dtype and their strides."""
    gpu = fake_gpu(monkeypatch)
    module = module_on(
        gpu, SPECS["full"], monkeypatch, edit_source=lambda x: x.replace("first.is_cuda", "True")
    )
    calls = (
        (2, torch.float32, False),
        (3, torch.float32, False),
        (2, torch.float16, False),
        (2, torch.float32, True),
    )
    noted: list[Any] = []
    for _ in range(2):
        for count, dtype, strided in calls:
            outs = [torch.zeros(2, 4, 8, D, dtype=dtype) for _ in range(count)]
            lses = [torch.zeros(2, 4, 8) for _ in range(count)]
            if strided:
                outs, lses = ([x.transpose(1, 2) for x in xs] for xs in (outs, lses))
            parts = [x.requires_grad_() for x in (*outs, *lses)]
            both = module.merge(parts[:count], parts[count:])
            first, _ = module.merge(parts[:count], parts[count:])
            torch.autograd.grad(both[0].float().sum() + both[1].sum(), parts)
            torch.autograd.grad(first.sum(), parts)
            names = {x.data_ptr(): f"part {i}" for i, x in enumerate(parts)}
            noted.append(_named(tuple(gpu.calls), names))
            gpu.calls.clear()
        kept = len(module._LAUNCHES)
    ordinary, repeated = noted[: len(calls)], noted[len(calls) :]
    assert ordinary == repeated and [len(x) for x in ordinary] == [4] * len(calls)
    assert all(f"part {2 * calls[i][0] - 1}" in str(x) for i, x in enumerate(ordinary))
    assert kept == 3 * len(calls)


def _named(x: Any, names: dict[int, str]) -> Any:
    """Notes with names for addresses."""
    if isinstance(x, tuple):
        return tuple(_named(y, names) for y in x)
    return names.get(x, "another") if is_address(x) else x

"""Parts of the keys, each called by itself, merged to the output of all."""

from __future__ import annotations

import functools
import math
import re
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, sigmoid_attention
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

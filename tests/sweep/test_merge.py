"""The kernels of `merge` in the interpreter, against torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, sigmoid_attention
from support.variants import rendered_module

D = 24
SPECS = {
    "softmax": AttentionSpec(D, "float16"),
    "sigmoid": AttentionSpec(D, "float16", normaliser=sigmoid_attention()),
}
#: Parts, their dtype, and whether rows of heads lie side by side: one part, and more than a kernel
#: takes.
CASES = (
    (1, torch.float16, False),
    (2, torch.float32, True),
    (3, torch.float16, True),
    (9, torch.float16, False),
)


def _parts(count: int, dtype: torch.dtype, strided: bool) -> list[list[torch.Tensor]]:
    """Outputs (2, 3, 25, D) and LSEs; some rows have no key in any part, or none in one."""
    torch.manual_seed(count)
    outs = [torch.randn(2, 25, 3, D).to(dtype) for _ in range(count)]
    lses = [torch.randn(2, 25, 3) * 4 for _ in range(count)]
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for rows in (slice(3, 5), slice(10 + i, 11 + i)):
            out[:, rows], lse[:, rows] = 0.0, -math.inf
        lse[:, 20] += 100.0 * i
    moved = [[x.transpose(1, 2) for x in xs] for xs in (outs, lses)]
    return [[x if strided else x.contiguous() for x in xs] for xs in moved]


def _by_kernel(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in which nothing but kernels merges."""
    monkeypatch.setattr(module, "_merge_in_torch", None)
    return module


@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_outputs_and_gradients(
    name: str, case: tuple[int, torch.dtype, bool], of_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = rendered_module(SPECS[name])
    outs, lses = _parts(*case)
    parts = [x.requires_grad_() for x in (*outs, *lses)]
    wide = [x.detach().double().requires_grad_() for x in parts]
    count, dtype = case[:2]
    right = module._merge_in_torch(wide[:count], wide[count:], torch.float64)
    got = _by_kernel(module, monkeypatch).merge(outs, lses)
    assert [x.dtype for x in got] == [dtype, torch.float32]
    near = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    for x, exact in zip(got, right, strict=True):
        torch.testing.assert_close(x.double(), exact.detach(), **near)
    grads = [torch.randn_like(x).expand_as(x) for x in got][: 1 + of_lse]
    right_grads = torch.autograd.grad(
        right[: len(grads)], wide, [x.double() for x in grads], materialize_grads=True
    )
    for x, exact in zip(
        torch.autograd.grad(got[: len(grads)], parts, grads, materialize_grads=True),
        right_grads,
        strict=True,
    ):
        torch.testing.assert_close(x.double(), exact, **near)


def test_only_the_lse_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _by_kernel(rendered_module(SPECS["softmax"]), monkeypatch)
    outs, lses = _parts(2, torch.float32, False)
    lses = [x.requires_grad_() for x in lses]
    _, lse = module.merge(outs, lses)
    finite = lse.isfinite()
    grads = torch.autograd.grad(lse[finite].sum(), lses)
    torch.testing.assert_close(grads[0] + grads[1], finite.float())


def test_nan_of_a_part_is_nan_of_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its output, or in its LSE as of a sequence with wrong lengths."""
    module = _by_kernel(rendered_module(SPECS["softmax"]), monkeypatch)
    outs, lses = _parts(3, torch.float16, False)
    outs[1][0, 1, 7, 3], lses[2][1, 2, 9] = math.nan, math.nan
    out, lse = module.merge(outs, lses)
    wrong = torch.zeros_like(out, dtype=torch.bool)
    wrong[0, 1, 7, 3], wrong[1, 2, 9] = True, True
    assert torch.equal(out.isnan(), wrong)
    assert torch.equal(lse.isnan(), wrong[..., 0])


def test_parts_in_different_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one query each: a dimension of size 1 may have any stride; other parts are copied."""
    module = rendered_module(SPECS["softmax"])
    outs, lses = _parts(2, torch.float32, False)
    right = module.merge(outs, lses)
    module = _by_kernel(module, monkeypatch)
    moved = [outs[0].mT.contiguous().mT, outs[1].transpose(0, 2).contiguous().transpose(0, 2)]
    for x, same in zip(
        module.merge(moved, [lses[0].mT.contiguous().mT, lses[1]]), right, strict=True
    ):
        torch.testing.assert_close(x, same, rtol=0, atol=0)
    one = [x[:, :, :1].transpose(1, 2) for x in (*outs, *lses)]
    for x, same in zip(module.merge(one[:2], one[2:]), right, strict=True):
        torch.testing.assert_close(x, same[:, :, :1].transpose(1, 2), rtol=0, atol=0)


def test_what_the_kernel_does_not_take_is_merged_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other columns, no rows, dtypes that differ, float64; gradients of gradients."""
    module = rendered_module(SPECS["softmax"])
    outs, lses = _parts(2, torch.float32, False)
    parts = [x.requires_grad_() for x in (*outs, *lses)]
    out, _ = module.merge(outs, lses)
    grads = torch.autograd.grad(out.square().sum(), parts, create_graph=True)
    wide = [x.detach().double().requires_grad_() for x in parts]
    exact, _ = module._merge_in_torch(wide[:2], wide[2:], torch.float64)
    right = torch.autograd.grad(exact.square().sum(), wide, create_graph=True)
    twice = [
        torch.autograd.grad(sum(x.sin().sum() for x in g), x)
        for g, x in ((grads, parts), (right, wide))
    ]
    for x, same in zip(*twice, strict=True):
        torch.testing.assert_close(x.double(), same, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(module, "_launch_merge", None)
    for given in (
        ([x[..., :5] for x in outs], lses),
        ([x[:0] for x in outs], [x[:0] for x in lses]),
        ([outs[0], outs[1].half()], lses),
        ([x.double() for x in outs], [x.double() for x in lses]),
    ):
        module.merge(*given)

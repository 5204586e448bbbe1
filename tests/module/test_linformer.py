"""Linformer: keys and values projected along the sequence, then attended to as any others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen import (
    AttentionSpec,
    causal,
    linear,
    relu,
    sliding_window,
    softcap,
    softmax,
)
from flashgen.loader import Variant
from flashgen.validate import validate
from support.oracle import error_and_bound
from support.slip import with_slip
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

SPEC = AttentionSpec((16, 24), "float32", linformer=40)


def drawn(heads: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors of a call with a matrix of each head, or one for all."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 4, 35, 16), "k": (2, 2, 70, 16), "v": (2, 2, 70, 24),
        "projection_k": (heads, 40, 70), "projection_v": (2, 40, 70),
    }  # fmt: skip
    found = {x: torch.randn(y, generator=generator) for x, y in shapes.items()}
    found |= {x: y / 70**0.5 for x, y in found.items() if "projection" in x}
    return {x: y.to(dtype).requires_grad_() for x, y in found.items()}


def by_softmax(q: Any, k: Any, v: Any, projection_k: Any, projection_v: Any) -> torch.Tensor:
    k, v = projection_k @ k, projection_v @ v
    scores = q @ k.repeat_interleave(2, 1).mT / 4.0
    return scores.softmax(-1) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("heads", [1, 2])
def test_values_and_gradients(heads: int) -> None:
    check(rendered_module(SPEC), drawn(heads))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_projected(projection_v, v)", "_projected(projection_k, v)"),
        ("_projected(projection_k, k)", "_projected(projection_k.detach(), k)"),
        ("scale=scale,\n        return_lse", "scale=0.5,\n        return_lse"),
    ],
)
def test_a_defect_is_found(old: str, new: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"error|not have been used"):
        check(rendered_module(SPEC, edit_source=with_slip(old, new)), drawn())


def check(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    grad = torch.randn(2, 4, 35, 24, generator=torch.Generator().manual_seed(1))
    found = []
    for run, dtype in ((module.attention, torch.float32), (by_softmax, torch.float64)):
        given = {x: y.detach().to(dtype).requires_grad_() for x, y in tensors.items()}
        out = run(**given)
        grads = torch.autograd.grad(out, tuple(given.values()), grad.to(dtype))
        found.append(dict(zip(("out", *given), (out, *grads), strict=True)))
    for name, mine in found[0].items():
        right = found[1][name].detach()
        error, allowed = error_and_bound(mine.detach(), right, right.float(), 4.0)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


class _Largest(TorchDispatchMode):
    """The most elements that a tensor has which an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_matrices_are_not_copied_for_batch_entries(heads: int, strided: bool) -> None:
    """Nor are their gradients: of five entries each would be the largest tensor by far."""
    for edit in (str, with_slip("if batch == 1 or", "if True or")):
        module = rendered_module(SPEC, edit_source=edit)
        projection, x = torch.randn(heads, 40, 70), torch.randn(5, 2, 70, 16)
        if strided:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        leaves = (projection.requires_grad_(), x.requires_grad_())
        with _Largest() as largest:
            out = module._projected(*leaves)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        torch.testing.assert_close(out, projection @ x)
        torch.testing.assert_close(grads, torch.autograd.grad((projection @ x).sum(), leaves))
        assert (largest.elements == max(x.numel(), projection.numel())) == (edit is str)


def test_reference_lse_and_compile() -> None:
    module, tensors = rendered_module(SPEC), drawn()
    out, lse = module.attention(**tensors, return_lse=True)
    assert lse.shape == (2, 4, 35)
    exact = {x: y.detach().double() for x, y in tensors.items()}
    torch.testing.assert_close(module.reference(**exact), by_softmax(**exact))
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tensors), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projection_k": torch.zeros(2, 40, 64)}, r"^projection_k: got shape \(2, 40, 64\); pass "
         r"\(2, 40, 70\), or with 1 for the heads"),
        ({"projection_v": torch.zeros(4, 40, 70)}, r"^projection_v: got shape \(4, 40, 70\)"),
        ({"projection_v": None}, "^projection_v: got NoneType; pass a torch.Tensor"),
        ({"projection_k": torch.zeros(2, 40, 70).half()}, "^projection_k: got torch.float16; "),
        ({"v": torch.zeros(2, 2, 64, 24)}, "^v: got kv_len 64, k has 70; pass equal lengths"),
        ({"k": torch.zeros(2, 2, 70)}, r"^k: got 3 dimensions; pass \(batch"),
        ({"q": torch.zeros(2, 4, 35, 8)}, "^q: got head_dim 8"),
    ],
)  # fmt: skip
def test_what_a_call_refuses(change: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rendered_module(SPEC).attention(**(drawn() | change))


def findings(**fields: Any) -> list[str]:
    variant = Variant("tiny", replace(SPEC, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


def test_good_fields() -> None:
    for fields in (
        {},
        {"score": softcap(30.0)},
        {"normaliser": softmax(sink=0.5)},
        {"dropout": True},
    ):
        assert findings(**fields) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": causal()}, "mask=causal(): each projected key is made of all keys, those after a "
         "query among them; write full(), or leave linformer out"),
        ({"mask": sliding_window(8, 0)}, "mask=sliding_window(8, 0): each projected key is made of "
         "all keys, so that no mask can hide one of them; write full(), or leave linformer out"),
        ({"linformer": 0}, "linformer=0: not a number of keys; write one from 1 on, or leave it "
         "out"),
        ({"linformer": True}, "linformer=True: not a number of keys; write one from 1 on, or leave "
         "it out"),
        ({"normaliser": linear(relu())}, "normaliser=linear(relu()): is not for projected keys; "
         "leave it or linformer out"),
        ({"forms": ("dense", "varlen")}, "forms=('dense', 'varlen'): is not for projected keys; "
         "leave it or linformer out"),
        ({"score": lambda score, b, h, q_idx, kv_idx: score - kv_idx}, "score=score: reads "
         "positions, which projected keys do not have; leave it out, or leave linformer out"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    assert findings(**fields) == [f"specs/tiny.py: tiny: {message}"]


def test_digests() -> None:
    specs = [SPEC, replace(SPEC, linformer=None), replace(SPEC, linformer=41)]
    assert len({spec.digest for spec in specs}) == 3

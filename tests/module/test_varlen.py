"""`varlen_attention` of a module on the CPU: what it refuses, derivatives, and the operator."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, full
from support.cases import Case
from support.packed import Packing, hold_all_gradients, hold_outputs, offsets, packed
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*run the eager reference")

FORMS = ("dense", "varlen")
SHIFT = Tensor("shift", ("batch", "kv_len"))
NEAR = Tensor("near", ("num_q_heads", "q_len", "kv_len"))
EQUAL = AttentionSpec(16, mask=causal(), forms=FORMS)
OF_KEYS = AttentionSpec(
    16,
    "float32",
    mask=full(),
    score=lambda s, b, h, q, kv: s + SHIFT[b, kv] + NEAR[h, q, kv],
    forms=FORMS,
)
BY_NUMBER = AttentionSpec(
    16, "float32", mask=lambda b, h, q, kv: (kv % 2 == b % 2) | (kv == q), dropout=True, forms=FORMS
)


@pytest.fixture(scope="module")
def equal() -> ModuleType:
    return rendered_module(EQUAL, name="equal")


@pytest.fixture(scope="module")
def of_keys() -> ModuleType:
    return rendered_module(OF_KEYS, name="of_keys")


def _zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **{"dtype": torch.float32, **options})


CU = offsets((4, 6))
GOOD = {
    "q": _zeros(12, 4, 16),
    "k": _zeros(13, 2, 16),
    "v": _zeros(13, 2, 16),
    "cu_seqlens_q": CU,
    "cu_seqlens_kv": offsets((5, 7)),
    "max_q_len": 6,
    "max_kv_len": 7,
    "shift": _zeros(13),
    "near": _zeros(4, 6, 7),
}
REFUSED = [
    ("q", [1], TypeError, "q: got list; pass a torch.Tensor"),
    ("k", _zeros(13, 2, 16, dtype=torch.float16), TypeError,
     "k: got torch.float16; of_keys was built for torch.float32"),
    ("q", _zeros(1, 4, 12, 16), ValueError,
     "q: got 4 dimensions; pass (tokens, heads, head_dim), or call attention with "
     "(batch, heads, seq, head_dim)"),
    ("v", _zeros(13, 2, 8), ValueError, "v: got head_dim 8; of_keys was built for 16"),
    ("q", _zeros(12, 4, 32)[..., ::2], ValueError,
     "q: its last dimension has stride 2; make it contiguous"),
    ("v", _zeros(12, 2, 16), ValueError, "v: got 12 tokens, k has 13; pass as many as k"),
    ("v", _zeros(13, 4, 16), ValueError, "v: got 4 heads, k has 2; pass as many as k"),
    ("q", _zeros(12, 3, 16), ValueError, "k: got 2 heads for 3 of q; pass a divisor of q's"),
    ("k", _zeros(13, 2, 16, device="meta"), ValueError,
     "k: is on meta, q on cpu; pass one device"),
    ("cu_seqlens_q", [0, 4], TypeError, "cu_seqlens_q: got list; pass a torch.Tensor"),
    ("cu_seqlens_q", CU.long(), TypeError, "cu_seqlens_q: got torch.int64; pass torch.int32"),
    ("cu_seqlens_q", CU[None], ValueError,
     "cu_seqlens_q: got shape (1, 3); pass (num_sequences + 1,)"),
    ("cu_seqlens_q", CU[:0], ValueError,
     "cu_seqlens_q: got shape (0,); pass (num_sequences + 1,)"),
    ("cu_seqlens_kv", CU[:2], ValueError,
     "cu_seqlens_kv: got shape (2,); pass (3,), as cu_seqlens_q says"),
    ("cu_seqlens_kv", CU.to("meta"), ValueError,
     "cu_seqlens_kv: is on meta, q on cpu; pass one device"),
    ("kv_lens", CU, ValueError, "kv_lens: got shape (3,); pass (2,), as cu_seqlens_q says"),
    ("max_q_len", CU[1], TypeError, "max_q_len: got Tensor; pass an int, which the host knows"),
    ("max_kv_len", -1, ValueError, "max_kv_len: got -1; pass an int from 0 to 2**30"),
    ("scale", 0, ValueError, "scale: got 0; pass a positive number of 32 bits, below 2**127"),
    ("shift", _zeros(2, 7), ValueError, "shift: got shape (2, 7); pass (13,)"),
    ("near", _zeros(4, 6, 6), ValueError, "near: got shape (4, 6, 6); pass (4, 6, 7)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_what_is_refused(
    name: str, value: Any, error: type[Exception], message: str, of_keys: ModuleType
) -> None:
    of_keys.varlen_attention(**GOOD)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        of_keys.varlen_attention(**{**GOOD, name: value})


def test_equal_lengths_take_the_same_offsets(equal: ModuleType) -> None:
    q, k = (torch.zeros(10, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    equal.varlen_attention(q, k, k, CU, CU, 6, 6)
    for changed, name in (({"cu_seqlens_kv": CU.clone()}, "cu_seqlens_kv"), ({}, "kv_lens")):
        given = {"cu_seqlens_kv": CU, "kv_lens": None if changed else CU[1:], **changed}
        with pytest.raises(ValueError, match=f"^{name}: .* is for equal lengths only; rebuild"):
            equal.varlen_attention(q, k, k, CU, max_q_len=6, max_kv_len=6, **given)


def test_dense_tensors_of_the_other_layout_are_refused(equal: ModuleType) -> None:
    q, k = (torch.zeros(10, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    with pytest.raises(ValueError, match=r"^q: got 3 dimensions; pass \(batch, heads"):
        equal.attention(q, k, k)


def test_broken_lengths_raise_if_asked_to(
    equal: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.zeros(10, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    for checks in ("0", "1"):
        monkeypatch.setenv("FLASHGEN_CHECK", checks)
        equal.varlen_attention(q, k, k, CU, CU, 6, 6)
    with pytest.raises(ValueError, match=r"^max_q_len: is 5; pass at least 6, of sequence 1$"):
        equal.varlen_attention(q, k, k, CU, CU, 5, 6)
    monkeypatch.delenv("FLASHGEN_CHECK")
    out = equal.varlen_attention(q, k, k, CU, CU, 5, 6)
    assert out[4:].isnan().all() and not out[:4].isnan().any()


PACKING = Packing((5, 0, 9, 1), (9, 4, 3, 0), (0, 3, 2, 2))


def test_values_and_gradients(of_keys: ModuleType) -> None:
    """By the reference, also of tensors that sequences share or have parts of."""
    call = packed(OF_KEYS, PACKING, torch.float32)
    leaves = [x.requires_grad_() for x in (*call.qkv, *call.params.values())]
    out, lse = of_keys.varlen_attention(*leaves[:3], **call.lengths, **call.params, return_lse=True)
    hold_outputs(OF_KEYS, PACKING, call, out.detach(), lse.detach())
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    hold_all_gradients(OF_KEYS, PACKING, call, grads, grad_out, grad_lse)


def test_the_number_of_a_sequence_reaches_masks_and_dropout() -> None:
    """As if it were an entry of that number in a batch."""
    module = rendered_module(BY_NUMBER, name="by_number")
    lens = (6, 0, 9, 4)
    call = packed(BY_NUMBER, Packing(lens, case=Case(0, 0, q_heads=2)), torch.float32)
    call.params.update(dropout_p=0.4, seed=torch.tensor([7]))
    out = module.varlen_attention(*call.qkv, **call.lengths, **call.params)
    at = 0
    for b, length in enumerate(lens):
        q, k, v = (x[at : at + length].transpose(0, 1).expand(b + 1, -1, -1, -1) for x in call.qkv)
        alone = module.reference(q, k, v, **call.params)[b].transpose(0, 1)
        torch.testing.assert_close(out[at : at + length], alone)
        at += length


def test_no_sequence_and_no_keys(of_keys: ModuleType) -> None:
    given = {**GOOD, "cu_seqlens_q": CU[:1], "cu_seqlens_kv": CU[:1], "q": _zeros(12, 4, 16) + 1}
    given["q"].requires_grad_()
    out, lse = of_keys.varlen_attention(**given, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    out.sum().backward()
    assert not given["q"].grad.any()


def test_gradients_of_cpu_tensors_are_not_compiled(of_keys: ModuleType) -> None:
    """Which no trace can do: the reference waits for the lengths."""
    torch._dynamo.reset()
    compiled = torch.compile(of_keys.varlen_attention, fullgraph=True, backend="aot_eager")
    call = packed(OF_KEYS, PACKING, torch.float32)
    out = of_keys.varlen_attention(*call.qkv, **call.lengths, **call.params)
    mine = compiled(*call.qkv, **call.lengths, **call.params)
    torch.testing.assert_close(mine, out, equal_nan=True)
    call.qkv[0].requires_grad_()
    with pytest.raises(Exception, match="gradients of packed sequences by the eager reference"):
        compiled(*call.qkv, **call.lengths, **call.params)


def test_torch_compile_of_the_same_offsets(equal: ModuleType) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(equal.varlen_attention, fullgraph=True, backend="aot_eager")
    q, k = (torch.randn(10, heads, 16).bfloat16() for heads in (4, 2))
    right = equal.varlen_attention(q, k, k, CU, CU, 6, 6)
    assert torch.equal(compiled(q, k, k, CU, CU, 6, 6), right)


def test_second_derivatives() -> None:
    spec = AttentionSpec(16, "float32", mask=causal(), forms=FORMS)
    module = rendered_module(spec, name="twice")
    q = torch.randn(10, 2, 16, requires_grad=True)
    out = module.varlen_attention(q, q, q, CU, CU, 6, 6)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (mine,) = torch.autograd.grad(grad.square().sum(), q)
    parts = [
        torch.autograd.grad(
            torch.autograd.grad(
                module.reference(x, x, x).square().sum(), x, create_graph=True
            )[0].square().sum(),
            x,
        )[0][0].transpose(0, 1)
        for x in (q[at].detach().transpose(0, 1)[None].requires_grad_()
                  for at in (slice(0, 4), slice(4, 10)))
    ]  # fmt: skip
    torch.testing.assert_close(mine, torch.cat(parts), rtol=1e-3, atol=1e-3)


def test_fake_tensors_and_the_operator(of_keys: ModuleType) -> None:
    call = packed(OF_KEYS, PACKING, torch.float32)
    given = (*call.qkv, *call.lengths.values(), 0.25, *call.params.values())
    assert of_keys.varlen_op.name().endswith("_varlen")
    torch.library.opcheck(of_keys.varlen_op, given, test_utils=("test_schema", "test_faketensor"))

"""Packed sequences by the portable kernels, forward and backward, against float64."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flashgen import (
    AttentionSpec,
    Float,
    Int,
    Tensor,
    alibi,
    causal,
    full,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
)
from flashgen.scores import t5_bias
from support.cases import Case
from support.packed import Packing, hold_varlen, int32, packed
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMS = ("dense", "varlen")
LENS = Tensor("lens", ("batch",), "int32")
KEEP = Tensor("keep", ("batch", "kv_len"), "bool")
STEP = Tensor("step", ("batch", "q_len"), "int32")
SHIFT = Tensor("shift", ("num_q_heads", "batch", "kv_len"))
NEAR = Tensor("near", ("num_q_heads", "q_len", "kv_len"))
FAR = Tensor("far", ("num_q_heads", Int("q_len_is_below", 100, min=1)))
PAIRS = Tensor("pairs", ("batch", "q_len", "kv_len"))
SLOPES = Tensor("slopes", ("num_q_heads",))
TABLE = Tensor("table", ("num_q_heads", 32))
SINKS = Tensor("sinks", ("num_q_heads",))
OF_SEQUENCE = Tensor("of_sequence", ("batch", "num_q_heads"))

SPECS = {
    "causal": AttentionSpec(16, mask=causal(), forms=FORMS),
    "full": AttentionSpec(16, mask=full(), forms=FORMS),
    "window": AttentionSpec(
        16, mask=sliding_window(Int("left", 5), 0), align="bottom_right", forms=FORMS
    ),
    "sinks": AttentionSpec(
        16,
        mask=causal(),
        align="bottom_right",
        score=softcap(Float("cap", 5.0, above=0)),
        normaliser=softmax(sink=SINKS),
        forms=FORMS,
    ),
    "alibi": AttentionSpec(24, mask=causal(), score=alibi(SLOPES), forms=FORMS),
    "t5": AttentionSpec(16, score=t5_bias(TABLE), align="top_left", forms=FORMS),
    "lengths": AttentionSpec(
        16,
        mask=lambda b, h, q, kv: (kv < LENS[b]) & ~KEEP[b, kv] & (STEP[b, q] >= kv),
        forms=FORMS,
    ),
    "shifts": AttentionSpec(
        (24, 16),
        score=lambda s, b, h, q, kv: s + SHIFT[h, b, kv] + NEAR[h, q, kv] * OF_SEQUENCE[b, h],
        forms=FORMS,
    ),
    "pairs": AttentionSpec(
        16,
        score=lambda s, b, h, q, kv: s + PAIRS[b, q, kv],
        normaliser=sigmoid_attention(),
        forms=FORMS,
    ),
    "of_sequences": AttentionSpec(
        16,
        normaliser=softmax(sink=lambda b, h: OF_SEQUENCE[b, h]),
        forms=FORMS,
    ),
}
HEADS = Case(0, 0, q_heads=2, kv_heads=1)
ALIKE = Packing((5, 0, 37, 1, 16, 33), case=HEADS)
UNEQUAL = Packing((5, 0, 37, 1, 16), (9, 4, 21, 0, 50), case=HEADS)
FEWER_QUERIES = Packing((3, 0, 20, 1, 10), (9, 4, 21, 5, 30), case=HEADS)
FEWER_KEYS = Packing((9, 4, 21, 5, 30), (3, 0, 20, 1, 10), case=HEADS)
ROOMY = Packing((5, 0, 37, 1, 16), (9, 4, 21, 0, 50), (0, 3, 20, 2, 1), case=HEADS)
CASES = [
    ("causal", ALIKE),
    ("causal", Packing((70,), padding=0, case=Case(0, 0))),
    ("causal", Packing((1, 0) * 40, case=Case(0, 0))),
    ("full", FEWER_QUERIES),
    ("full", ROOMY),
    ("window", UNEQUAL),
    ("window", ROOMY),
    ("sinks", ROOMY),
    ("alibi", ALIKE),
    ("t5", UNEQUAL),
    ("lengths", ROOMY),
    ("shifts", ROOMY),
    ("pairs", UNEQUAL),
    ("of_sequences", UNEQUAL),
]
CONFIG = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "USE_TMA": False}


@pytest.fixture(scope="module")
def module() -> Any:
    """The module of a spec, rendered once."""
    modules: dict[str, ModuleType] = {}

    def of(name: str) -> ModuleType:
        if name not in modules:
            modules[name] = rendered_module(SPECS[name], name=name)
        return modules[name]

    return of


@pytest.mark.parametrize(("name", "packing"), CASES, ids=[f"{n}-{p}" for n, p in CASES])
def test_each_sequence_is_right(name: str, packing: Packing, module: Any) -> None:
    hold_varlen(module(name), SPECS[name], packing, torch.float16, CONFIG)


#: What is broken of the offsets of sequences of 5, 20, 0, 9 and 33 tokens; those at fault.
BROKEN = {
    "begin elsewhere": ({"cu_seqlens_q": (3, 5, 25, 25, 34, 67)}, {0}),
    "begin below 0": ({"cu_seqlens_q": (-4, 5, 25, 25, 34, 67)}, {0}),
    "fall": ({"cu_seqlens_q": (0, 5, 2, 25, 34, 67)}, {1, 2}),
    "fall below 0": ({"cu_seqlens_kv": (0, 5, -9, 25, 34, 67)}, {1, 2}),
    "end past the tensor": ({"cu_seqlens_q": (0, 5, 25, 25, 34, 10**9)}, {4}),
    "begin past the tensor": ({"cu_seqlens_kv": (0, 5, 25, 25, 10**6, 10**6 + 33)}, {3, 4}),
    "more queries": ({"max_q_len": 32}, {4}),
    "more keys": ({"max_kv_len": 32}, {4}),
    "more than there is room for": ({"kv_lens": (5, 21, 0, 9, 33)}, {1}),
    "less than no keys": ({"kv_lens": (5, 20, 0, -1, 33)}, {3}),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_sequence_is_nan_and_changes_no_other(broken: str, module: Any) -> None:
    """Rows of another are the same bits; the reference agrees, and says what is wrong."""
    changed, at_fault = BROKEN[broken]
    lens = (5, 20, 0, 9, 33)
    packing = Packing(lens, lens, (0,) * 5, case=HEADS)
    call = packed(SPECS["full"], packing, torch.float16)
    full_module = module("full")
    right = call.lengths
    wrong = right | {n: int32(x) if isinstance(x, tuple) else x for n, x in changed.items()}
    before, lse_before = full_module._launch_varlen(*call.qkv, *right.values(), 0.25, CONFIG)
    out, lse = full_module._launch_varlen(*call.qkv, *wrong.values(), 0.25, CONFIG)
    grads = [
        full_module._varlen_backward_kernels(
            *call.qkv, *lengths.values(), 0.25, *saved, saved[0], None, CONFIG, CONFIG
        )
        for lengths, saved in ((right, (before, lse_before)), (wrong, (out, lse)))
    ]
    reference = full_module.varlen_reference(*call.qkv, **wrong, scale=0.25)
    spoilt = out.isnan().flatten(1).any(1)
    assert torch.equal(spoilt, reference.isnan().flatten(1).any(1))
    at = 0
    for b, length in enumerate(lens):
        rows = slice(at, at + length)
        at += length
        if b not in at_fault:
            assert torch.equal(out[rows], before[rows]), b
            assert torch.equal(lse[rows], lse_before[rows]), b
            for one, other in zip(*grads, strict=True):
                assert torch.equal(one[rows], other[rows]), b
    assert spoilt.any() and lse[spoilt].isnan().all()
    assert out[spoilt].isnan().all() and grads[1][0][spoilt].isnan().all()
    with pytest.raises(ValueError, match="pass"):
        full_module._check_lengths(*call.qkv[:2], *wrong.values())


def test_sinks_of_other_sequences_where_offsets_fall(module: Any) -> None:
    """Their gradients stay the same, though the offsets are in no order."""
    lens = (5, 20, 0, 9, 33)
    call = packed(SPECS["of_sequences"], Packing(lens, lens, case=HEADS), torch.bfloat16)
    sinks = call.params["of_sequence"].requires_grad_()
    grads = []
    for changed in ({}, {"cu_seqlens_q": int32(BROKEN["fall"][0]["cu_seqlens_q"])}):
        lengths = {**call.lengths, **changed}
        out = module("of_sequences").varlen_attention(*call.qkv, **lengths, **call.params)
        grads += torch.autograd.grad(out.square().sum(), sinks)
    torch.testing.assert_close(grads[1][[0, 3, 4]], grads[0][[0, 3, 4]])
    assert grads[1][2].isnan().all()


def test_no_sequence_has_sinks(module: Any) -> None:
    q, none = torch.zeros(4, 2, 16).bfloat16().requires_grad_(), int32((0,))
    sinks = torch.zeros(0, 2, requires_grad=True)
    out = module("of_sequences").varlen_attention(q, q, q, none, none, 1, 1, of_sequence=sinks)
    assert all(not x.any() for x in torch.autograd.grad(out.sum(), (q, sinks)))


def test_torch_compile(module: Any) -> None:
    """Both passes are one operator each, whatever the lengths."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module("sinks").varlen_attention, fullgraph=True, backend=counter)
    for packing in (UNEQUAL, Packing((9, 3, 2), (4, 40, 2), case=HEADS)):
        call = packed(SPECS["sinks"], packing, torch.bfloat16)
        qkv = [x.nan_to_num().requires_grad_() for x in call.qkv]
        leaves = [*qkv, call.params["sinks"].requires_grad_()]
        results = []
        for function in (module("sinks").varlen_attention, compiled):
            out = function(*qkv, **call.lengths, **call.params)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2, "lengths caused a recompile"


#: Faults of the kernels, by what is replaced: a call of a variant that shows each.
MUTANTS = [
    ("q_src += q_start.to(tl.int64) * stride_qm", "q_src += kv_start.to(tl.int64) * stride_qm",
     "full", UNEQUAL),
    ("k_src += kv_start.to(tl.int64) * stride_kn", "k_src += q_start.to(tl.int64) * stride_kn",
     "full", UNEQUAL),
    ("row = (q_start + offs_m)", "row = (kv_start + offs_m)", "full", FEWER_KEYS),
    ("row = (kv_start + offs_n)", "row = (q_start + offs_n)", "full", FEWER_QUERIES),
    ("lse_ptr = rows_ptr + head.to(tl.int64) * total_q + q_start",
     "lse_ptr = rows_ptr + head.to(tl.int64) * total_q", "full", UNEQUAL),
    ("grad_k = tl.where(is_key, grad_k, poison)", "pass", "full", ROOMY),
    ("in_rows = offs_n < room", "in_rows = offs_n < kv_len", "full", ROOMY),
    ("keys = given", "pass", "full", ROOMY),
    ("q_first = tl.load(slots_ptr + 1)", "q_first = 0", "causal", ALIKE),
    ("_ptr + kv_start.to(tl.int64) * keep_stride_1", "_ptr", "lengths", ROOMY),
    ("_ptr + q_start.to(tl.int64) * step_stride_1", "_ptr", "lengths", ROOMY),
    (r"(total_\d_ptr) \+ kv_start.to\(tl.int64\) \* total_\d_stride_2", r"\1", "shifts", ROOMY),
    ("])[sequence]", "])[:1].expand(len(lse), -1)", "of_sequences", UNEQUAL),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "name", "packing"), MUTANTS)
def test_a_fault_is_found(before: str, after: str, name: str, packing: Packing) -> None:
    def edit(source: str) -> str:
        pattern = before if before.startswith("(") else re.escape(before)
        assert re.search(pattern, source)
        return re.sub(pattern, after, source)

    mutant = rendered_module(SPECS[name], name=name, edit_source=edit)
    with pytest.raises((AssertionError, RuntimeError)):
        hold_varlen(mutant, SPECS[name], packing, torch.float16, CONFIG)

"""FlashAttention 4 as a peer, with a stand-in for it that computes in torch on the CPU."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import accuracy, attentions, cells, fa4
from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import Cell
from benchmarks.inputs import make_inputs
from benchmarks.tile_cells import CELLS, data_of

CPU = torch.device("cpu")
LENGTH, SMALL = 256, {"WINDOW": 50, "DOCUMENT": 100, "PREFIX": 70, "CHUNK": 128, "SINKS": 2}

DECIDED = list({cell.mask: cell for cell in CELLS if cell.mask != "causal"}.values())

#: Attentions that it has not, and how that is said.
MISSING = {"alibi_slopes": "no gradients of what a score function reads", "dropout": "no dropout"}


class Blocks:
    """What a table of blocks was made of."""

    def __init__(self, **fields):
        self.__dict__ |= fields


def dense(q, k, v, *, causal=False, window_size=None, softcap=0.0, score_mod=None, mask_mod=None,
          block_sparse_tensors=None):  # fmt: skip
    """Its flash_attn_func, of tensors (batch, seq, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    h = torch.arange(q.shape[1])[:, None, None]
    seen = j <= i if causal else j <= len(j[0])
    if window_size:
        seen = seen & (i - j <= window_size[0]) & (j - i <= window_size[1])
    if mask_mod:
        seen = mask_mod(0, h, i, j, None, None)
        assert_blocks(block_sparse_tensors, seen)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod:
        scores = score_mod(scores, 0, h, i, j, None, None)
    out = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v
    return out.transpose(1, 2), None


def assert_blocks(table, seen):
    """Partly visible blocks and whole ones, as the mask has them."""
    assert table.block_size == (128, 128)
    blocks = seen.reshape(seen.shape[-2] // 128, 128, seen.shape[-1] // 128, 128)
    shown, whole = blocks.any(3).any(1), blocks.all(3).all(1)
    for row in range(len(shown)):
        full = table.full_block_idx[0, 0, row, : table.full_block_cnt[0, 0, row]].tolist()
        part = table.mask_block_idx[0, 0, row, : table.mask_block_cnt[0, 0, row]].tolist()
        assert sorted(full) == whole[row].nonzero()[:, 0].tolist()
        assert sorted(part) == (shown & ~whole)[row].nonzero()[:, 0].tolist()


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """Its flash_attn_varlen_func, of tensors (tokens, heads, head_dim)."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    bounds = cu_seqlens_q.tolist()
    parts = [
        scaled_dot_product_attention(
            *(x[first:end].transpose(0, 1) for x in (q, k, v)), is_causal=causal
        ).transpose(0, 1)
        for first, end in itertools.pairwise(bounds)
    ]
    return torch.cat(parts), None


@pytest.fixture
def stand_in(monkeypatch):
    """flash_attn and the language of its functions, where a function is Python."""
    language, compiler = ModuleType("cutlass"), ModuleType("cutlass.cute")
    compiler.jit, compiler.math = lambda function: function, ModuleType("math")
    compiler.math.exp2 = lambda x, fastmath: torch.exp2(x)
    language.Float32, language.cute = torch.float32, compiler
    language.Int32 = language.Uint8 = None
    package, functions = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    functions.flash_attn_func, functions.flash_attn_varlen_func = dense, varlen
    functions.utils = ModuleType("flash_attn.cute.utils")
    functions.utils.scalar_to_ssa = lambda x, dtype: x
    sparsity = ModuleType("flash_attn.cute.block_sparsity")
    sparsity.BlockSparseTensorsTorch = Blocks
    for module in (language, compiler, package, functions, sparsity):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "benchmarks.fa4_mods", raising=False)
    monkeypatch.setattr(cells, "TOKENS", LENGTH)
    monkeypatch.setattr(cells, "WIDTH", 32)
    for name, value in SMALL.items():
        monkeypatch.setattr(attentions, name, value)
        monkeypatch.setattr(fa4, name, value)
    yield
    sys.modules.pop("benchmarks.fa4_mods", None)  # made of the stand-in


def error_of(peer, name):
    c = Cell(f"{name}_d16", name, LENGTH, 16, 16, "float32")
    attention, inputs = ATTENTIONS[name](LENGTH, CPU), make_inputs(c, CPU)
    with torch.no_grad(), peer(c, attention, inputs) as call:
        return accuracy.relative_error([call()], accuracy.exact_heads(c, attention, inputs))


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name not in MISSING])
def test_it_is_told_of_every_attention(stand_in, name):
    assert error_of(fa4.fa4, name) < 1e-6


@pytest.mark.parametrize("name", MISSING)
def test_what_it_has_not_is_said(stand_in, name):
    with pytest.raises(NotImplementedError, match=MISSING[name]):
        error_of(fa4.fa4, name)


def test_chunks_as_a_mask_function(stand_in):
    assert error_of(fa4.fa4_mask_mod, "chunked") < 1e-6
    with pytest.raises(NotImplementedError, match="no prefix"):
        error_of(fa4.fa4_mask_mod, "prefix")


def test_chunks_that_do_not_divide_the_sequence_are_not_a_batch(stand_in, monkeypatch):
    monkeypatch.setattr(fa4, "CHUNK", 100)
    with pytest.raises(NotImplementedError, match="no chunked"):
        error_of(fa4.fa4, "chunked")


class Lanes(torch.Tensor):
    """Positions as its functions get them: a vector, whose element 0 is a number."""

    def __getitem__(self, index):
        assert index == 0
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("cell", DECIDED, ids=lambda cell: cell.mask)
def test_its_functions_of_masks_that_tensors_decide(stand_in, cell):
    from benchmarks import fa4_mods

    if data_of(replace(cell, length=64), CPU).parameters:
        cell = replace(cell, length=1024)
    data = data_of(cell, CPU)
    h = torch.arange(cell.heads)[:, None, None]
    q, kv = (
        torch.arange(0, cell.length, cell.length // 37)[:, None],
        torch.arange(0, cell.length, 7),
    )
    mod = fa4_mods.DECIDED[cell.mask](cell.heads // data.heads)
    lanes = (x.as_subclass(Lanes) for x in (h * 0, h, q, kv))
    found = mod(*lanes, None, list(data.aux)).as_subclass(torch.Tensor)
    expected = data.mask_mod(0, h, q, kv)
    assert torch.equal(*torch.broadcast_tensors(found, expected))


def test_blocks_of_queries_for_the_backward_pass(stand_in):
    from benchmarks import fa4_mods

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx - 130 * h) & (kv_idx // 128 != 1)

    of_queries, of_keys = fa4_mods.both_blocks_of(mask_mod, 512, CPU, 2)
    h, at = torch.arange(2)[:, None, None], torch.arange(512)
    seen = mask_mod(0, h, at[:, None], at).unflatten(2, (4, 128)).unflatten(1, (4, 128))
    shown, whole = seen.any(4).any(2), seen.all(4).all(2)
    for table, turned in ((of_queries, False), (of_keys, True)):
        for expected, counts, index in (
            (shown & ~whole, table.mask_block_cnt, table.mask_block_idx),
            (whole, table.full_block_cnt, table.full_block_idx),
        ):
            of_rows = expected.mT if turned else expected
            for head, row in itertools.product(range(2), range(4)):
                listed = index[0, head, row, : counts[0, head, row]].tolist()
                assert sorted(listed) == of_rows[head, row].nonzero()[:, 0].tolist()


def test_without_it_the_reason_is_an_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError):
        error_of(fa4.fa4, "causal")

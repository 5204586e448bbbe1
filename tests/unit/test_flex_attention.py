"""Functions written for FlexAttention, pasted: they trace, and mean what they mean there.

Each function is written once. What it captures is a number, or a tensor for torch that is a
declared `Tensor` or `Constant` for flashgen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, flex_attention, or_masks

from flashgen import AttentionSpec, Constant, Tensor, clamp, full
from flashgen.loader import Variant
from flashgen.masks import as_mask
from flashgen.reference import attention_reference
from flashgen.symbolic import derive_bounds, derive_q_bounds, trace
from flashgen.validate import validate
from support.visits import Call, check

BATCH, HEADS, LENGTH = 2, 4, 24

Captured = dict[str, Any]


def causal(captured: Captured) -> Callable[..., Any]:
    def causal_mask(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    return causal_mask


def sliding_window_causal(captured: Captured) -> Callable[..., Any]:
    WINDOW = 5

    def mask_mod(b, h, q_idx, kv_idx):
        causal_mask = q_idx >= kv_idx
        window_mask = q_idx - kv_idx <= WINDOW
        return causal_mask & window_mask

    return mask_mod


def prefix_lm(captured: Captured) -> Callable[..., Any]:
    prefix_length = captured["prefix_length"]

    def prefix_mask(b, h, q_idx, kv_idx):
        return kv_idx <= prefix_length[b]

    def prefix_lm_causal(b, h, q_idx, kv_idx):
        return torch.logical_or(prefix_mask(b, h, q_idx, kv_idx), q_idx >= kv_idx)

    return prefix_lm_causal


def document_causal(captured: Captured) -> Callable[..., Any]:
    document_id = captured["document_id"]

    def document_causal_mask(b, h, q_idx, kv_idx):
        causal_mask = q_idx >= kv_idx
        document_mask = document_id[q_idx] == document_id[kv_idx]
        return causal_mask & document_mask

    return document_causal_mask


def restarting(captured: Captured) -> Callable[..., Any]:
    """Positions that start anew in every document, handed to a mask of positions."""
    document_id, offsets = captured["document_id"], captured["offsets"]

    def inner(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx % 2 == 0)

    def doc_mask_mod(b, h, q_idx, kv_idx):
        same_doc = document_id[q_idx] == document_id[kv_idx]
        q_logical = q_idx - offsets[document_id[q_idx]]
        kv_logical = kv_idx - offsets[document_id[kv_idx]]
        return same_doc & inner(b, h, q_logical, kv_logical)

    return doc_mask_mod


def natten(captured: Captured) -> Callable[..., Any]:
    H, W, K = 4, 6, 3

    def get_x_y(idx):
        return idx // W, idx % W

    def natten_mask_mod(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        kernel_x = q_x.clamp(K // 2, (H - 1) - K // 2)
        kernel_y = q_y.clamp(K // 2, (W - 1) - K // 2)
        hori_mask = (kernel_x - kv_x).abs() <= K // 2
        vert_mask = (kernel_y - kv_y).abs() <= K // 2
        return hori_mask & vert_mask

    return natten_mask_mod


def natten_in_tiles(captured: Captured) -> Callable[..., Any]:
    """Tokens of a canvas of 8 x 8 lie tile by tile, each of 4 x 4."""
    W, K, T = 8, 3, 4

    def get_x_y_tiled(idx):
        t_id, i_id = idx // (T * T), idx % (T * T)
        t_x, t_y = t_id // (W // T), t_id % (W // T)
        return t_x * T + i_id // T, t_y * T + i_id % T

    def natten_mask_mod(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y_tiled(q_idx)
        kv_x, kv_y = get_x_y_tiled(kv_idx)
        kernel_x = torch.clamp(q_x, K // 2, (W - 1) - K // 2)
        kernel_y = torch.clamp(q_y, K // 2, (W - 1) - K // 2)
        near_x = torch.abs(kernel_x - kv_x) <= K // 2
        return near_x & (torch.abs(kernel_y - kv_y) <= K // 2)

    return natten_mask_mod


def joined(captured: Captured) -> Callable[..., Any]:
    """FlexAttention's own functions join masks."""
    prefix_length = captured["prefix_length"]

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 5

    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length[b]

    return or_masks(prefix, and_masks(near, causal(captured)))


def dilated(captured: Captured) -> Callable[..., Any]:
    def mask_mod(b, h, q_idx, kv_idx):
        diff = torch.abs(q_idx - kv_idx)
        in_window = diff <= 8
        is_dilated = torch.remainder(diff, 2) == h % 2
        return in_window & is_dilated

    return mask_mod


def paged(captured: Captured) -> Callable[..., Any]:
    lengths, block_of = captured["prefix_length"], captured["block_of"]

    def mask_mod(b, h, q_idx, kv_idx):
        logical = block_of[b, kv_idx // 4] * 4 + kv_idx % 4
        return torch.where(logical < lengths[b] + 12, q_idx >= logical, False)

    return mask_mod


def alibi(captured: Captured) -> Callable[..., Any]:
    def alibi_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / HEADS))
        bias = (kv_idx - q_idx) * scale
        return score + bias

    return alibi_mod


def alibi_table(captured: Captured) -> Callable[..., Any]:
    alibi_bias = captured["slopes"]

    def alibi_mod(score, b, h, q_idx, kv_idx):
        return score + alibi_bias[h] * (kv_idx - q_idx)

    return alibi_mod


def soft_cap(captured: Captured) -> Callable[..., Any]:
    cap = 2

    def score_mod(score, b, h, q_idx, kv_idx):
        score = score / cap
        score = torch.tanh(score)
        return score * cap

    return score_mod


def relative_positional(captured: Captured) -> Callable[..., Any]:
    def relative_score_mod(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx)

    return relative_score_mod


def relative_table(captured: Captured) -> Callable[..., Any]:
    table = captured["table"]

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = torch.clamp(q_idx - kv_idx, min=-3, max=3)
        return score + table[h, distance + 3]

    return score_mod


def causal_score(captured: Captured) -> Callable[..., Any]:
    def causal_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    return causal_mod


def checkerboard(captured: Captured) -> Callable[..., Any]:
    def score_mod(score, b, h, q_idx, kv_idx):
        score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
        score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)
        return score

    return score_mod


def full_bias(captured: Captured) -> Callable[..., Any]:
    bias = captured["bias"]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[b, h, q_idx, kv_idx]

    return score_mod


def head_temperature(captured: Captured) -> Callable[..., Any]:
    slopes = captured["slopes"]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(slopes[h]) + torch.sin(q_idx / 3.0).clamp(min=0)

    return score_mod


def squared(captured: Captured) -> Callable[..., Any]:
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.nn.functional.relu(score) ** 2

    return score_mod


DECLARED = {
    tensor.name: tensor
    for tensor in (
        Tensor("prefix_length", ("batch",), "int32"),
        Tensor("document_id", ("kv_len",), "int32", sorted=True),
        Tensor("offsets", (None,), "int32"),
        Tensor("block_of", ("batch", 6), "int32"),
        Tensor("slopes", ("num_q_heads",)),
        Tensor("table", ("num_q_heads", 7)),
        Tensor("bias", ("batch", "num_q_heads", "q_len", "kv_len"), "float16"),
    )
}

MASKS = [causal, sliding_window_causal, prefix_lm, document_causal, restarting, natten, dilated]
MASKS += [paged, joined, natten_in_tiles]
SCORES = [alibi, alibi_table, soft_cap, relative_positional, relative_table, causal_score]
SCORES += [checkerboard, full_bias, head_temperature, squared]


def values() -> Captured:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(LENGTH, dtype=torch.int32) * 3 // LENGTH
    pages = [torch.randperm(6, generator=generator) for _ in range(BATCH)]
    return {
        "prefix_length": torch.tensor([3, 17], dtype=torch.int32),
        "document_id": ids,
        "offsets": torch.tensor([0, 8, 16], dtype=torch.int32),
        "block_of": torch.stack(pages).int(),
        "slopes": torch.rand(HEADS, generator=generator),
        "table": torch.randn(HEADS, 7, generator=generator),
        "bias": torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=generator).half(),
    }


def flex(score_mod: Callable[..., Any], captured: Captured) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's own answer in float64, by a score function alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is slow unless compiled
        out, aux = flex_attention(*qkv(), score_mod=score_mod, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def qkv() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, HEADS, LENGTH, 8)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_a_mask_mod_pasted(make: Callable[..., Any]) -> None:
    captured = values()
    theirs = make(captured)

    def masked(score, b, h, q_idx, kv_idx):
        return torch.where(theirs(b, h, q_idx, kv_idx), score, -float("inf"))

    spec = AttentionSpec(head_dim=16, mask=make(DECLARED))
    given = {param.name: captured[param.name] for param in spec.params}
    mine = attention_reference(*qkv(), spec.mask, params=given, return_lse=True)
    torch.testing.assert_close(mine, flex(masked, captured))
    alone = (causal, sliding_window_causal, natten, natten_in_tiles, dilated)
    assert make in alone or given


@pytest.mark.parametrize("make", MASKS + SCORES, ids=lambda make: make.__name__)
def test_what_it_captures_as_constants(make: Callable[..., Any]) -> None:
    """Nothing is left for the call to pass."""
    captured = values()
    known = make({name: Constant(name, value) for name, value in captured.items()})
    if make in MASKS:
        mine, theirs = AttentionSpec(head_dim=16, mask=known), make(captured)

        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(theirs(b, h, q_idx, kv_idx), score, -float("inf"))
    else:
        mine, score_mod = AttentionSpec(head_dim=16, score=known), make(captured)
    assert mine.params == () and not validate(Variant("known", mine, "specs/known.py"))
    result = attention_reference(*qkv(), mine.mask, score=mine.score, return_lse=True)
    torch.testing.assert_close(result, flex(score_mod, captured), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_a_score_mod_pasted(make: Callable[..., Any]) -> None:
    captured = values()
    spec = AttentionSpec(head_dim=16, score=make(DECLARED))
    given = {param.name: captured[param.name] for param in spec.params}
    mine = attention_reference(*qkv(), full(), score=spec.score, params=given, return_lse=True)
    torch.testing.assert_close(mine, flex(make(captured), captured), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sides", [(16, 5, 4), (32, 7, 8), (64, 13, 8)])
def test_tiles_of_a_canvas_leave_few_conditions(sides: tuple[int, int, int]) -> None:
    """What is derived is sound, and no longer than a kernel's source should be."""
    W, K, T = sides

    def tiled(idx):
        tile, inner = idx // (T * T), idx % (T * T)
        n = W // T
        return (tile // n) * T + inner // T, (tile % n) * T + inner % T

    def mask_mod(b, h, q_idx, kv_idx):
        near = [
            abs(clamp(at, K // 2, W - 1 - K // 2) - key) <= K // 2
            for at, key in zip(tiled(q_idx), tiled(kv_idx), strict=True)
        ]
        return near[0] & near[1]

    mask = as_mask(mask_mod)
    if W == 16:
        check(mask, Call(W * W, W * W, 64, 32, {}))
    predicate = trace(mask)
    for bounds in (derive_bounds(predicate), derive_q_bounds(predicate)):
        assert not bounds.exact
        for interval in bounds.intervals:
            assert sum(expr.count_ops() for expr in interval.expressions) < 200

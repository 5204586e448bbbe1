"""Where queries stand among keys: what a spec says for all of its functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen import (
    AttentionSpec,
    Mask,
    Score,
    Tensor,
    additive_bias,
    alibi,
    block_sparse,
    causal,
    chunked,
    document,
    full,
    global_tokens,
    kv_len,
    natten_2d,
    prefix_lm,
    q_len,
    relative_bias,
    sink_tokens,
    sliding_window,
    softcap,
    strided,
    tree,
)
from flashgen.loader import Variant
from flashgen.masks.sparse import dilated
from flashgen.scores import t5_bias
from flashgen.validate import validate

EITHER = pytest.mark.parametrize("align", ["top_left", "bottom_right"])

MASKS: list[Callable[..., Mask]] = [
    causal,
    lambda **at: sliding_window(3, 1, **at),
    lambda **at: prefix_lm(4, **at),
    lambda **at: chunked(8, **at),
    lambda **at: global_tokens(2, **at),
    lambda **at: dilated(2, **at),
    lambda **at: strided(4, **at),
    document,
    lambda **at: (document(**at) & causal(**at)) | ~chunked(4, **at) | sink_tokens(2),
]
SCORES: list[Callable[..., Score]] = [
    lambda **at: alibi(8, **at),
    lambda **at: relative_bias(5, **at),
    lambda **at: t5_bias(**at),
    lambda **at: softcap(3.0).then(alibi(8, **at)),
]


@EITHER
@pytest.mark.parametrize("mask", MASKS)
def test_a_spec_says_it_for_masks_of_flashgen(mask: Callable[..., Mask], align: str) -> None:
    spec = AttentionSpec(64, mask=mask(), align=align)
    assert spec.mask == mask(align=align) and not spec.equal_lengths and spec.unaligned == ()
    assert AttentionSpec(64, mask=mask(align=align), align=align).mask == mask(align=align)


@EITHER
@pytest.mark.parametrize("score", SCORES)
def test_and_for_score_functions(score: Callable[..., Score], align: str) -> None:
    spec = AttentionSpec(64, score=score(), align=align)
    assert spec.score == score(align=align) and not spec.equal_lengths


def mine(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx < 5 * kv_idx)


def test_functions_of_others_count_keys() -> None:
    spec = AttentionSpec(64, mask=mine, score=lambda s, b, h, q, kv: s - q, align="bottom_right")

    def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mine(b, h, q_idx + (kv_len - q_len), kv_idx)

    assert spec.mask == Mask(moved, "mine") and spec.mask.label == "mine"
    assert spec.score == Score(lambda s, b, h, q, kv: s - (q + (kv_len - q_len)), "score")
    # Once, however often a spec is made of another.
    assert replace(replace(spec, head_dim=128), dtype="float16").mask == spec.mask
    joined = AttentionSpec(64, mask=causal() & mine, align="bottom_right")
    assert joined.mask == causal(align="bottom_right") & Mask(moved, "mine")
    assert AttentionSpec(64, mask=mine, align="top_left").mask == Mask(mine, "mine")


@EITHER
@pytest.mark.parametrize("mask", [full(), sink_tokens(4), tree(), block_sparse(block=64)])
def test_what_has_no_position_stays(mask: Mask, align: str) -> None:
    bias = additive_bias(Tensor("bias", ("num_q_heads", "q_len", "kv_len")))
    spec = AttentionSpec(64, mask=mask, score=bias, align=align)
    assert spec.mask == mask and spec.score == bias


def test_what_is_for_equal_lengths_is_named() -> None:
    spec = AttentionSpec(
        64, mask=chunked(1500) & causal(align="bottom_right"), score=softcap(3.0).then(alibi(8))
    )
    assert spec.unaligned == ("chunked(1500)", "alibi(8)") and spec.can_be_aligned
    image = AttentionSpec(64, mask=natten_2d(8, 8, 3) & causal(), align="bottom_right")
    assert image.unaligned == ("natten_2d(8, 8, 3)",) and not image.can_be_aligned


ENDS = Tensor("ends", ("batch", "q_len"), "int32")


def problems(spec: AttentionSpec) -> list[str]:
    return [found.problem for found in validate(Variant("x", spec, Path("x.py")))]


def test_a_tensor_that_q_idx_leaves_is_refused() -> None:
    def ends(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < ENDS[b, q_idx]

    def lifted(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + ENDS[b, q_idx]

    found = ["with align='bottom_right' q_idx counts keys, and ends has q_len of them"]
    assert problems(AttentionSpec(64, mask=ends, align="bottom_right")) == found
    assert problems(AttentionSpec(64, score=lifted, align="bottom_right")) == found
    assert problems(AttentionSpec(64, mask=ends, align="top_left")) == []
    assert problems(AttentionSpec(64, mask=tree(), align="bottom_right")) == []


@EITHER
def test_arguments_out_of_order_are_refused_all_the_same(align: str) -> None:
    """A function that is moved is called by another, whose own are in order."""

    def mask(b: Any, h: Any, kv_idx: Any, q_idx: Any) -> Any:
        return q_idx >= kv_idx

    def score(s: Any, b: Any, h: Any, kv_idx: Any, q_idx: Any) -> Any:
        return s + q_idx

    for spec in (AttentionSpec(64, mask=mask), AttentionSpec(64, score=score)):
        [found] = problems(spec)
        assert "and its argument `kv_idx`" in found
        assert problems(replace(spec, align=align)) == [found]


def test_digests_of_specs_without_it_stay() -> None:
    plain = AttentionSpec(64, mask=causal())
    assert plain.digest == replace(plain, align=None).digest
    assert plain.digest != AttentionSpec(64, mask=causal(), align="top_left").digest

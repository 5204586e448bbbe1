"""Which plans have the Gluon kernels of the backward pass, and what these are made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    additive_bias,
    alibi,
    block_sparse,
    causal,
    full,
    relative_bias,
    sigmoid_attention,
    softcap,
    t5_bias,
)
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.head_dims import Segment
from flashgen.symbols import evaluate
from support.loads import kernel_spec
from support.vocabulary import VOCABULARY

ENDS = Tensor("ends", ("batch", "q_len"), "int32")
DROPPING = "with dropout and a score gradient no consumer has all factors"
SLOPES = Tensor("slopes", ("num_q_heads",))
HEATS = Tensor("heats", ("batch", "kv_len"))
ROWS = Tensor("rows", ("batch", "q_len"))
OF_ALL_HEADS = Tensor("of_all_heads", ("batch", 1, "q_len", "kv_len"))
PAIRS = Tensor("pairs", ("batch", "num_q_heads", "q_len", "kv_len"), "float16")
TURNED = Tensor("turned", ("batch", "num_q_heads", "kv_len", "q_len"), "float16")
EACH_ROW = Mask(lambda b, h, q, kv: kv < ENDS[b, q], "each row has its end")


def heated_keys(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Each key has a temperature."""
    return score * HEATS[b, kv_idx]


def warmed_keys(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Each key has a bias."""
    return score + HEATS[b, kv_idx]


def both_neighbours(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Two pairs read an element."""
    return score + PAIRS[b, h, q_idx, kv_idx] + PAIRS[b, h, q_idx, kv_idx + 1]


def of(spec: AttentionSpec) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(lower(spec, "x")))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (AttentionSpec(64, mask=causal()), ""),
        (AttentionSpec(128, "float16", score=softcap(5.0)), ""),
        (AttentionSpec(56, normaliser=sigmoid_attention()), ""),
        (AttentionSpec((120, 128)), ""),
        (AttentionSpec(64, "float32"), "float32: its tiles are of 16-bit elements"),
        (AttentionSpec((16, 96)), ""),
        (AttentionSpec((64, 136)), ""),
        (AttentionSpec((256, 64)), ""),
        (AttentionSpec((264, 64)), "its tiles have 256 columns at most"),
        (AttentionSpec(256, dropout=True), ""),
        (AttentionSpec(64, dropout=True, deterministic=True), ""),
        (AttentionSpec(128, score=softcap(20.0), dropout=True), ""),
        (AttentionSpec(136, score=softcap(20.0), dropout=True), DROPPING),
        (AttentionSpec(64, deterministic=True), ""),
        (AttentionSpec(192, score=alibi(SLOPES)), ""),
        (kernel_spec("keys", 192), ""),
        (
            AttentionSpec(192, score=softcap(5.0).then(warmed_keys)),
            "no consumer has both factors of what heats learns",
        ),
        (AttentionSpec(64, mask=block_sparse()), ""),
        (AttentionSpec(192, mask=block_sparse()), ""),
        (kernel_spec("ids", 64), ""),
        (AttentionSpec(64, mask=EACH_ROW, deterministic=True), ""),
        (AttentionSpec(64, mask=EACH_ROW), ""),
        (
            AttentionSpec(64, score=lambda s, b, h, q_idx, kv_idx: 1.0 * (q_idx - kv_idx)),
            "its score function leaves the products out",
        ),
        (kernel_spec("half_keys", 64), ""),
        (AttentionSpec(64, score=heated_keys), ""),
        (AttentionSpec(128, score=heated_keys), "what heats learns depends on the scores"),
        (AttentionSpec(320, dropout=True), "its tiles have 256 columns at most"),
    ],
)
def test_which_plans_have_it(spec: AttentionSpec, reason: str) -> None:
    assert of(spec).why_not == reason


def test_dropout_takes_tiles_of_fewer_queries() -> None:
    """Of 64 x 64 elements of dq there is no half that a consumer could compute."""
    narrow, wide = of(AttentionSpec(64, dropout=True)), of(AttentionSpec(128, dropout=True))
    assert (narrow.block_m, narrow.grad_q_by, narrow.consumers_meet) == (64, "keys", False)
    assert (wide.block_m, wide.grad_q_by, wide.consumers_meet) == (64, "columns", True)


def widths(parts: tuple[Segment, ...]) -> list[int]:
    return [part.width for part in parts]


def test_tiles_of_the_widths() -> None:
    narrow, wide = of(AttentionSpec((56, 16))), of(AttentionSpec((56, 72)))
    assert (narrow.width, wide.width) == (64, 128)
    assert (narrow.grad_q_by, wide.grad_q_by) == ("queries", "columns")
    assert (widths(wide.qk_parts), widths(wide.v_parts), wide.block_n) == ([128], [64, 16], 128)
    widest = of(AttentionSpec((192, 72)))
    assert (widths(widest.qk_parts), widths(widest.v_parts)) == ([128, 64], [64, 16])
    assert widest.block_n == 64
    for names in (narrow, wide, widest):
        for rows in (names.block_m, names.of_queries.constants["BLOCK_M"]):
            assert names.backward.rows_multiple % rows == 0, "tiles reach past the rows"


@pytest.mark.parametrize(
    ("head_dim", "qk", "v"),
    [
        (48, [64], [64]),
        (128, [128], [128]),
        ((128, 64), [128], [128]),
        (80, [64, 16], [64, 16]),
        ((96, 64), [64, 32], [64]),
        ((64, 96), [128], [64, 32]),  # two consumers have 64 columns of dq each
        (112, [128], [128]),  # 64 + 32 + 16
        (136, [128, 16], [128, 16]),
        (176, [128, 64], [128, 64]),  # 128 + 32 + 16
        ((192, 128), [128, 64], [128]),
        ((256, 160), [256], [128, 32]),
        (224, [256], [256]),
        ((256, 128), [256], [128]),
    ],
)
def test_columns_are_in_two_segments_or_padded(
    head_dim: int | tuple[int, int], qk: list[int], v: list[int]
) -> None:
    names = of(AttentionSpec(head_dim))
    assert (widths(names.qk_parts), widths(names.v_parts)) == (qk, v)
    assert names.segmented == (len(qk) + len(v) > 2)


def test_each_consumer_adds_to_the_sums_of_its_columns() -> None:
    """Of dq one has the first segment and one the second, or each has half of 128 columns."""
    segments, halves = of(AttentionSpec((80, 96))), of(AttentionSpec((128, 96)))
    assert segments.sums_widths == (64, 32, 16) and segments.grad_q_sums == (0, 2)
    assert (segments.qk_sums, segments.v_sums) == ((0, 2), (0, 1))
    assert halves.sums_widths == (64, 32) and halves.grad_q_sums == (0, 0)
    assert halves.sums_of_qk == ((0, 64), (64, 64)) and halves.sums_of_v == ((0, 64), (64, 32))
    assert (segments.columns, segments.cleared_columns) == (96, 32)


def test_where_another_kernel_computes_the_gradient_of_q() -> None:
    found = {
        spec: (of(spec).has_roles, of(spec).split)
        for spec in (AttentionSpec(128), AttentionSpec(136), AttentionSpec(64, deterministic=True))
    }
    assert list(found.values()) == [(False, False), (True, True), (False, True)]


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(64, score=t5_bias().then(lambda s, b, h, q, kv: s + ROWS[b, q])),
        AttentionSpec(
            64, mask=EACH_ROW, score=t5_bias().then(lambda s, b, h, q, kv: s + ROWS[b, q])
        ),
    ],
)
def test_where_that_is_the_portable_one(spec: AttentionSpec) -> None:
    names = of(spec)
    assert names.split and names.queries_portable and not names.both_in_gluon
    assert (names.why_not, names.replaces, names.text.input_gradients) == ("", ("keys",), ())


@pytest.mark.parametrize(
    ("spec", "over"),
    [
        (VOCABULARY["temperature"].spec("float16", 128), "heads"),
        (VOCABULARY["relative_bias"].spec("float16", 192), "diagonals"),
        (AttentionSpec(128, score=softcap(8.0).then(relative_bias(128))), "diagonals"),
        (VOCABULARY["t5_bias"].spec("float16", 64, deterministic=True), "diagonals"),
        (kernel_spec("rows", 64), "rows"),
        (replace(kernel_spec("bias", 64), deterministic=True), "elements"),
        (AttentionSpec(64, score=additive_bias(OF_ALL_HEADS)), "elements"),
        (AttentionSpec(192, score=alibi(SLOPES)), "heads"),
    ],
)
def test_where_it_learns(spec: AttentionSpec, over: str) -> None:
    """What a kernel over keys cannot sum."""
    names = of(spec)
    assert names.both_in_gluon and names.queries_learn and not names.why_not
    assert names.replaces == ("keys", "queries") and names.text.input_gradients == ()
    items = names.of_queries.text.input_gradients
    assert {item.over for item in items} == {over}
    assert items == names.backward.of_grad_q_and_inputs.input_gradients


@pytest.mark.parametrize(
    ("spec", "stored", "tiled", "cleared"),
    [
        (AttentionSpec(64, mask=causal(), score=additive_bias()), True, "bias", True),
        (AttentionSpec(96, mask=causal(), score=additive_bias()), True, "bias", True),
        (AttentionSpec(64, mask=block_sparse(), score=additive_bias()), True, "bias", False),
        # Not stored by the single pass: the element is another pair's, or of a tensor read twice.
        (AttentionSpec(64, score=lambda s, b, h, q, kv: s + TURNED[b, h, kv, q]), False, "", False),
        (AttentionSpec(64, score=both_neighbours), False, "", False),
    ],
)
def test_where_a_single_pass_stores_gradients_of_pairs(
    spec: AttentionSpec, stored: bool, tiled: str, cleared: bool
) -> None:
    names = of(spec)
    assert (not names.split, names.tiled, bool(names.cleared)) == (stored, tiled, cleared)
    assert bool(names.pairs) == stored
    # Elements of a tile are not gathered, except those of 32 bits that buffers of ds cannot hold.
    assert (4 in names.gathers) == (not tiled or names.tiled_in_ds)
    assert names.tiled_in_ds == (bool(tiled) and spec.qk_head_dim > 64)


def test_where_dropout_splits_the_pass() -> None:
    """At 128 columns registers hold no derivatives beside weights that are marked."""
    found = [
        of(AttentionSpec(head_dim, score=score, dropout=True)).split
        for head_dim in (64, 128)
        for score in (None, softcap(20.0), alibi(SLOPES), alibi(8))
    ]
    assert found == [False] * 4 + [False, True, True, False]


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(64, score=alibi(SLOPES), deterministic=True),
        kernel_spec("half_keys", 64),
        AttentionSpec(192, mask=causal()),
        kernel_spec("keys", 192),
        AttentionSpec(64, mask=EACH_ROW),
        AttentionSpec(64, mask=EACH_ROW, deterministic=True),
        VOCABULARY["temperature"].spec("float16", 64),
        VOCABULARY["relative_bias"].spec("float16", 128),
        VOCABULARY["t5_bias"].spec("float16", 64),
        AttentionSpec(64, score=softcap(8.0).then(relative_bias(128))),
    ],
)
def test_where_all_gradients_are_of_gluon_kernels(spec: AttentionSpec) -> None:
    names = of(spec)
    assert not names.queries_portable and names.both_in_gluon == names.split
    assert (names.why_not, names.replaces) == ("", ("keys", "queries"))
    assert names.text is names.backward.of_both


def test_what_is_learned_of_keys_stays_with_their_tile() -> None:
    """Beside what the kernel over queries learns."""
    spec = AttentionSpec(
        128, score=lambda s, b, h, q, kv: s + 0.5 * HEATS[b, kv] - SLOPES[h] * (q - kv) ** 2 / s
    )
    names = of(spec)
    assert names.queries_learn and not names.why_not
    assert [(item.tensor, item.over) for item in names.text.input_gradients] == [
        ("heats", "columns")
    ]
    of_queries = names.backward.of_queries.input_gradients
    assert [(item.tensor, item.over) for item in of_queries] == [("slopes", "heads")]
    assert {item.variable for item in names.backward.input_gradients} == {"total_0", "total_1"}
    assert names.results == (
        "grad_k_desc",
        "grad_v_desc",
        f"{names.text.input_gradients[0].variable}_ptr",
    )


def test_what_is_masked() -> None:
    plain, masked = of(AttentionSpec(64)), of(AttentionSpec(64, mask=causal()))
    assert (plain.masks, plain.masks_queries) == (True, False)
    assert [condition.text() for condition in plain.conditions] == ["kv_idx < kv_len"]
    assert masked.masks_queries and masked.visits.splits
    runs = of(AttentionSpec(64, mask=full() & ~causal(align="top_left")))
    assert runs.masks_queries


def test_a_kernel_hands_on_what_is_read() -> None:
    """Not the positions of keys where no tile is masked by them, nor a scale that nothing has."""
    names = of(AttentionSpec(64, mask=causal(), score=alibi(8)))
    assert names.reads_kv_idx and "qk_scale" in names.keys
    assert names.call[:6] == (
        "num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len", "scale",
    )  # fmt: skip
    assert evaluate(names.backward.q_bounds.intervals[0].begin, {"kv_first": 5}) == 5

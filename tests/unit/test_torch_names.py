"""torch's functions, casts and conditions in arithmetic: traced, they mean what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from flashgen import Int, Mask
from flashgen.constants import elements_of
from flashgen.errors import MaskError
from flashgen.loader import Variant
from flashgen.masks import as_mask
from flashgen.reference import visibility
from flashgen.spec import AttentionSpec
from flashgen.symbolic import derive_bounds, torch_source, trace
from flashgen.symbols import KV_IDX, Q_IDX, SCORE, evaluate
from flashgen.tracing.expr import Expr, bound, concrete
from flashgen.validate import validate
from support.idioms import LENGTH, MASKS, OURS, SCORES, THEIRS, VALUES
from support.visits import Call, check

POSITIONS = list(product(range(2), (0, 3), range(LENGTH), range(LENGTH)))


def elements(of: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: elements_of(name, value) for name, value in of.items()}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_means_what_torch_computes(name: str) -> None:
    made = MASKS[name]
    mask = Mask(lambda *indices: made(OURS, *indices), "mask")
    traced = trace(mask).expr
    known = elements(VALUES)
    for b, h, q, kv in POSITIONS:
        theirs = made(THEIRS, *map(torch.tensor, (b, h, q, kv)))
        values = {**known, "b": b, "h": h, "q_idx": q, "kv_idx": kv}
        assert bool(evaluate(traced, values)) == bool(theirs)
    torch_source(traced)
    assert derive_bounds(trace(mask)).intervals
    given = {param.name: VALUES[param.name] for param in mask.params}
    seen = visibility(mask, 2, 1, LENGTH, LENGTH, params=given)
    assert bool(seen.broadcast_to(2, 1, LENGTH, LENGTH)[1, 0, 5, 4]) == bool(
        made(THEIRS, *map(torch.tensor, (1, 0, 5, 4)))
    )


@pytest.mark.parametrize("name", SCORES)
def test_a_score_means_what_torch_computes(name: str) -> None:
    made = SCORES[name]
    spec = AttentionSpec(head_dim=16, score=lambda *given: made(OURS, *given))
    assert not validate(Variant("mine", spec, "specs/mine.py"))
    traced = spec.score.traced.sym
    known = elements(VALUES)
    for score, (b, h, q, kv) in product((-40.0, -1.5, 0.0, 0.75, 12.0, 30.0), POSITIONS[::7]):
        theirs = made(
            THEIRS, torch.tensor(score, dtype=torch.float64), *map(torch.tensor, (b, h, q, kv))
        )
        values = {**known, "score": score, "b": b, "h": h, "q_idx": q, "kv_idx": kv}
        assert float(evaluate(traced, values)) == pytest.approx(float(theirs), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("product", "(q_idx >= kv_idx) & (kv_idx > q_idx - 5)"),
        ("sum above 0", "(kv_idx < 3) | (q_idx >= kv_idx)"),
        ("products of numbers", "(q_idx >= kv_idx) & (kv_idx > q_idx - 5)"),
        ("plus 1", "q_idx >= kv_idx"),
        ("is False", "kv_idx > q_idx"),
        ("is never 2", "False"),
        ("window of a float", "(q_idx >= kv_idx) & (kv_idx > q_idx - 4)"),
        ("turned", "kv_idx > q_idx - 3"),
        ("infinite", "True"),
        ("noop", "True"),
    ],
)
def test_what_is_left_of_it_is_as_if_written_with_conditions(name: str, expected: str) -> None:
    assert torch_source(trace(Mask(lambda *i: MASKS[name](OURS, *i), name)).expr) == expected


@pytest.mark.parametrize("name", ["product", "sum above 0", "window of a float", "fractions"])
def test_tiles_are_those_that_are_seen(name: str) -> None:
    check(as_mask(lambda *i: MASKS[name](OURS, *i)), Call(LENGTH, LENGTH, 4, 4, {}))


BITS_AND_ROWS = (
    "packed bits", "bits in words", "bit of the head", "packed bits by a power",
    "shifted elements", "divided by a power", "chosen blocks", "all but chosen blocks",
)  # fmt: skip


@pytest.mark.parametrize("name", BITS_AND_ROWS)
def test_bounds_keep_all_that_bits_and_rows_show(name: str) -> None:
    mask = as_mask(lambda *i: MASKS[name](OURS, *i))
    check(mask, Call(LENGTH, LENGTH, 4, 4, elements(VALUES)))


def test_a_score_of_conditions_keeps_the_scores_digits() -> None:
    """Multiplied out, ``score + 1e30 - 1e30`` would be 0."""
    traced = AttentionSpec(16, score=lambda *given: SCORES["opposite"](OURS, *given)).score.traced
    assert str(traced) == "score + where(flags[b, kv_idx] != 0, 0, -1.0e+30)"


def test_dtypes_and_devices_are_torchs() -> None:
    assert (Expr(SCORE).dtype, Expr(Q_IDX).dtype) == (torch.float32, torch.int32)
    assert (Expr(Q_IDX) > 0).dtype == torch.bool
    assert torch.zeros(2, device=Expr(Q_IDX).device).device.type == Expr(Q_IDX).device.type == "cpu"
    assert (Expr(SCORE) * 1.5).to(torch.float64).sym == SCORE * 1.5


HALVES: list[Callable[[Any], Any]] = [
    lambda x: x.half(),
    lambda x: x.bfloat16(),
    lambda x: x.to(torch.float16),
    lambda x: x.to(dtype=torch.bfloat16),
    lambda x: x.type(torch.HalfTensor),
]


@pytest.mark.parametrize("cast", HALVES)
def test_casts_to_16_bits_are_refused(cast: Callable[[Any], Any]) -> None:
    """A kernel would leave them out, where torch rounds; a condition is as exact in 16 bits."""
    for x in (Expr(SCORE) * 0.1, Expr(Q_IDX)):
        with pytest.raises(MaskError, match=r"rounds to 16 bits.*leave the cast out, or declare"):
            cast(x)
    assert str(cast(Expr(Q_IDX) > 3)) == str((Expr(Q_IDX) > 3).float())


def test_on_values_bools_are_added_and_multiplied_as_torch_does() -> None:
    left = Int("left")
    with bound({"left": 3}):
        assert concrete((left > 1) + (left > 2)) is True
        assert concrete((left > 1) * (left > 5)) is False
        assert concrete((left > 1) + 1) == 2
        assert concrete((left > 1).int()) == 1
        assert concrete(torch.max(left, torch.tensor(7))) == 7


def test_parts_of_tensors_are_indexed_further_or_refused() -> None:
    part = OURS.ids[Expr(Q_IDX)]
    assert (
        str(part) == "`ids[q_idx]`"
        and part[Expr(KV_IDX)].sym == OURS.ids[Expr(Q_IDX), Expr(KV_IDX)].sym
    )
    with pytest.raises(AttributeError, match="is a part of a declared tensor and has no `shape`"):
        _ = part.shape

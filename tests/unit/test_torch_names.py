"""torch's functions, casts and conditions in arithmetic: traced, they mean what torch computes."""

# ruff: noqa: E712, SIM300  (conditions beside True and False are the point here)

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flashgen import Int, Mask, Tensor
from flashgen.constants import elements_of
from flashgen.expr import Expr, bound, concrete
from flashgen.loader import Variant
from flashgen.masks import as_mask
from flashgen.reference import visibility
from flashgen.spec import AttentionSpec
from flashgen.symbolic import derive_bounds, torch_source, trace
from flashgen.symbols import KV_IDX, Q_IDX, SCORE, evaluate
from flashgen.validate import validate
from support.visits import Call, check

LENGTH = 12
VALUES = {
    "flags": torch.tensor([[i % 3 == 0 for i in range(LENGTH)], [i > 4 for i in range(LENGTH)]]),
    "marked": torch.tensor([i % 4 < 2 for i in range(LENGTH)]),
    "ids": torch.arange(2 * LENGTH, dtype=torch.int32).reshape(2, LENGTH) % 5,
    "spans": torch.tensor([[2, 7], [0, 3]], dtype=torch.int32),
    "slopes": torch.tensor([0.5, -1.25, 3.0, 0.0], dtype=torch.float64),
}
DECLARED = {
    "flags": Tensor("flags", ("batch", "kv_len"), "bool"),
    "marked": Tensor("marked", ("kv_len",), "bool"),
    "ids": Tensor("ids", ("batch", "kv_len"), "int32"),
    "spans": Tensor("spans", ("batch", 2), "int32"),
    "slopes": Tensor("slopes", ("num_q_heads",)),
}
THEIRS, OURS = SimpleNamespace(**VALUES), SimpleNamespace(**DECLARED)
POSITIONS = list(product(range(2), (0, 3), range(LENGTH), range(LENGTH)))

# Each is given the tensors t as well.
MASKS: dict[str, Callable[..., Any]] = {
    "cast and times": lambda t, b, h, q, kv: kv <= (q > 3).to(torch.long) * 4,
    "product": lambda t, b, h, q, kv: (q >= kv) * (q - kv < 5),
    "sum above 0": lambda t, b, h, q, kv: (q >= kv) + (kv < 3) > 0,
    "sum of two is one": lambda t, b, h, q, kv: (q >= kv) + (kv < 3) == 1,
    "sum of three": lambda t, b, h, q, kv: (
        (q >= kv).int() + (kv < 8).int() + t.flags[b, kv].int() == 3
    ),
    "two of three": lambda t, b, h, q, kv: sum([q >= kv, kv < 3, t.marked[kv]]) >= 2,
    "products of numbers": lambda t, b, h, q, kv: (q >= kv).long() * (q - kv < 5).long() != 0,
    "bits of numbers": lambda t, b, h, q, kv: ((q >= kv).int() & 1) == 1,
    "times True": lambda t, b, h, q, kv: (q >= kv) * True,
    "plus 1": lambda t, b, h, q, kv: (q >= kv) + 1 == 2,
    "is 1": lambda t, b, h, q, kv: (t.flags[b, kv] == 1) & (q >= kv),
    "is not True": lambda t, b, h, q, kv: t.flags[b, kv] != True,
    "is False": lambda t, b, h, q, kv: False == (q >= kv),
    "is never 2": lambda t, b, h, q, kv: (q >= kv) == 2,
    "below": lambda t, b, h, q, kv: (q >= kv) < t.flags[b, kv],
    "at most": lambda t, b, h, q, kv: (q >= kv) <= t.flags[b, kv],
    "half": lambda t, b, h, q, kv: t.flags[b, kv].float() > 0.5,
    "same flags": lambda t, b, h, q, kv: t.marked[q] == t.marked[kv],
    "other flags": lambda t, b, h, q, kv: t.marked[q] != t.marked[kv],
    "beside a number": lambda t, b, h, q, kv: (q % 2 == 0) == kv % 2,
    "opposite": lambda t, b, h, q, kv: 1 - t.flags[b, kv].float() == 0,
    "minimum": lambda t, b, h, q, kv: torch.minimum(q >= kv, t.marked[kv]),
    "bool of bool": lambda t, b, h, q, kv: (q >= kv).bool() & (q > kv).to(torch.bool),
    "logical on numbers": lambda t, b, h, q, kv: torch.logical_and(q % 2, kv % 3),
    "logical not": lambda t, b, h, q, kv: torch.logical_not(kv % 3),
    "noop": lambda t, b, h, q, kv: b.new_ones(size=(), dtype=torch.bool, device=b.device),
    "transformers": lambda t, b, h, q, kv: (
        q.new_ones((), dtype=torch.bool) & (q >= kv).to(q.device) & (kv > q - 3).to("cpu")
    ),
    "likes": lambda t, b, h, q, kv: (
        (torch.zeros_like(q) <= kv) & torch.ones_like(q > kv) & (torch.full_like(q, 2.5) <= kv)
    ),
    "no copies": lambda t, b, h, q, kv: (q.detach() >= kv.contiguous().clone()).cpu(),
    "to another": lambda t, b, h, q, kv: (q / 2).to(q) >= kv.to(q.device, torch.int32),
    "as another": lambda t, b, h, q, kv: (q / 2).type_as(kv) >= kv.type(torch.int64),
    "scalars": lambda t, b, h, q, kv: (torch.tensor(3) > kv) | torch.tensor(False) & (q > kv),
    "scalar first": lambda t, b, h, q, kv: torch.tensor(2) // 1 <= torch.tensor(4) - kv,
    "maximum": lambda t, b, h, q, kv: torch.max(q - 4, torch.tensor(0)) <= kv,
    "sign": lambda t, b, h, q, kv: torch.sign(q - kv) >= 0,
    "floor": lambda t, b, h, q, kv: torch.floor((q - 5) / 4) == torch.floor((kv - 5) / 4),
    "ceil": lambda t, b, h, q, kv: torch.ceil((q - 5) / 4) <= torch.ceil(kv / 3),
    "masked fill": lambda t, b, h, q, kv: (q >= kv).masked_fill(kv < 2, True),
    "window of a float": lambda t, b, h, q, kv: (q - kv < 8 / 2) & (q >= kv),
    "fractions": lambda t, b, h, q, kv: (q - kv < 2.5) & (q - kv > -1.5) & (-2.5 <= q - kv),
    "numpy": lambda t, b, h, q, kv: abs(q - kv) <= np.float64(3.7),
    "never": lambda t, b, h, q, kv: (q - kv == 2.5) | (q != kv + 0.5) & (q > kv),
    "factors": lambda t, b, h, q, kv: 2.0 * kv - 1.0 <= 0.5 * q + 0.25,
    "infinite": lambda t, b, h, q, kv: q - kv < math.inf,
    "turned": lambda t, b, h, q, kv: 2.5 > q - kv,
    "in two steps": lambda t, b, h, q, kv: t.ids[b][q] == t.ids[b, :][kv],
    "unpacked": lambda t, b, h, q, kv: (t.spans[b][0] <= kv) & (kv < list(t.spans[b])[1]),
}
SCORES: dict[str, Callable[..., Any]] = {
    "penalty": lambda t, s, b, h, q, kv: s - 10000.0 * (q < kv),
    "opposite": lambda t, s, b, h, q, kv: s + (1.0 - t.flags[b, kv].float()) * -1e30,
    "gate": lambda t, s, b, h, q, kv: s * (s > 0) + t.slopes[h] * (q >= kv).double(),
    "counts": lambda t, s, b, h, q, kv: s + ((q >= kv).int() + t.marked[kv].int()) / 4,
    "least": lambda t, s, b, h, q, kv: torch.where(q >= kv, s, torch.finfo(torch.float32).min),
    "hidden": lambda t, s, b, h, q, kv: torch.where(q >= kv, s, torch.tensor(-math.inf)),
    "filled": lambda t, s, b, h, q, kv: s.masked_fill(q < kv, -math.inf),
    "silu": lambda t, s, b, h, q, kv: F.silu(s),
    "softplus": lambda t, s, b, h, q, kv: F.softplus(s) + F.softplus(s, beta=2, threshold=3),
    "logsigmoid": lambda t, s, b, h, q, kv: F.logsigmoid(s),
    "logaddexp": lambda t, s, b, h, q, kv: torch.logaddexp(s, 10 * t.slopes[h]),
    "sign": lambda t, s, b, h, q, kv: torch.sign(s) + 2 * torch.sign(q - kv),
    "square": lambda t, s, b, h, q, kv: torch.square(s) + torch.log1p(s.abs()),
    "alpha": lambda t, s, b, h, q, kv: torch.sub(torch.add(s, q - kv, alpha=0.5), h, alpha=2),
    "turned": lambda t, s, b, h, q, kv: torch.rsub(s, 3),
    "likes": lambda t, s, b, h, q, kv: s + torch.full_like(s, 2.5) + s.new_full((), 1),
    "extremes": lambda t, s, b, h, q, kv: torch.max(s, t.slopes[h]) + torch.min(q, kv),
    "scalars": lambda t, s, b, h, q, kv: torch.tensor(3.5) * s + torch.tensor(2.0) ** (q - kv),
    "floor": lambda t, s, b, h, q, kv: s - 0.25 * torch.floor((q - kv) / 4),
}


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


def test_a_score_of_conditions_keeps_the_scores_digits() -> None:
    """Multiplied out, ``score + 1e30 - 1e30`` would be 0."""
    traced = AttentionSpec(16, score=lambda *given: SCORES["opposite"](OURS, *given)).score.traced
    assert str(traced) == "score + where(flags[b, kv_idx] != 0, 0, -1.0e+30)"


def test_dtypes_and_devices_are_torchs() -> None:
    assert (Expr(SCORE).dtype, Expr(Q_IDX).dtype) == (torch.float32, torch.int32)
    assert (Expr(Q_IDX) > 0).dtype == torch.bool
    assert torch.zeros(2, device=Expr(Q_IDX).device).device.type == Expr(Q_IDX).device.type == "cpu"
    assert (Expr(SCORE) * 1.5).to(torch.bfloat16).sym == SCORE * 1.5


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

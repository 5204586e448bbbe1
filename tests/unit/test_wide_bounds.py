"""Which masks visit too much by bounds: counted on tiles, beside every element of the mask."""

from __future__ import annotations

from typing import Any

import pytest

from docs.make_visited import counted
from docs.mask_list import MASKS
from flashgen import AttentionSpec, Int, Mask, Tensor, natten_2d
from flashgen.plan import lower
from flashgen.plan.wide_bounds import excess_of_bounds
from flashgen.symbolic import trace
from flashgen.symbolic.tile_answers import left_to_data

ALGEBRA_ALONE = [name for name, x in MASKS.items() if not left_to_data(trace(x.mask), ranges=True)]
PERIOD = Int("period", 1024, min=1)
KEEP = Tensor("keep", ("batch", "kv_len"), "bool")


@pytest.mark.parametrize("name", ALGEBRA_ALONE)
def test_what_is_counted_is_what_the_elements_say(name: str) -> None:
    excess = excess_of_bounds(trace(MASKS[name].mask))
    of_keys, of_queries = counted(MASKS[name])
    assert excess.of_keys == pytest.approx(of_keys.ratio, rel=1e-3)
    assert excess.of_queries == pytest.approx(of_queries.ratio, rel=1e-3)
    assert excess.too_wide == (max(of_keys.ratio, of_queries.ratio) > 1.05)


def _stripes(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) & ((q - kv) % PERIOD == 0)


STRIPES = Mask(_stripes, "stripes", equal_lengths=True)
KEPT = Mask(lambda b, h, q, kv: KEEP[b, kv], "kept")


@pytest.mark.parametrize(
    ("mask", "decides"),
    [
        (STRIPES, True),
        (STRIPES & KEPT, True),
        (natten_2d(64, 64, 13), False),
        (natten_2d(512, 512, 7), True),
        (KEPT, False),
    ],
    ids=["stripes", "stripes of data", "narrow images", "wide images", "padding"],
)
def test_wide_bounds_make_a_kernel_decide_tiles(mask: Mask, decides: bool) -> None:
    plan = lower(AttentionSpec(64, mask=mask), "wide")
    assert plan.classifies == decides


def test_the_build_says_what_bounds_would_visit() -> None:
    plan = lower(AttentionSpec(64, mask=STRIPES), "stripes")
    (note,) = plan.notes_of_tiles
    assert note.startswith("tiles are decided once a call, as bounds would visit 6.")
    assert "(q_idx - kv_idx) % period == 0" in note


def test_further_forms_keep_bounds() -> None:
    assert not lower(AttentionSpec(64, mask=STRIPES, forms=("dense", "varlen")), "wide").classifies


IDS, IMG = (Tensor(name, ("batch", "kv_len"), "int32") for name in ("ids", "img"))
LAST = Tensor("last", ("batch", "kv_len"), "int32")


@pytest.mark.parametrize(
    ("mask_mod", "declared"),
    [
        (lambda b, h, q, kv: (kv <= q) & (IDS[b, q] == IDS[b, kv]), "ids never falls, declare it"),
        (lambda b, h, q, kv: (kv <= q) & (q <= LAST[b, kv]), ""),
        (
            lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & (IMG[b, q] == IMG[b, kv]),
            "ids and img never fall, declare them",
        ),
        (lambda b, h, q, kv: (kv <= q) & (IDS[b, q] % 7 == IDS[b, kv] % 7), ""),
        (lambda b, h, q, kv: (kv <= q) & (IDS[b, kv // 64] == q // 64), ""),
        (lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & (q * kv % 3 < IMG[q, kv]), ""),
    ],
    ids=["ids", "ends of keys", "both", "remainders", "blocks", "what no order solves"],
)
def test_the_build_says_which_tensors_to_declare_sorted(mask_mod: Any, declared: str) -> None:
    """Where ranges then take the place of lists, and nowhere else."""
    plan = lower(AttentionSpec(64, mask=Mask(mask_mod, "mask", equal_lengths=True)), "mask")
    hints = plan.notes_of_tiles[1:]
    expected = f"if {declared} with sorted=True: ranges replace these lists"
    assert hints == ((expected,) if declared else ())


def test_what_hulls_cost_is_counted_where_numbers_alone_tell() -> None:
    *_, counted = lower(AttentionSpec(64, mask=natten_2d(64, 64, 13)), "natten").notes_of_bounds
    assert counted == (
        "bounds visit 1.00 (for gradients 1.00) times the tiles that are needed, "
        "counted at 4,096 tokens"
    )
    notes = lower(AttentionSpec(64, mask=KEPT), "kept").notes_of_bounds
    assert notes and not any("counted" in note for note in notes)

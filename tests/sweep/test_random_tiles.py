"""Any predicate over numbers, flags and ids in any order: the kernels that decide and list tiles.

Beside the mask's own function on every element, in both directions.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, assume, given, settings

from flashgen import AttentionSpec, Mask, Tensor
from flashgen.plan import classified as planning
from flashgen.plan.classified import ClassifiedTiles, classified
from flashgen.reference import visibility
from flashgen.symbolic.tile_answers import left_to_data
from flashgen.symbolic.trace import Predicate
from support.bits import with_bits
from support.decided import check_bits, check_lists
from support.variants import rendered_module
from support.visits import sweep
from unit.test_bounds_random import KV_ANY, KV_DOC, Q_ANY, Q_DOC, Pair, predicates
from unit.test_tile_answers import CONDITIONS

#: A tensor of each name of `test_bounds_random`, for so many queries and keys.
Params = dict[str, Any]


_SEEN = Tensor("seen", (None, None), "bool")

#: Extremes leave their tiles open, of which many are hidden, or full, all the same.
OF_IDS: list[Pair] = [
    lambda q, kv: KV_DOC[0, kv] == Q_DOC[0, q],
    lambda q, kv: Q_ANY[0, q] == KV_ANY[0, kv],
    lambda q, kv: Q_DOC[0, q] * KV_DOC[0, kv] != 6,
    lambda q, kv: _SEEN[q, kv],
    lambda q, kv: _SEEN[q, kv // 64],
]


@st.composite
def masks(draw: st.DrawFn, of: st.SearchStrategy[Pair]) -> Mask:
    """A predicate of positions, or of blocks of them: tiles of 64 then differ more."""
    predicate: Pair = draw(predicates(of, depth=1))
    block = draw(st.sampled_from([1, 8, 8, 8, 64]))
    return Mask(lambda b, h, q, kv: predicate(q // block, kv // block), "random")


@st.composite
def params(draw: st.DrawFn) -> Params:
    """Lengths, and values of all parameters. No ids are in order, those declared sorted included:
    kernels that decide tiles trust no order.
    """
    sides = {"q": draw(st.integers(65, 150)), "kv": draw(st.integers(65, 150))}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def drawn(low: int, high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(low, high, sizes, generator=generator, dtype=torch.int32)

    found: Params = {
        **{f"{side}_len": length for side, length in sides.items()},
        "left": draw(st.integers(0, 90)),
        "anywhere": draw(st.integers(-8, 90)),
        "chunk": draw(st.integers(1, 9)),
        "width": draw(st.integers(1, 9)),
        "prefix": drawn(-3, 90, 1),
        "layout": drawn(0, 2, 1, 40, 40).bool(),
    }
    # Runs of ids and of flags, such as data have.
    run = draw(st.sampled_from([1, 16, 64]))
    table = drawn(0, 2, *(-(-length // run) for length in sides.values())).bool()
    table = table.repeat_interleave(run, 0).repeat_interleave(run, 1)
    found["seen"] = table[: sides["q"], : sides["kv"]]
    for side, length in sides.items():
        runs = -(-length // run)
        of_runs = {
            "doc": drawn(0, draw(st.sampled_from([1, 3, 12])), 1, runs),
            "any": drawn(-4, 90, 1, runs),
            "flag": drawn(0, 2, 1, runs).bool(),
            "real": torch.rand(1, runs, generator=generator),
        }
        for name, values in of_runs.items():
            found[f"{side}_{name}"] = values.repeat_interleave(run, 1)[:, :length].contiguous()
    return found


SIZES = st.sampled_from([(64, 64), (128, 32), (128, 48), (96, 128)])


def _module(mask: Mask) -> tuple[ModuleType, AttentionSpec]:
    """As if its bounds were too wide."""
    spec = AttentionSpec(16, "float32", mask=mask)

    def decided(spec: AttentionSpec, predicate: Predicate) -> ClassifiedTiles:
        return classified(predicate, left_to_data(predicate, ranges=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "tile_listing", lambda predicate: None)
        patch.setattr(planning, "classified_tiles", decided)
        return rendered_module(spec), spec


def _check(mask: Mask, values: Params, sizes: tuple[int, int]) -> None:
    module, spec = _module(mask)
    q_len, kv_len = values["q_len"], values["kv_len"]
    q, k = torch.zeros(1, 1, q_len, 16), torch.zeros(1, 1, kv_len, 16)
    given = {param.name: values[param.name] for param in spec.params}
    bits = with_bits(module, spec, q, k, given)[-1]
    seen = visibility(mask, 1, 1, q_len, kv_len, params=given).expand(1, 1, q_len, kv_len)
    check_bits(bits, seen)
    check_lists(module, q, bits, seen, *sizes)


ANY = st.one_of(CONDITIONS, st.sampled_from(OF_IDS))


@sweep(100)
@given(masks(ANY), params(), SIZES)
def test_tiles_of_any_predicate_are_decided_exactly(
    mask: Mask, values: Params, sizes: tuple[int, int]
) -> None:
    _check(mask, values, sizes)


#: What may be wrong in the kernels, and the conditions of masks whose tiles show it; wrong answers
#: by values are found without them.
WRONG_KERNELS = {
    # Of ids: extremes decide most tiles of other masks, which leaves little to these lines.
    "open_tiles_stay_open": (
        "(open_bits >> i) & 1 != 0:",
        "(open_bits >> i) & 1 == -7:",
        st.sampled_from(OF_IDS),
    ),
    # So few elements are hidden that those looked at first are all visible.
    "full_if_most_are": (
        "count == TILE * TILE",
        "count > TILE * TILE // 2",
        st.just(lambda q, kv: Q_ANY[0, q] + KV_ANY[0, kv] != 50),
    ),
    "the_rows_of_another": ("tile_m = pid // num_words % num_tiles_m", "tile_m = 0", ANY),
    # A tile is hidden where the next one is not.
    "one_row": (
        "own_last // TILE + 1)",
        "own_first // TILE + 1)",
        st.just(lambda q, kv: _SEEN[q // 8, kv // 8]),
    ),
    "not_turned": ("row, column = listed, own", "row, column = own, listed", ANY),
}


def _survives(of: st.SearchStrategy[Pair]) -> None:
    # More than above, until one finds it; the smallest one is not looked for.
    @settings(sweep(400), phases=(Phase.generate,), report_multiple_bugs=False)
    @given(masks(of), params(), SIZES)
    def run(mask: Mask, values: Params, sizes: tuple[int, int]) -> None:
        _check(mask, values, sizes)

    run()


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_wrong_kernels_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (old, new, of), right = WRONG_KERNELS[name], rendered_module

    def edited(spec: AttentionSpec) -> ModuleType:
        def edit(source: str) -> str:
            assume(source.count(old) == 1)  # other masks have no such line
            return source.replace(old, new)

        return right(spec, edit_source=edit)

    monkeypatch.setattr(sys.modules[__name__], "rendered_module", edited)
    with pytest.raises(AssertionError):
        _survives(of)

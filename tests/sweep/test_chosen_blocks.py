"""Masks of chosen blocks: the kernels of both passes, beside float64."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from flashgen import AttentionSpec
from flashgen.config import KernelConfig
from support.chosen import CHOSEN, chosen_case, chosen_spec
from support.gluon import interpreted
from support.slip import with_slip
from support.turns import in_turns
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.hopper import check_hopper, check_hopper_backward
from sweep.launch import check_kernel

PORTABLE = {name: chosen_spec(name) for name in CHOSEN}
GLUON = {name: chosen_spec(name, 64, "bfloat16") for name in CHOSEN}

#: (batch, heads of q, heads of keys): tiles of 16, 64 and 128 queries in the Gluon forward kernel.
HEADS = ((1, 8, 1), (2, 6, 3), (1, 2, 2))


@functools.cache
def _gluon(name: str) -> ModuleType:
    return rendered_module(GLUON[name], hopper=True, edit_source=interpreted)


@pytest.mark.parametrize("name", CHOSEN)
def test_portable_kernels(name: str) -> None:
    """With tiles smaller and larger than a block, and than what is decided."""
    spec = PORTABLE[name]
    module, case = rendered_module(spec), chosen_case(name, 200, (2, 4, 2))
    check_kernel(module, spec, case, BLOCK_M=32, BLOCK_N=16)
    check_kernel(module, spec, case, BLOCK_M=64, BLOCK_N=128)
    check_backward(module, spec, case, BLOCK_M=32, BLOCK_N=64)


@pytest.mark.parametrize(("name", "i"), in_turns(CHOSEN, range(len(HEADS)), every=2))
def test_gluon_forward_kernel(name: str, i: int) -> None:
    case = chosen_case(name, 200, HEADS[i])
    check_hopper(_gluon(name), GLUON[name], case, KernelConfig(128, 64, 8, 2))


@pytest.mark.parametrize("name", CHOSEN)
def test_gluon_backward_kernels(name: str) -> None:
    check_hopper_backward(_gluon(name), GLUON[name], chosen_case(name, 200, (1, 4, 2)))


@pytest.mark.parametrize("heads", [(1, 3, 1), (1, 2, 2)])
def test_gluon_backward_kernel_of_wide_heads(heads: tuple[int, int, int]) -> None:
    """Sums of dq in two halves; consumers take turns with one head's visits, and with three's."""
    spec = chosen_spec("blocks", 128, "bfloat16")
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    check_hopper_backward(module, spec, chosen_case("blocks", 140, heads))


def test_keys_that_nobody_has_chosen() -> None:
    """Their gradients are 0, in tiles of keys that programs share and that none visits."""
    case = chosen_case("blocks", 400, (1, 4, 1))
    case.params["chosen"] = case.params["chosen"].clamp(max=0)
    check_hopper_backward(_gluon("blocks"), GLUON["blocks"], case)


_SCATTERED = "table.scatter_(-1, column, True)"
_UNSIGNED = "(index.long() & 0xFFFFFFFF)"

#: What makes the module wrong: the variant, a right text and a wrong one.
SLIPS = {
    "the_first_block_is_none": (
        "blocks",
        _UNSIGNED,
        "(index.long() - 1 * (index == 0) & 0xFFFFFFFF)",
    ),
    "an_entry_is_skipped": ("each", "column = (", "index = index[..., 1:]\n    column = ("),
    "twice_is_not_there": (
        "blocks",
        _SCATTERED,
        "table = table.int().scatter_add_(-1, column, torch.ones_like(index)) == 1",
    ),
    "counts_do_not_count": ("counted", "where(inside, ", "where(inside | True, "),
    "no_block_is_the_first": ("blocks", _UNSIGNED, "index.long().clamp(min=0)"),
    "causal_is_not_asked": ("blocks", "full &= q_first >= kv_last", "full &= q_last >= kv_first"),
    "the_list_of_another_query": ("each", "q_rows[:, None], kv_tile", "q_last, kv_tile"),
    "queries_are_missing": ("each", "tl.static_range(PARTS)", "tl.static_range(1)"),
    "lists_of_the_first_heads": ("blocks", "num_kv_heads + head //", "num_kv_heads + 0 * head //"),
    "one_block_of_a_tile": (
        "each_counted",
        "tl.static_range((BLOCK_N + 31) // 32)",
        "tl.static_range(1)",
    ),
}


def _survives(name: str, right: str = "", wrong: str = "") -> bool:
    spec = PORTABLE[name]
    edit = with_slip(right, wrong) if right else str
    module, case = rendered_module(spec, edit_source=edit), chosen_case(name, 200, (2, 4, 2))
    try:
        check_kernel(module, spec, case, BLOCK_M=32, BLOCK_N=64)
        check_backward(module, spec, case, BLOCK_M=64, BLOCK_N=64)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", SLIPS)
def test_slips_do_not_survive(name: str) -> None:
    assert not _survives(*SLIPS[name])


@pytest.mark.parametrize("name", sorted({variant for variant, *_ in SLIPS.values()}))
def test_without_a_slip_it_is_right(name: str) -> None:
    assert _survives(name)


#: Of the Gluon forward kernel, whose tiles are those of several heads.
GLUON_SLIPS = {
    "lists_of_longer_tiles": ("max(128 // packed, 64)", "max(128, 64)"),
    "positions_of_one_head": ("rows %= 64 // PACKED", "rows %= 64"),
    "heads_of_others": ("(num_q_heads // PACKED) * PACKED", "(num_q_heads // PACKED)"),
}


@pytest.mark.parametrize("name", GLUON_SLIPS)
def test_slips_of_shared_tiles_do_not_survive(name: str) -> None:
    spec: AttentionSpec = GLUON["blocks"]
    slip = with_slip(*GLUON_SLIPS[name])
    module = rendered_module(spec, hopper=True, edit_source=lambda x: interpreted(slip(x)))
    case = chosen_case("blocks", 200, (1, 8, 2))
    with pytest.raises((AssertionError, IndexError)):
        check_hopper(module, spec, case, KernelConfig(128, 64, 8, 2))


#: Lists of blocks of queries, of which tiles of three consumers have 24, 24 and 16, or 12 and 4.
THIRDS = ("blocks", "counted", "long")


@functools.cache
def _thirds(name: str, head_dim: int, slip: str = "") -> ModuleType:
    edit = with_slip(*THIRDS_SLIPS[slip]) if slip else str
    spec = chosen_spec(name, head_dim, "bfloat16")
    return rendered_module(spec, hopper=True, edit_source=lambda x: interpreted(edit(x)))


def _check_thirds(name: str, head_dim: int, length: int, heads: int, slip: str = "") -> None:
    module, spec = _thirds(name, head_dim, slip), chosen_spec(name, head_dim, "bfloat16")
    case, rows = chosen_case(name, length, (1, heads, 1)), []
    original = module._rows_of_lists
    module._rows_of_lists = lambda *a: rows.append(original(*a)) or rows[-1]  # type: ignore[attr-defined]
    try:
        check_hopper(module, spec, case, KernelConfig(192, 64, 12, 3))
    finally:
        module._rows_of_lists = original  # type: ignore[attr-defined]
    assert rows == [192]


@pytest.mark.parametrize(("name", "head_dim"), in_turns(THIRDS, (64, 80, 128), every=2))
@pytest.mark.parametrize(("length", "heads"), [(400, 8), (140, 16)])
def test_three_consumers_share_lists(name: str, head_dim: int, length: int, heads: int) -> None:
    """Consumers that take turns, with stages of both kinds, and those that take none."""
    _check_thirds(name, head_dim, length, heads)


#: Of tiles of three consumers, the last of which has no queries in the last tile of a list.
THIRDS_SLIPS = {
    "tiles_of_two_lists": ("tile_m // TILES * LISTED + tile_m % TILES * LENGTH", "tile_m * LENGTH"),
    "rows_of_the_next_list": ("PACKED * NUMBER >= LISTED", "PACKED * NUMBER > LISTED"),
    "a_stage_is_kept": ("_skip(visits + 1, ", "_skip(visits, "),
    "tiles_are_left_out": ("triton.cdiv(q_len % listed, queries)", "q_len % listed // queries"),
    "the_output_is_not_waited_for": (
        "            tma.store_wait(0)\n            other =",
        "            other =",
    ),
}


@pytest.mark.parametrize("slip", THIRDS_SLIPS)
def test_slips_of_three_consumers_do_not_survive(slip: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        _check_thirds("blocks", 128, 400, 8, slip)


#: Of the Gluon backward kernel, whose consumers take turns.
TURNS_SLIPS = {
    "one_consumer_alone": ("2 * num_parts)", "num_parts)"),
    "sums_of_the_first_head": ("head_row + member * rows_len", "head_row + 0 * member * rows_len"),
    "rows_of_the_first_head": ("head = first_head + visit % num_members", "head = first_head"),
    "a_visit_twice": ("unmasked + ((unmasked ^ own) & 1)", "unmasked - ((unmasked ^ own) & 1)"),
    "the_first_turn_again": ("own = NUMBER ^ turn", "own = NUMBER"),
}


def _turns_survive(slip: tuple[str, str] | None) -> bool:
    edit = with_slip(*slip) if slip else str
    module = rendered_module(
        GLUON["blocks"], hopper=True, edit_source=lambda x: interpreted(edit(x))
    )
    try:
        # Eight heads of keys have whole tiles: three heads of q take their turns in each.
        check_hopper_backward(module, GLUON["blocks"], chosen_case("blocks", 70, (8, 3, 1)))
    except (AssertionError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", [None, *TURNS_SLIPS])
def test_slips_of_turns_do_not_survive(name: str | None) -> None:
    assert _turns_survive(TURNS_SLIPS[name] if name else None) == (name is None)

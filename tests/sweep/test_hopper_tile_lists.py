"""Masks that read block tables: the Gluon kernels of the backward pass, which go by lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor, block_sparse, causal
from support.cases import Case, inputs
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import rendered_module
from sweep.hopper import check_hopper_backward, gradients_survive
from sweep.test_tile_lists import MASKS

#: One pass, two kernels of narrow heads, and two of wide ones: (head dim, deterministic).
WAYS = {"d64": (64, False), "d128": (128, False), "d64_twice": (64, True), "d192": (192, False)}

CASES = (Case(140, 200, 2, 2, 1), Case(170, 90, 1, 2, 2, "padded"))


def _spec(mask: Mask, way: str) -> AttentionSpec:
    head_dim, deterministic = WAYS[way]
    return AttentionSpec(head_dim, mask=mask, deterministic=deterministic)


@functools.cache
def _module(spec: AttentionSpec) -> ModuleType:
    return rendered_module(spec, hopper=True, edit_source=interpreted)


#: But for constants, which are for shorter calls, and for blocks of 2, of which tiles hold so many
#: that Triton's interpreter takes minutes to list them.
PASSED = {
    name: mask
    for name, mask in MASKS.items()
    if name != "tiny" and not AttentionSpec(64, mask=mask).constants
}


@pytest.mark.parametrize(("name", "i"), in_turns(PASSED, range(len(CASES)), every=4))
def test_tables_of_all_kinds(name: str, i: int) -> None:
    """Each by two ways, in turn."""
    number, ways = list(PASSED).index(name), list(WAYS)
    spec = _spec(PASSED[name], ways[(number + 2 * i) % len(ways)])
    check_hopper_backward(_module(spec), spec, CASES[i])


SHARED = block_sparse(Tensor("layout", (None, None), "bool"), 64)

#: Which blocks of 64 are shown: no query sees some tiles of keys, some queries see none, all see
#: all, and nobody sees anything.
SHOWN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "unseen_keys": lambda q, kv: kv >= 2,
    "unseen_tiles_of_keys": lambda q, kv: kv % 4 == q % 2,
    "blind_queries": lambda q, kv: q >= 3,
    "diagonal": lambda q, kv: q == kv,
    "corner": lambda q, kv: q + kv == 0,
    "full": lambda q, kv: q + kv >= 0,
    "empty": lambda q, kv: q < 0,
}


def _layout(name: str, rows: int, columns: int) -> torch.Tensor:
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    q, kv = places.view(rows, columns, 2).unbind(2)
    return SHOWN[name](q, kv)


@pytest.mark.parametrize("number", range(len(SHOWN)), ids=list(SHOWN))
def test_tables(number: int) -> None:
    """Of lengths that tiles divide and that they do not, by two ways in turn."""
    name = list(SHOWN)[number]
    for i, (lengths, heads) in enumerate((((256, 384), (1, 1, 1)), ((290, 170), (1, 4, 2)))):
        spec = _spec(SHARED, list(WAYS)[(number + 3 * i) % len(WAYS)])
        layout = _layout(name, *(-(-length // 64) for length in lengths))
        check_hopper_backward(
            _module(spec), spec, Case(*lengths, *heads, params={"layout": layout})
        )


@pytest.mark.parametrize("way", WAYS)
def test_hidden_tiles_are_not_visited(way: str) -> None:
    """What is in no tile of a list can be NaN: nobody reads it."""
    spec = _spec(SHARED, way)
    case = Case(384, 384, params={"layout": torch.eye(3).repeat_interleave(2, 0).bool()})
    case.params["layout"] = case.params["layout"].repeat_interleave(2, 1)
    seen, hidden = slice(256, 384), slice(0, 256)
    found = []
    for poison, side in ((0.0, "q"), (torch.nan, "q"), (torch.nan, "kv")):
        q, k, v = (x.clone() for x in inputs(case, spec, torch.bfloat16))
        for x in (q,) if side == "q" else (k, v):
            x[:, :, hidden] += poison
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = _module(spec).attention(*leaves, **case.params)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found.append([x[:, :, seen] for x in grads])
    clean, of_queries, of_keys = found
    assert all(torch.isfinite(x).all() for x in clean)
    for other in (of_queries, of_keys):
        assert all(map(torch.equal, clean, other))


#: Of a mask that has bits: what makes it wrong, in the Gluon kernels and in their launcher.
EDITS = {
    "the_count_as_a_tile": ("listed_ptr + 1 + visit", "listed_ptr + visit"),
    "the_same_tile_again": ("_query_tile(visit + 1, runs)", "_query_tile(visit, runs)"),
    "another_tile_is_loaded": ("_query_tile(visit, runs) >> 1", "_query_tile(0, runs) >> 1"),
    "never_masked": ("entry % 2 == 1", "entry < 0"),
    "another_head": ("listed = head * num_tiles_n", "listed = 0 * num_tiles_n"),
    "another_tile_of_keys": ("num_tiles_n + tile_n", "num_tiles_n + num_tiles_n - 1 - tile_n"),
    "no_place_for_the_count": ("(gl.cdiv(q_len, BLOCK_M) + 1)", "gl.cdiv(q_len, BLOCK_M)"),
    "not_turned": ("tiles = _transposed(q, tiles, block_m)", "pass"),
    "one_block_of_columns": ("gl.static_range((COLUMNS + 15) // 16)", "gl.static_range(1)"),
    "from_the_first_block": ("block_row = q_first // 16 + i", "block_row = i"),
    "blocks_begin_late": ("begin = 16 * block_row", "begin = 16 * block_row + 1"),
    "blocks_end_early": ("begin + 16)", "begin + 15)"),
}
EDITED = AttentionSpec(64, mask=causal() & block_sparse(block=16))


def _survives(edit: tuple[str, str] | None) -> bool:
    return gradients_survive(edit, EDITED, [Case(300, 300, 1, 2, 2), Case(140, 140, 2, 2, 1)])


@pytest.mark.parametrize("name", EDITS)
def test_mutants_do_not_survive(name: str) -> None:
    assert not _survives(EDITS[name])


def test_without_an_edit_it_is_right() -> None:
    assert _survives(None)

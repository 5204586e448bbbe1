"""Masks that read block tables: the Gluon kernels of the backward pass, which go by lists."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor, block_sparse
from support.cases import Case, inputs
from support.gluon import interpreted
from support.variants import rendered_module
from sweep.hopper import check_hopper_backward
from sweep.test_tile_lists import MASKS

#: One pass, two kernels of narrow heads, and two of wide ones: (head dim, deterministic).
WAYS = {"d64": (64, False), "d128": (128, False), "d64_twice": (64, True), "d192": (192, False)}

CASES = (Case(140, 200, 2, 2, 1), Case(200, 90, 1, 2, 2, "padded"))


def _spec(mask: Mask, way: str) -> AttentionSpec:
    head_dim, deterministic = WAYS[way]
    return AttentionSpec(head_dim, mask=mask, deterministic=deterministic)


@functools.cache
def _module(spec: AttentionSpec) -> ModuleType:
    return rendered_module(spec, hopper=True, edit_source=interpreted)


@pytest.mark.parametrize("number", range(len(MASKS)), ids=list(MASKS))
def test_tables_of_all_kinds(number: int) -> None:
    """Each by one way, in turn, and by a pass of the other kind."""
    mask, ways = list(MASKS.values())[number], list(WAYS)
    for i, case in enumerate(CASES):
        spec = _spec(mask, ways[(number + 2 * i) % len(ways)])
        check_hopper_backward(_module(spec), spec, case)


SHARED = block_sparse(Tensor("layout", (None, None), "bool"), 64)

#: Which blocks of 64 are shown: no query sees some tiles of keys, some queries see none, all see
#: all, and nobody sees anything.
SHOWN = {
    "unseen_keys": lambda q, kv: kv >= 2,
    "unseen_tiles_of_keys": lambda q, kv: kv % 4 == q % 2,
    "blind_queries": lambda q, kv: q >= 3,
    "diagonal": lambda q, kv: q == kv,
    "corner": lambda q, kv: q + kv == 0,
    "full": lambda q, kv: q + kv >= 0,
    "empty": lambda q, kv: q < 0,
}


def _layout(name: str, rows: int, columns: int) -> torch.Tensor:
    q, kv = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    return SHOWN[name](q, kv)  # type: ignore[no-untyped-call,no-any-return]


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

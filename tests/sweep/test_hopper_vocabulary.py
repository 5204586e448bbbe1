"""Every mask, score function and normaliser by the Gluon kernels, on the CPU against float64."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest

from flashgen import AttentionSpec
from flashgen.kernels.forward_hopper.space import why_not
from support.cases import Case
from support.gluon import interpreted
from support.variants import first_on_hopper, lowered, rendered_module
from support.vocabulary import VOCABULARY
from sweep.hopper import check_hopper, check_hopper_backward

#: One for each structure that head dimensions ask for, and for a pass that is split for its own
#: sake: (head dimensions, dtype, deterministic).
WAYS = {
    "d64": (64, "bfloat16", False),
    "d128": (128, "float16", False),
    "d256": (256, "bfloat16", False),
    "d192_v128": ((192, 128), "bfloat16", False),
    "d128_deterministic": (128, "bfloat16", True),
}

LENGTHS = ((300, 300), (130, 470), (470, 130), (1, 200), (64, 128), (200, 1))
#: (batch, heads of q, of k and v); constants may be of four heads.
HEADS = ((2, 2, 1), (1, 4, 2), (1, 2, 2))
FOUR = ((1, 4, 1), (1, 4, 2), (1, 4, 4))
LAYOUTS = ("contiguous", "transposed", "padded")


@functools.cache
def _spec(name: str, way: str) -> AttentionSpec:
    head_dim, dtype, deterministic = WAYS[way]
    return VOCABULARY[name].spec(dtype, head_dim, deterministic=deterministic)


@functools.cache
def _module(name: str, way: str) -> ModuleType:
    return rendered_module(_spec(name, way), hopper=True, edit_source=interpreted)


def _cases(name: str, turn: int) -> list[Case]:
    """Two of the lengths in turn, long ones and short ones; heads and layouts likewise."""
    entry = VOCABULARY[name]
    lengths = [(q, q) for q in (300, 129, 500)] if entry.equal_lengths else list(LENGTHS)
    chosen = [lengths[(turn + i) % len(lengths)] for i in (0, len(lengths) // 2)]
    heads = FOUR if entry.spec().constants else HEADS
    return [
        entry.case(Case(q, kv, *heads[(turn + i) % 3], LAYOUTS[(turn + 2 * i) % 3]))
        for i, (q, kv) in enumerate(chosen)
    ]


ONE, DIVIDED = ("d64", "d128"), ("d256", "d192_v128", "d128_deterministic")


def _trials(every: int) -> list[Any]:
    """Each with a pass that is one and with one that is split; which, takes turns.

    Of each two cases. A fast run has one of ``every`` so many: 4 are all of one entry.
    """
    return [
        pytest.param(
            name, way, i + j, case, marks=pytest.mark.full if (i + 2 * j + case) % every else ()
        )
        for i, name in enumerate(VOCABULARY)
        for j, way in enumerate((ONE[i % len(ONE)], DIVIDED[i % len(DIVIDED)]))
        for case in range(2)
    ]


@pytest.mark.parametrize(("name", "way", "turn", "case"), _trials(every=4))
def test_forward(name: str, way: str, turn: int, case: int) -> None:
    spec = _spec(name, way)
    assert why_not(lowered(spec)) == ""
    check_hopper(_module(name, way), spec, _cases(name, turn)[case], first_on_hopper(spec))


@pytest.mark.parametrize(("name", "way", "turn", "case"), _trials(every=8))
def test_backward(name: str, way: str, turn: int, case: int) -> None:
    check_hopper_backward(_module(name, way), _spec(name, way), _cases(name, turn + 1)[case])

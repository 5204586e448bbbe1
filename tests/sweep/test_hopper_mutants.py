"""Each wait, arrival and fence of the Gluon kernels is needed: without it, their sweep fails."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.cases import Case
from support.gluon import interpreted
from support.variants import (
    any_hopper,
    any_hopper_backward,
    rendered,
    rendered_module,
)
from sweep.hopper import check_hopper, check_hopper_backward
from sweep.test_hopper import CONFIGS, PLANS, SPECS

#: What keeps roles apart, at the start of a line.
SYNCHRONISES = re.compile(
    r" +(mbarrier\.(wait|arrive|expect)\(|fence_async_shared\(|tma\.store_wait\(|_(meet|take_turn"
    r"|pass_turn|wait_at|arrive_at|announce)\()"
)

#: Of several tiles and of one, of more keys than queries, with rows and tiles that nobody sees; and
#: with weights that outgrow those of the first tile.
CASES = (
    Case(500, 500, 1, 2, 1),
    Case(700, 700),
    Case(300, 900),
    Case(300, 900, params={"left": 50}),
    Case(700, 150),
    Case(600, 600, 2, 2, 2, scale=4.0),
)

#: With tiles of few keys, whose weights outgrow the first ones: what the producer asks too early it
#: seldom asks too early elsewhere, and here not every time.
SHORT = {
    "forward": (
        Case(586, 586, 2, 2, 2, params={"left": 20}, scale=8.0),
        Case(400, 400, 3, 2, 2, params={"left": 60}, scale=8.0),
        Case(200, 200, 1, 1, 1, params={"left": 100}, scale=4.0),
    ),
    "forward, no pairs": (
        Case(190, 190, 4, 4, 4, scale=8.0),
        Case(300, 300, 4, 4, 4, scale=8.0),
    ),
}

#: The kernels that one is taken out of: the variants whose they are.
KERNELS = {
    "forward": "window_d128",
    "forward, long tiles": "causal_d128",
    "forward, no pairs": "causal_d64",
    "backward": "window_d128",
    "parts": "full_d128",
    "divided": "causal_d256",
}

#: Functions that alone are looked at: the others are those of another kernel here.
WITHIN = {
    "parts": "def _add_part(",
    "forward, long tiles": "def _consumer(",
    "forward, no pairs": "def _producer(",
}

#: Those that nothing comes of here, in any kernel or in one, and why.
UNSEEN: dict[str | tuple[str, str], str] = {
    "mbarrier.wait(empty.index(slot), phase ^ 1)": "its role has waited already: to be read alone",
    ("forward", "mbarrier.wait(work_empty.index(slot), phase ^ 1)"): (
        "four pairs later consumers have told it"
    ),
    "mbarrier.wait(keys_arrived, count // 2 % 2)": "copies into one buffer rarely pass each other",
}


@functools.cache
def _source(name: str) -> str:
    plan = PLANS[name]
    return interpreted(rendered(plan, any_hopper(plan), any_hopper_backward(plan)))


def _lines_of(source: str, form: str) -> Iterator[tuple[int, int]]:
    """The first and the last line of each synchronisation in a kernel's roles."""
    lines = source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("def ")]
    first = next(i for i in starts if lines[i].startswith("def _next_stage("))
    for i, line in enumerate(lines):
        if not SYNCHRONISES.match(line) or (i < first) != form.startswith("forward"):
            continue
        within = lines[max(start for start in starts if start < i)]
        if re.match(r"def _(attention|backward(_queries)?)_hopper\(", within):
            continue  # before there are roles
        if not within.startswith(WITHIN.get(form, "")):
            continue
        end = i
        while (text := "".join(lines[i : end + 1])).count("(") != text.count(")"):
            end += 1
        yield i, end


def _without(source: str, first: int, last: int) -> str:
    lines = source.splitlines()
    indent = re.match(" *", lines[first])
    assert indent is not None
    lines[first : last + 1] = [indent[0] + "pass"] + [""] * (last - first)
    return "\n".join(lines)


def _mutants() -> Iterator[object]:
    for form, name in KERNELS.items():
        source = _source(name)
        lines = source.splitlines()
        for first, last in _lines_of(source, form):
            text = " ".join(line.strip() for line in lines[first : last + 1])
            if not {text, (form, text)} & UNSEEN.keys():
                yield pytest.param(form, first, last, id=f"{form}-{first}-{text}")


def _fails(form: str, module: ModuleType) -> bool:
    name = KERNELS[form]
    spec = SPECS[name]
    # More than once, since the order that roles run in is another each time.
    for case in (*2 * CASES, *16 * SHORT.get(form, ())):
        if case.params and name != "window_d128":
            continue
        if spec.equal_lengths and case.q_len != case.kv_len:
            continue
        try:
            if form.startswith("forward"):
                check_hopper(module, spec, case, CONFIGS[name][0])
            else:
                check_hopper_backward(module, spec, case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("form", "first", "last"), list(_mutants()))
def test_nothing_works_without(form: str, first: int, last: int) -> None:
    name = KERNELS[form]
    mutant = _without(_source(name), first, last)
    assert _fails(form, rendered_module(SPECS[name], edit_source=lambda _: mutant))


@pytest.mark.parametrize("form", KERNELS)
def test_with_all_it_works(form: str) -> None:
    name = KERNELS[form]
    assert not _fails(form, rendered_module(SPECS[name], hopper=True, edit_source=interpreted))

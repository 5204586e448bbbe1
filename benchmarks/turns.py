"""What is measured next, while kernels of the rest are compiled in the background.

A cell that has all it needs is measured at once, the most important first. After a share of the
run's limit cells are measured without the peers that are late, and again, with these, once they are
there. No cell begins that would not end within the limit if it takes as long as the longest so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from benchmarks.early import Early
from benchmarks.figures import OWN

#: The share of the limit until which cells wait for peers.
PATIENCE = 0.45

#: How the reason begins of a peer that may be measured later.
LATE = "not compiled after "

#: Seconds between two looks at what processes say, at most.
LOOK = 0.25

Cell = TypeVar("Cell")


@dataclass(frozen=True)
class Plan(Generic[Cell]):
    """A cell, and the keys of the tasks that it needs.

    Attributes:
        cell: what is measured.
        own: what flashgen needs; while it is late the cell is not measured.
        peers: what each peer needs, which the cell can do without.
    """

    cell: Cell
    own: Sequence[Hashable]
    peers: Mapping[str, Sequence[Hashable]] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn(Generic[Cell]):
    """A cell to be measured now.

    Attributes:
        number: the place of its plan.
        cell: what is measured.
        without: who is left out, with the reasons: late, not compiled, or flashgen itself if the
            process that compiled it died.
        again: whether it has been measured before, without a peer that is there now.
    """

    number: int
    cell: Cell
    without: dict[str, str]
    again: bool = False


def turns(plans: Sequence[Plan[Cell]], early: Early) -> Iterator[Turn[Cell]]:
    """Yields what is to be measured; until the next is asked for, no process compiles.

    Plans are in the order of their importance. A plan that never comes was not compiled, or had no
    time left.
    """
    longest = 0.0
    there: dict[int, set[str]] = {}  # peers that a cell was measured with, by the plan's place
    while True:
        early.poll()
        if early.passed + longest > early.limit:
            return
        found = _next(plans, early, there)
        if found is None:
            if early.is_over:
                return
            early.poll(max(0.0, min(LOOK, early.limit - early.passed)))
            continue
        number, without = found
        turn = Turn(number, plans[number].cell, without, number in there)
        late = {*without} if OWN not in without else set()  # which may come, if it is of use
        there[number] = plans[number].peers.keys() - late
        with early.paused():
            started = time.perf_counter()
            yield turn
            longest = max(longest, time.perf_counter() - started)


def with_room(early: Early, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row; if memory did not suffice, of a second try without processes that hold some of it."""
    row = measured()
    reasons = [str(reason).lower() for reason in row["unavailable"].values()]
    if early.has_processes and any("out of memory" in reason for reason in reasons):
        early.make_room()
        row = measured()
    return row


def _next(
    plans: Sequence[Plan[Cell]], early: Early, there: Mapping[int, set[str]]
) -> tuple[int, dict[str, str]] | None:
    """The place of a plan that is measured now, and who is left out; None if there is none."""
    late = []
    for number, plan in enumerate(plans):
        outcomes = [early.outcome(key) for key in plan.own]
        if number in there or any(x is None or x.late for x in outcomes):
            continue
        if not _late(plan, early):
            return number, _without(plan, early)
        late.append(number)
    if late and early.passed > PATIENCE * early.limit:
        return late[0], _without(plans[late[0]], early)
    for number, before in there.items():
        without = _without(plans[number], early)
        if plans[number].peers.keys() - without.keys() > before:
            return number, without
    return None


def _late(plan: Plan[Cell], early: Early) -> list[str]:
    """The peers of a plan of which nothing has failed and something is not there yet."""
    return [
        name
        for name, keys in plan.peers.items()
        if not _problem(keys, early) and any(early.outcome(key) is None for key in keys)
    ]


def _without(plan: Plan[Cell], early: Early) -> dict[str, str]:
    """Who is left out, with the reasons."""
    found = {name: _problem(keys, early) for name, keys in plan.peers.items()}
    found |= {name: f"{LATE}{early.passed:.0f} s" for name in _late(plan, early)}
    outcomes = [early.outcome(key) for key in plan.own]
    found[OWN] = next((x.problem for x in outcomes if x is not None and x.died), "")
    return {name: reason for name, reason in found.items() if reason}


def _problem(keys: Sequence[Hashable], early: Early) -> str:
    """Why one of these was not compiled, if it was not."""
    outcomes = [early.outcome(key) for key in keys]
    return next((x.problem for x in outcomes if x is not None and x.problem), "")

"""What is measured next, while kernels of the rest are compiled in the background.

A cell that has all it needs is measured at once, the most important first. After a share of the
run's limit cells are measured without the peers that are late, and again, with these, once they are
there. No cell begins that would not end within the limit if it takes as long as the longest of its
kind so far: with peers or without, and with kernels that are called for the first time, which means
checks and a tuner's measurements, or only with others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

from benchmarks.early import OUT_OF_MEMORY, Early
from benchmarks.figures import OWN

#: The share of the limit until which cells wait for peers.
PATIENCE = 0.45

#: How the reason begins of a peer that may be measured later.
LATE = "not in time: "

#: The reason of a peer that was left out because flashgen alone takes less time.
NO_TIME = f"{LATE}it would have been measured too late"

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
    times = _Times()
    there: dict[int, set[str]] = {}  # peers that a cell was measured with, by the plan's place
    while True:
        early.poll()
        left = early.limit - early.passed
        if not any(
            times.least(plan, number in there) <= left for number, plan in _open(plans, there)
        ):
            return
        for number, without in _next(plans, early, there):
            if times.needs(plans[number], without) <= left:
                break
        else:
            if early.is_over:
                return
            early.poll(max(0.0, min(LOOK, left)))
            continue
        plan = plans[number]
        turn = Turn(number, plan.cell, without, number in there)
        late = {*without} if OWN not in without else set()  # which may come, if it is of use
        there[number] = plan.peers.keys() - late
        with early.paused():
            started = time.perf_counter()
            yield turn
            times.add(plan, without, time.perf_counter() - started)


class _Times:
    """How long cells took, the longest of each kind."""

    def __init__(self) -> None:
        self._called: set[Hashable] = set()
        self._longest: dict[tuple[bool, bool], float] = {}
        self._shortest = 0.0

    def _kind(self, plan: Plan[Any], without: Iterable[str]) -> tuple[bool, bool]:
        """Whether kernels are called for the first time, and whether there are peers."""
        names = plan.peers.keys() - {*without}
        return not self._called.issuperset(_keys(plan, names)), bool(names)

    def needs(self, plan: Plan[Any], without: Iterable[str]) -> float:
        """Seconds that a cell may need; what is not known takes as long as the shortest so far.

        If it has all, kernels of the first time and peers, then as the longest.
        """
        kind = self._kind(plan, without)
        unknown = max(self._longest.values(), default=0.0) if all(kind) else self._shortest
        return self._longest.get(kind, unknown)

    def least(self, plan: Plan[Any], again: bool) -> float:
        """Seconds that a cell needs at least: alone, or with its peers if it was measured alone."""
        return self.needs(plan, () if again else plan.peers)

    def add(self, plan: Plan[Any], without: Iterable[str], seconds: float) -> None:
        """Takes note of a cell that was measured."""
        kind = self._kind(plan, without)
        self._shortest = min(seconds, self._shortest) if self._longest else seconds
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self._called |= _keys(plan, plan.peers.keys() - {*without})


def _keys(plan: Plan[Any], names: Iterable[str]) -> set[Hashable]:
    return {*plan.own, *chain.from_iterable(plan.peers[name] for name in names)}


def _open(
    plans: Sequence[Plan[Cell]], there: Mapping[int, set[str]]
) -> Iterator[tuple[int, Plan[Cell]]]:
    """Plans with their places that have not been measured with all peers."""
    for number, plan in enumerate(plans):
        if number not in there or plan.peers.keys() - there[number]:
            yield number, plan


def with_room(early: Early, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row; if memory did not suffice, of a second try without processes that hold some of it.

    Raises:
        Exception: what ``measured`` raises.
    """
    try:
        row = measured()
        reasons = [str(reason) for reason in row["unavailable"].values()]
    except Exception as error:
        if not early.has_processes or OUT_OF_MEMORY not in str(error).lower():
            raise
        reasons = [OUT_OF_MEMORY]
    if early.has_processes and any(OUT_OF_MEMORY in reason.lower() for reason in reasons):
        early.make_room()
        row = measured()
    return row


def _next(
    plans: Sequence[Plan[Cell]], early: Early, there: Mapping[int, set[str]]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Places of plans that can be measured now, in their order, and who is left out.

    Whole cells come first, then those whose peers are late, then, if no time is left for these,
    cells without any peer, and last those whose peers have come since.
    """
    whole, late = list[int](), list[int]()
    for number, plan in enumerate(plans):
        outcomes = [early.outcome(key) for key in plan.own]
        if number not in there and not any(x is None or x.late for x in outcomes):
            (late if _late(plan, early) else whole).append(number)
    over = early.passed > PATIENCE * early.limit
    for number in whole + (late if over else []):
        yield number, _without(plans[number], early)
    for number in whole + (late if over else []):
        if not plans[number].peers.keys() <= (without := _without(plans[number], early)).keys():
            yield number, dict.fromkeys(plans[number].peers, NO_TIME) | without
    for number, before in there.items():
        without = _without(plans[number], early)
        if plans[number].peers.keys() - without.keys() > before:
            yield number, without


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
    found |= {name: f"{LATE}not compiled after {early.passed:.0f} s" for name in _late(plan, early)}
    outcomes = [early.outcome(key) for key in plan.own]
    found[OWN] = next((x.problem for x in outcomes if x is not None and x.died), "")
    return {name: reason for name, reason in found.items() if reason}


def _problem(keys: Sequence[Hashable], early: Early) -> str:
    """Why one of these was not compiled, if it was not."""
    outcomes = [early.outcome(key) for key in keys]
    return next((x.problem for x in outcomes if x is not None and x.problem), "")

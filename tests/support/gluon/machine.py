"""Programs of a grid, and their roles: one runs at a time, which one, a seed says."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet


class Deadlock(AssertionError):
    """Everyone waits."""


@dataclass(eq=False)
class Written:
    """What roles have put into shared memory, at which addresses, and whether one has fenced it."""

    addresses: range
    fenced: bool = False


class Role:
    """A group of warps.

    Attributes:
        program: the one that it belongs to.
        num_warps: in the group.
        rank: which of two goes first, where that is not left to chance.
        products: those of its products that may not have been computed yet, oldest first.
        stores: its copies out of shared memory that may not have been made yet, likewise.
        unfenced: what it has written, and TMA and matrix units may not see yet.
        ready: whether it can go on.
        course: what it does, a coroutine, if its program is divided into roles.
    """

    def __init__(self, program: Program, num_warps: int) -> None:
        self.program = program
        self.num_warps = num_warps
        self.products: list[Any] = []
        self.stores: list[Callable[[], None]] = []
        self.unfenced: set[Written] = set()
        self.ready: Callable[[], bool] = lambda: True
        self.course: greenlet | None = None
        self.rank = program.random.random()


class Program:
    """One of a grid."""

    def __init__(self, number: int, count: int, seed: int) -> None:
        self.number, self.count = number, count
        self.random = random.Random(f"{seed} {number}")
        # How often copies and products are late, and how often one role goes before another.
        self.lateness = self.random.choice((0.0, 0.5, 1.0))
        self.ranks = self.random.choice((0.0, 0.9))
        self.roles: list[Role] = []
        self.failure: BaseException | None = None
        self.hardware_barriers: dict[int, int] = {}

    def late(self) -> bool:
        """Whether what the hardware does by itself is put off for as long as it may be."""
        return self.random.random() < self.lateness

    @torch.no_grad()
    def run(self, kernel: Callable[[], None], num_warps: int) -> None:
        """Runs it to the end, alone until it is divided into roles."""
        alone = Role(self, num_warps)
        self._has_turn(alone)
        self.roles = [alone]
        kernel()
        _finish(alone)

    def divide(self, functions: Sequence[Callable[[], None]], num_warps: Sequence[int]) -> None:
        """Runs functions as roles until all are done; the first has the program's own warps."""
        alone = role()
        self.roles = [Role(self, count) for count in (alone.num_warps, *num_warps)]
        self.roles[0].unfenced = alone.unfenced
        for one, function in zip(self.roles, functions, strict=True):
            one.course = greenlet(functools.partial(self._play, one, function))
        while self.roles:
            one = self._next()
            self._has_turn(one)
            assert one.course is not None
            one.course.switch()
        if self.failure is not None:
            raise self.failure
        waited = self.hardware_barriers.values()
        assert all(arrivals % 2 == 0 for arrivals in waited), "somebody arrived for nobody"
        self.roles = [alone]
        self._has_turn(alone)

    def _has_turn(self, one: Role) -> None:
        global _role
        _role = one

    def _play(self, one: Role, function: Callable[[], None]) -> None:
        try:
            if self.failure is None:
                function()
                _finish(one)
        except BaseException as failure:
            self.failure = self.failure or failure
        self.roles.remove(one)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets others run until this holds."""
        one = role()
        if one.course is None:
            if not ready():
                raise Deadlock("it waits, and there is nobody else")
            return
        one.ready = ready
        one.course.parent.switch()
        if self.failure is not None:
            raise Deadlock("another role has failed") from self.failure

    def _next(self) -> Role:
        """One of those that can go on; any, so that all end, once something failed."""
        ready = self.roles
        if self.failure is None:
            ready = [one for one in self.roles if one.ready()]
            if not ready:
                self.failure = Deadlock("every role waits for another")
                ready = self.roles
        ranked = self.random.random() < self.ranks
        return max(ready, key=lambda one: one.rank) if ranked else self.random.choice(ready)


_role: Role


def role() -> Role:
    """The one that runs."""
    return _role


def program() -> Program:
    """Its program."""
    return role().program


def pause() -> None:
    """A place where another role may run."""
    program().wait(lambda: True)


def _finish(one: Role) -> None:
    assert not one.products, "a product is not waited for"
    assert not one.stores, "shared memory goes while TMA may still read it"

"""Programs of a grid, and their roles: one thread runs at a time, which one, a seed says."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_local = threading.local()


class Deadlock(AssertionError):
    """Everyone waits."""


class Role:
    """A group of warps.

    Attributes:
        program: the one that it belongs to.
        num_warps: in the group.
        rank: which of two goes first, where that is not left to chance.
        products: those of its products that may not have been computed yet, oldest first.
        stores: its copies out of shared memory that may not have been made yet, likewise.
        unfenced: addresses of what it has written, and TMA and matrix units may not see yet.
    """

    def __init__(self, program: Program, num_warps: int) -> None:
        self.program = program
        self.num_warps = num_warps
        self.products: list[Any] = []
        self.stores: list[Callable[[], None]] = []
        self.unfenced: list[range] = []
        self.ready: Callable[[], bool] = lambda: True
        self.turn = threading.Semaphore(0)
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
        self.roles = [Role(self, num_warps)]
        _local.role = self.roles[0]
        kernel()
        _finish(self.roles[0])

    def divide(self, functions: Sequence[Callable[[], None]], num_warps: Sequence[int]) -> None:
        """Runs functions as roles until all are done; the first has the program's own warps."""
        alone = role()
        self.roles = [Role(self, count) for count in (alone.num_warps, *num_warps)]
        self.roles[0].unfenced = alone.unfenced
        threads = [
            threading.Thread(target=self._play, args=(one, function), daemon=True)
            for one, function in zip(self.roles, functions, strict=True)
        ]
        done = threading.Event()
        self._done = done
        for thread in threads:
            thread.start()
        self._pass_on()
        done.wait()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        waited = self.hardware_barriers.values()
        assert all(arrivals % 2 == 0 for arrivals in waited), "somebody arrived for nobody"
        self.roles = [alone]

    @torch.no_grad()  # of a thread's own
    def _play(self, one: Role, function: Callable[[], None]) -> None:
        _local.role = one
        one.turn.acquire()
        try:
            if self.failure is None:
                function()
                _finish(one)
        except BaseException as failure:
            self.failure = self.failure or failure
        self.roles.remove(one)
        self._pass_on()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets others run until this holds."""
        one = role()
        if len(self.roles) == 1:
            if not ready():
                raise Deadlock("it waits, and there is nobody else")
            return
        one.ready = ready
        self._pass_on()
        one.turn.acquire()
        if self.failure is not None:
            raise Deadlock("another role has failed") from self.failure

    def _pass_on(self) -> None:
        """Wakes one of those that can go on; all of them, one by one, once something failed."""
        if not self.roles:
            self._done.set()
            return
        ready = self.roles
        if self.failure is None:
            ready = [one for one in self.roles if one.ready()]
            if not ready:
                self.failure = Deadlock("every role waits for another")
                ready = self.roles
        ranked = self.random.random() < self.ranks
        one = max(ready, key=lambda one: one.rank) if ranked else self.random.choice(ready)
        one.turn.release()


def role() -> Role:
    """The one that runs."""
    found: Role = _local.role
    return found


def program() -> Program:
    """Its program."""
    return role().program


def pause() -> None:
    """A place where another role may run."""
    program().wait(lambda: True)


def _finish(one: Role) -> None:
    assert not one.products, "a product is not waited for"
    assert not one.stores, "shared memory goes while TMA may still read it"

"""Shared memory, barriers and numbers for kernels whose roles are run as threads.

Barriers count as the hardware's do; tiles are the names of what was loaded; products and sums are
nothing.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Collection
from typing import Any

SECONDS = 20.0  # a wait of so long is a deadlock


class Nothing:
    """Numbers in registers, layouts and results, whatever is done with them."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def _same(self, *_: object, **__: object) -> Nothing:
        return self

    __call__ = __getitem__ = __add__ = __sub__ = __mul__ = __rmul__ = __and__ = __iand__ = _same
    __ge__ = __le__ = __neg__ = __radd__ = __rsub__ = _same


NOTHING = Nothing()


class Number(int):
    """An integer of a kernel."""

    def to(self, dtype: object) -> Number:
        return self

    def __mul__(self, other: Any) -> Any:
        return _number(int(self) * other)

    def __add__(self, other: Any) -> Any:
        return _number(int(self) + other)


def _number(value: Any) -> Any:
    return Number(value) if isinstance(value, int) else value


class Barrier:
    """An mbarrier: a phase ends when all have arrived, and all bytes that were announced."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def change(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != parity, SECONDS)
        assert done, "deadlock"


class Tile:
    """A buffer, whatever it is seen as: what was loaded into it last, whether it has arrived."""

    def __init__(self) -> None:
        self.content: object = None
        self.arriving = 0

    def _same(self, *_: object, **__: object) -> Tile:
        return self

    reshape = slice = permute = _reinterpret = index = _same

    def load(self, *_: object) -> Any:
        return self.content if isinstance(self.content, int) else NOTHING

    def store(self, value: object) -> None:
        if isinstance(value, int):
            self.content = value


class Tiles(list[Any]):
    """An array of buffers or of barriers."""

    def index(self, number: int, *_: object) -> Any:
        return self[number % len(self)]


class HardwareBarrier:
    """One of `bar.sync` and `bar.arrive` for two groups of warps."""

    def __init__(self) -> None:
        self.arrived, self.phase = 0, 0
        self.changed = threading.Condition()

    def arrive(self) -> int:
        """Of one group, which goes on; the phase that this belongs to."""
        with self.changed:
            phase = self.phase
            self.arrived += 1
            if self.arrived == 2:
                self.arrived, self.phase = 0, phase + 1
                self.changed.notify_all()
            return phase

    def sync(self) -> None:
        """Of one group, which waits for the other."""
        phase = self.arrive()
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase != phase, SECONDS)
        assert done, "deadlock"


def functions_of(text: str, fakes: dict[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """A rendered source's functions as those of Python, which call the fakes where there are."""
    tree = ast.parse(text)
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef)]
    for function in functions:
        function.decorator_list = []
    constants = [x for x in tree.body if isinstance(x, ast.AnnAssign)]
    tree.body = [*constants, *(f for f in functions if f.name not in {*fakes, *without})]
    exec(compile(tree, "rendered", "exec"), fakes)
    return fakes

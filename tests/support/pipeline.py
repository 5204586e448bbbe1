"""Shared memory, barriers and numbers for kernels whose roles are run as threads.

Barriers count as the hardware's do; tiles are the names of what was loaded; products and sums are
nothing.
"""

from __future__ import annotations

import ast
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

SECONDS = 20.0  # a wait of so long is a deadlock
COPIED = 8  # bytes of any tile


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


class Device:
    """A GPU on which roles run as threads, and copies arrive in their own time.

    Attributes:
        random: how long anything takes.
        here: what a thread knows of itself.
        stored: the tensor, and the place, of each tile that was copied to memory.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.here = Random(seed), threading.local()
        self.stored: list[tuple[Any, ...]] = []

    def run_at_once(self, roles: Iterable[Callable[[], None]]) -> None:
        """All roles to the end; what one raises, is raised."""
        failures: list[BaseException] = []

        def run(role: Callable[[], None]) -> None:
            try:
                role()
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(role,), daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "deadlock"

    def dawdle(self) -> None:
        """Lets the others go first, now and then."""
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 4e-4)

    def copy(self, desc: Any, place: list[int], barrier: Barrier, tile: Tile) -> None:
        """The earliest that a copy can spoil a buffer, and some time later its arrival."""
        assert tile.arriving == 0, "two copies into one buffer may end in any order"
        tile.content, tile.arriving = (desc.name, *place), 1

        def arrive() -> None:
            self.dawdle()
            tile.arriving = 0
            barrier.change(0, -COPIED)

        threading.Thread(target=arrive, daemon=True).start()

    def read(self, tile: Tile) -> Any:
        """What a product reads, from when it starts to when it may end."""
        content = tile.content
        assert not tile.arriving, "read before it has arrived"
        self.dawdle()
        assert tile.content == content, "overwritten while it is read"
        return content

    def wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        """Until a phase has ended, unless there is nothing to wait for."""
        self.dawdle()
        if pred:
            barrier.wait(phase)

    def store(self, desc: Any, place: list[int], tile: Tile) -> None:
        """A tile on its way to memory."""
        self.stored.append((desc.name, tuple(place)))

    def fakes(self, *, gl: dict[str, Any], **functions: Any) -> dict[str, Any]:
        """What every kernel calls; besides, functions of Gluon's, and of the kernel's own."""
        nothing = ("zeros", "arange", "load", "float32", "int32", "int64", "bfloat16")
        layouts = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout")
        numbers = SimpleNamespace(
            where=lambda condition, a, b: a if condition else b,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            maximum=max,
            max=lambda value, *_: value,
            full=lambda shape, value, *_: value,
            exp2=lambda x: x,
            convert_layout=lambda x, *_, **__: x,
            constexpr=lambda value: value,
            **dict.fromkeys((*nothing, *layouts), NOTHING),
        )
        vars(numbers).update(gl)
        return {
            "gl": numbers,
            "mbarrier": SimpleNamespace(
                wait=self.wait,
                expect=lambda barrier, size: barrier.change(1, size),
                arrive=lambda barrier, count: barrier.change(count, 0),
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.copy,
                async_copy_shared_to_global=self.store,
                store_wait=lambda number: None,
            ),
            "warpgroup_mma": lambda *_, **__: NOTHING,
            "warpgroup_mma_wait": lambda number, deps: deps[0] if len(deps) == 1 else deps,
            "fence_async_shared": lambda: None,
            "_unknown_zero": lambda: 0,
            "_backward_scores": lambda scores, *_: scores,
            "_start_scores_of_keys": lambda *_: NOTHING,
            **functions,
        }


def sources(*names: str) -> tuple[Any, ...]:
    """Descriptors of tensors to load."""
    block = SimpleNamespace(nbytes=COPIED)
    return tuple(SimpleNamespace(name=name, block_type=block) for name in names)


def results(*names: str) -> tuple[Any, ...]:
    """Descriptors of tensors to write."""
    return tuple(SimpleNamespace(name=name, layout=None) for name in names)


def tiles(count: int) -> Tiles:
    """So many buffers."""
    return Tiles([Tile() for _ in range(count)])


def barriers(count: int, stages: int = 1) -> Tiles:
    """A barrier for each stage, at which so many arrive."""
    found = Tiles([Barrier() for _ in range(stages)])
    for barrier in found:
        barrier.init(count)
    return found


def given(function: Callable[..., Any], *args: Any) -> SimpleNamespace:
    """The arguments of a call by the names of its parameters."""
    return SimpleNamespace(**inspect.signature(function).bind(*args).arguments)


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

"""The roles of the Gluon kernel of the backward pass, as threads: who waits for what.

Producer and consumers are run as they are rendered, on the memory of `support.pipeline`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flashgen import AttentionSpec, causal, full, sliding_window
from flashgen.codegen.render import render_backward_hopper
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.hopper_backward import HopperBackward
from support.pipeline import (
    NOTHING,
    SECONDS,
    Device,
    Tile,
    barriers,
    functions_of,
    given,
    results,
    sources,
    tiles,
)

BLOCK = 16


class Program:
    """One program: its memory, and three threads that are its roles."""

    def __init__(self, launch: Launch, number: int) -> None:
        self.launch, self.number = launch, number
        self.meeting = threading.Barrier(2)
        self.loaded = (tiles(2), tiles(2), tiles(2), Tile(), tiles(4))
        made, slots = tiles(2), tiles(2)
        of_tiles = tuple(barriers(count, 2) for count in (1, 2, 1, 2))
        self.buffers = (self.loaded, of_tiles, (made, made), slots)

    def roles(self) -> list[Callable[[], None]]:
        kernel, call = self.launch.kernel, self.launch.call
        loads = sources("q", "grad_out", "k", "v", "rows")
        loads = (*loads, self.launch.counter, self.launch.num_tiles)
        stores = results("grad_q", "grad_k", "grad_v")
        sizes = (BLOCK, BLOCK, 2)
        consumer = partial(kernel["_backward_consumer"], stores, self.buffers, call)
        return [
            partial(kernel["_backward_producer"], loads, self.buffers, call, *sizes),
            *(partial(self._as, number, partial(consumer, number, *sizes)) for number in range(2)),
        ]

    def _as(self, number: int, consumer: Callable[[], None]) -> None:
        self.launch.here.number = number
        consumer()


class Launch(Device):
    """A few programs, which share a counter, and what they did."""

    def __init__(self, names: HopperBackward, lengths: tuple[int, int], seed: int) -> None:
        super().__init__(seed)
        self.steps: list[tuple[int, ...]] = []
        self.counter, self.lock = [0], threading.Lock()
        q_len, kv_len = lengths
        known = {
            **{"num_q_heads": 4, "num_kv_heads": 2, "left": 20},
            **{"q_len": q_len, "kv_len": kv_len, "rows_len": 512, "scale": 1.0},
        }
        self.call = tuple(known[name] for name in names.call)
        self.num_tiles = -(-kv_len // BLOCK) * 2 * 2  # two batch entries of two heads
        self.kernel = self._functions(names)

    def run(self, programs: int) -> None:
        """All programs to the end."""

        def run_in(program: Program, role: Callable[[], None]) -> None:
            self.here.program, self.here.programs = program, programs
            role()

        every = [Program(self, number) for number in range(programs)]
        self.run_at_once(partial(run_in, x, role) for x in every for role in x.roles())

    def store(self, desc: Any, place: list[int], tile: Tile) -> None:
        self.stored.append((desc.name, self.here.number, tuple(place)))

    def _meet(self) -> None:
        self.dawdle()
        self.here.program.meeting.wait(SECONDS)

    def _add(self, pointer: list[int], number: int) -> int:
        with self.lock:
            pointer[0] += number
            return pointer[0] - number

    def _check_step(self, step: Callable[..., Any], names: HopperBackward) -> Callable[..., Any]:
        """The step as it is; before it, everything that it reads has to be there."""

        def checked(*args: Any) -> Any:
            x = given(step, *args)
            q, grad_out, k, v, _ = self.here.program.loaded
            batch, kv_head, kv_first = x.program
            self.steps.append((self.here.number, batch, x.head, kv_first, x.tile))
            of_queries, of_keys = (batch, x.head, x.tile * BLOCK, 0), (batch, kv_head, kv_first, 0)
            assert self.read(q.index(x.stage)) == ("q", *of_queries)
            assert self.read(grad_out.index(x.stage)) == ("grad_out", *of_queries)
            assert self.read(k.index(x.keys[names.keys.index("k_number")])) == ("k", *of_keys)
            assert self.read(v) == ("v", *of_keys)
            return step(*args)

        return checked

    def _functions(self, names: HopperBackward) -> dict[str, Any]:
        fakes = self.fakes(
            gl={
                "program_id": lambda axis: self.here.program.number,
                "num_programs": lambda axis: self.here.programs,
                "atomic_add": self._add,
                "store": lambda pointer, number: pointer.__setitem__(0, number),
            },
            _meet=self._meet,
            _add_tile=lambda *_: None,
            _start_grad_q=lambda *_: NOTHING,
        )
        text = render_backward_hopper(names.backward, after_forward=False)
        found = functions_of(text, fakes, without=["_backward_hopper"])
        found["_backward_step"] = self._check_step(found["_backward_step"], names)
        return found


def of(spec: AttentionSpec) -> HopperBackward:
    return HopperBackward(backward_plan(lower(spec, "x")))


MASKS = {"full": full(), "causal": causal(), "window": sliding_window(20, 0)}
#: With more keys than queries see, there are tiles of keys that nothing visits.
LENGTHS = ((48, 48), (40, 150), (100, 20))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_each_visit_is_computed_once_of_what_was_loaded(
    mask: str, head_dim: int, lengths: tuple[int, int]
) -> None:
    names = of(AttentionSpec(head_dim, mask=MASKS[mask]))
    for seed, programs in ((0, 1), (1, 3)):
        launch = Launch(names, lengths, seed)
        launch.run(programs)
        places = {
            (batch, kv_head, kv_first)
            for batch in range(2)
            for kv_head in range(2)
            for kv_first in range(0, lengths[1], BLOCK)
        }
        expected = sorted(
            (number, batch, head, kv_first, launch.kernel["_query_tile"](visit, runs))
            if names.visits.splits
            else (number, batch, head, kv_first, visit)
            for batch, kv_head, kv_first in places
            for head in (2 * kv_head, 2 * kv_head + 1)
            for runs in [
                launch.kernel["_backward_visits"](batch, head, kv_first, launch.call, BLOCK, BLOCK)
            ]
            for visit in range(runs[0])
            for number in range(2)
        )
        assert sorted(launch.steps) == expected
        assert sorted(launch.stored) == sorted(
            (name, number, (batch, kv_head, kv_first + 64 * number, 0))
            for batch, kv_head, kv_first in places
            for name in ("grad_k", "grad_v")
            for number in range(2)
        )
        assert launch.counter == [0], "the next call finds a counter of 0"

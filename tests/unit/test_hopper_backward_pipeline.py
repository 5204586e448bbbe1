"""The roles of the Gluon kernel of the backward pass, as threads: who waits for what.

Producer and consumers are run as they are rendered, on the memory of `support.pipeline`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen import AttentionSpec, causal, full, sliding_window
from flashgen.codegen.render import render_backward_hopper
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.hopper_backward import HopperBackward
from support.pipeline import NOTHING, SECONDS, Barrier, Tile, Tiles, functions_of

BLOCK = 16


class Program:
    """One program: its memory, and three threads that are its roles."""

    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number
        self.meeting = threading.Barrier(2)
        two = range(2)
        barriers = [Tiles([Barrier() for _ in two]) for _ in range(4)]
        for array, count in zip(barriers, (1, 2, 1, 2), strict=True):
            for barrier in array:
                barrier.init(count)
        q, grad_out, k, made, slots = (Tiles([Tile() for _ in two]) for _ in range(5))
        rows = Tiles([Tile() for _ in range(4)])
        self.loaded = (q, grad_out, k, Tile(), rows)
        self.buffers = (self.loaded, tuple(barriers), (made, made), slots)

    def roles(self) -> list[Callable[[], None]]:
        gpu = self.gpu
        sources = (*gpu.sources, gpu.counter, gpu.num_tiles)
        results = (SimpleNamespace(layout=None),) * 3
        sizes = (BLOCK, BLOCK, 2)
        return [
            lambda: gpu.kernel["_backward_producer"](sources, self.buffers, gpu.call, *sizes),
            *(
                lambda n=n: gpu.kernel["_backward_consumer"](
                    results, self.buffers, gpu.call, n, *sizes
                )
                for n in range(2)
            ),
        ]


class Gpu:
    """A launch: a few programs, which share a counter, and what they did."""

    def __init__(self, names: HopperBackward, lengths: tuple[int, int], seed: int) -> None:
        self.random, self.here = Random(seed), threading.local()
        self.steps: list[tuple[int, ...]] = []
        self.stored: list[tuple[str, int, tuple[int, ...]]] = []
        self.counter, self.lock = [0], threading.Lock()
        q_len, kv_len = lengths
        known: dict[str, Any] = {
            "num_q_heads": 4,
            "num_kv_heads": 2,
            "q_len": q_len,
            "kv_len": kv_len,
        }
        known |= {"rows_len": 512, "scale": 1.0, "left": 20}
        self.call = tuple(known[name] for name in names.call)
        self.num_tiles = -(-kv_len // BLOCK) * 2 * 2  # two batch entries of two heads
        block = SimpleNamespace(nbytes=8)
        self.sources = tuple(
            SimpleNamespace(name=name, block_type=block)
            for name in ("q", "grad_out", "k", "v", "rows")
        )
        self.kernel = self._functions(names)

    def run(self, programs: int) -> None:
        """All to the end; what a role raises, is raised."""
        failures: list[BaseException] = []

        def role(program: Program, body: Callable[[], None]) -> None:
            self.here.program, self.here.programs = program, programs
            try:
                body()
            except BaseException as failure:
                failures.append(failure)

        threads = [
            threading.Thread(target=role, args=(program, body), daemon=True)
            for program in (Program(self, number) for number in range(programs))
            for body in program.roles()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "deadlock"

    def dawdle(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 4e-4)

    def copy(self, desc: Any, place: list[int], barrier: Barrier, tile: Tile) -> None:
        """The earliest that a copy can spoil a buffer, and some time later its arrival."""
        assert tile.arriving == 0, "two copies into one buffer may end in any order"
        tile.content, tile.arriving = (desc.name, *place), 1

        def arrive() -> None:
            self.dawdle()
            tile.arriving = 0
            barrier.change(0, -8)

        threading.Thread(target=arrive, daemon=True).start()

    def meet(self) -> None:
        self.dawdle()
        self.here.program.meeting.wait(SECONDS)

    def add(self, pointer: list[int], number: int) -> int:
        with self.lock:
            pointer[0] += number
            return pointer[0] - number

    def _check_step(self, step: Callable[..., Any], names: HopperBackward) -> Callable[..., Any]:
        """The step as it is; before it, everything that it reads has to be there."""

        def checked(*args: Any) -> Any:
            loaded, position = self.here.program.loaded, args[3:]
            stage, tile = position[0], position[3]
            keys = args[args.index(self.call) + 1]
            head = next(x for x in args[7:] if isinstance(x, int) and not isinstance(x, bool))
            number = self.here.number
            self.steps.append((number, keys[0], head, keys[2], tile))
            place = (keys[0], head, tile * BLOCK, 0)
            of_keys = (*keys, 0)
            k_number = args[args.index(self.call) - 3][names.keys.index("k_number")]

            def check_keys() -> None:
                assert loaded[2].index(k_number).content == ("k", *of_keys)
                assert loaded[3].content == ("v", *of_keys)

            for buffer, name in ((loaded[0], "q"), (loaded[1], "grad_out")):
                assert buffer.index(stage).content == (name, *place)
                assert not buffer.index(stage).arriving
            check_keys()
            self.dawdle()
            check_keys()
            assert loaded[0].index(stage).content == ("q", *place)
            return step(*args)

        return checked

    def _functions(self, names: HopperBackward) -> dict[str, Any]:
        def wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
            self.dawdle()
            if pred:
                barrier.wait(phase)

        def store_keys(desc: Any, place: list[int], tile: Tile) -> None:
            self.stored.append((desc.name, self.here.number, tuple(place)))

        gl = SimpleNamespace(
            where=lambda condition, a, b: a if condition else b,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            maximum=max,
            zeros=lambda *_: NOTHING,
            arange=lambda *_, **__: NOTHING,
            full=lambda shape, value, *_: value,
            max=lambda value, *_: value,
            exp2=lambda x: x,
            convert_layout=lambda x, *_, **__: x,
            program_id=lambda axis: self.here.program.number,
            num_programs=lambda axis: self.here.programs,
            atomic_add=self.add,
            store=lambda pointer, number: pointer.__setitem__(0, number),
            static_range=range,
            **dict.fromkeys(
                ("constexpr", "float32", "int32", "bfloat16", "NVMMADistributedLayout"), NOTHING
            ),
            **dict.fromkeys(("BlockedLayout", "SliceLayout", "DotOperandLayout"), NOTHING),
        )
        fakes: dict[str, Any] = {
            "gl": gl,
            "mbarrier": SimpleNamespace(
                wait=wait,
                expect=lambda barrier, size: barrier.change(1, size),
                arrive=lambda barrier, count: barrier.change(count, 0),
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.copy,
                async_copy_shared_to_global=store_keys,
                store_wait=lambda number: None,
            ),
            "warpgroup_mma": lambda *_, **__: NOTHING,
            "warpgroup_mma_wait": lambda number, deps: deps[0] if len(deps) == 1 else deps,
            "fence_async_shared": lambda: None,
            "_meet": self.meet,
            "_unknown_zero": lambda: 0,
            "_add_tile": lambda *_: None,
            "_backward_scores": lambda scores, *_: scores,
            "_start_scores_of_keys": lambda *_: NOTHING,
            "_start_grad_q": lambda *_: NOTHING,
        }
        text = render_backward_hopper(names.backward, after_forward=False)
        functions_of(text, fakes, without=["_backward_hopper"])
        fakes["_backward_step"] = self._check_step(fakes["_backward_step"], names)
        consumer = fakes["_backward_consumer"]

        def numbered(results: Any, buffers: Any, call: Any, number: int, *sizes: int) -> None:
            self.here.number = number
            named = [SimpleNamespace(layout=None, name=f"grad_{x}") for x in "qkv"]
            consumer(tuple(named), buffers, call, number, *sizes)

        fakes["_backward_consumer"] = numbered
        return fakes


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
        gpu = Gpu(names, lengths, seed)
        gpu.run(programs)
        places = {
            (batch, kv_head, kv_first)
            for batch in range(2)
            for kv_head in range(2)
            for kv_first in range(0, lengths[1], BLOCK)
        }
        expected = sorted(
            (number, batch, head, kv_first, gpu.kernel["_query_tile"](visit, runs))
            if names.visits.splits
            else (number, batch, head, kv_first, visit)
            for batch, kv_head, kv_first in places
            for head in (2 * kv_head, 2 * kv_head + 1)
            for runs in [
                gpu.kernel["_backward_visits"](batch, head, kv_first, gpu.call, BLOCK, BLOCK)
            ]
            for visit in range(runs[0])
            for number in range(2)
        )
        assert sorted(gpu.steps) == expected
        assert sorted(gpu.stored) == sorted(
            (name, number, (batch, kv_head, kv_first + 64 * number, 0))
            for batch, kv_head, kv_first in places
            for name in ("grad_k", "grad_v")
            for number in range(2)
        )
        assert gpu.counter == [0], "the next call finds a counter of 0"

"""The roles of a divided backward pass's Gluon kernels, as threads: who waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flashgen import AttentionSpec, causal, full, sink_tokens, sliding_window
from flashgen.codegen.render import render_backward_hopper
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.hopper_backward import HopperBackward
from flashgen.plan.hopper_visits import HopperVisits
from support.pipeline import (
    NOTHING,
    Device,
    HardwareBarrier,
    Number,
    Tile,
    barriers,
    functions_of,
    given,
    results,
    sources,
    tiles,
)

BLOCK, STAGES = 16, 2
BATCH, HEADS, GROUP = 1, 2, 2


class Launch(Device):
    """The programs of both kernels, one after the other, and what they did."""

    def __init__(self, names: HopperBackward, lengths: tuple[int, int], seed: int) -> None:
        super().__init__(seed)
        self.names, (self.q_len, self.kv_len) = names, lengths
        self.steps: list[tuple[object, ...]] = []
        self.known = {
            **{"num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "left": 20},
            **{"q_len": self.q_len, "kv_len": self.kv_len, "rows_len": 512, "scale": 1.0},
        }
        self.kernel = self._functions()

    def run_over_keys(self) -> None:
        """The kernel over tiles of keys."""
        for place in self._places(HEADS, self.kv_len):
            self._run(self._over_keys(*place))

    def run_over_queries(self) -> None:
        """The kernel over tiles of queries."""
        for place in self._places(HEADS * GROUP, self.q_len):
            self._run(self._over_queries(*place))

    def _over_keys(self, batch: int, head: int, first: int) -> list[Callable[[], None]]:
        """The roles of one program."""
        self.loaded = (tiles(STAGES), tiles(STAGES), Tile(), Tile(), tiles(2 * STAGES))
        of_tiles = (barriers(1)[0], barriers(1, STAGES), barriers(2, STAGES))
        buffers: tuple[Any, ...] = (self.loaded, of_tiles)
        if self.names.has_roles:
            buffers = (*buffers, Factors(self))
        call = tuple(self.known[name] for name in self.names.call)
        common = (buffers, call, (Number(batch), Number(head), first))
        sizes = (BLOCK, BLOCK, STAGES)
        loads, stores = sources("q", "grad_out", "k", "v", "rows"), results("grad_k", "grad_v")
        roles = [partial(self.kernel["_backward_producer"], loads, *common, *sizes)]
        if self.names.has_roles:
            for role in ("_values_consumer", "_keys_consumer"):
                roles.append(partial(self.kernel[role], stores, *common, *sizes))
        else:
            consumer = self.kernel["_backward_consumer"]
            roles += [partial(consumer, stores, *common, number, *sizes) for number in range(2)]
        return roles

    def _over_queries(self, batch: int, head: int, first: int) -> list[Callable[[], None]]:
        """The roles of one of the other kernel's."""
        names = self.names.of_queries
        v_stages = names.constants["V_STAGES"]
        self.loaded = (Tile(), Tile(), tiles(STAGES), tiles(v_stages))
        of_tiles = (barriers(count, n) for n in (STAGES, v_stages) for count in (1, 2))
        buffers = (self.loaded, (barriers(1)[0], *of_tiles))
        call = tuple(self.known[name] for name in names.call)
        common = (buffers, call, (Number(batch), Number(head), first))
        sizes = (BLOCK, BLOCK, STAGES, v_stages)
        (grad_q,) = results("grad_q")
        consumer = partial(self.kernel["_queries_consumer"], grad_q, NOTHING, *common)
        loads = sources("q", "grad_out", "k", "v")
        producer = partial(self.kernel["_queries_producer"], loads, *common, *sizes)
        return [producer, *(partial(consumer, number, *sizes) for number in range(2))]

    def _places(self, heads: int, length: int) -> list[tuple[int, int, int]]:
        firsts = range(0, length, BLOCK)
        return [(b, h, first) for b in range(BATCH) for h in range(heads) for first in firsts]

    def _run(self, roles: list[Callable[[], None]]) -> None:
        """All roles of a program to the end."""
        self.at = defaultdict(HardwareBarrier)
        self.run_at_once(roles)
        left = {number: barrier.arrived for number, barrier in self.at.items()}
        assert not any(left.values()), f"a hardware barrier is left with an arrival: {left}"

    def _functions(self) -> dict[str, Any]:
        def sync(number: int) -> None:
            self.dawdle()
            self.at[number].sync()

        fakes = self.fakes(
            gl={"num_programs": lambda axis: Number(1)},
            _meet=lambda: sync(10),
            _wait_at=sync,
            _arrive_at=lambda number: self.at[number].arrive(),
            _scores_of_queries=lambda scores, *_: scores,
            _start_scores_of_queries=lambda q, tiles, stage, _: self._start(tiles.index(stage)),
        )
        text = render_backward_hopper(self.names.backward, after_forward=False)
        kernels = ["_backward_hopper", "_backward_queries_hopper"]
        found = functions_of(text, fakes, without=kernels)
        for step in ("_values_step", "_keys_step", "_backward_step", "_queries_step"):
            if step in found:
                found[step] = getattr(self, step[1:])(found[step])
        return found

    def _start(self, tile: Tile) -> Any:
        """A product with a tile starts, which after the last visit is none that anyone reads."""
        self.here.__dict__.setdefault("started", []).append((tile.content, tile.arriving))
        return NOTHING

    def _visit(self, stage: int) -> tuple[int, ...]:
        """(batch, head, first query) of the queries in a stage, whose gradients are of the same."""
        (_, *place, _), (_, *other, _) = (self.read(x.index(stage)) for x in self.loaded[:2])
        assert place == other
        return tuple(place)

    def values_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as it is, of what has to be there."""
        return self._of_keys("values", step)

    def backward_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same of a pair of consumers."""
        return self._of_keys("both", step)

    def _of_keys(self, role: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            x = given(step, *args)
            self.here.visit = visit = self._visit(x.stage)
            assert visit[1:] == (x.head, x.tile * BLOCK)
            self.steps.append((role, *visit, self.loaded[2].content))
            return step(*args)

        return checked

    def keys_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same; factors are those of its queries."""

        def checked(*args: Any) -> Any:
            visit = self._visit(given(step, *args).stage)
            self.steps.append(("keys", *visit, self.loaded[2].content))
            found = step(*args)
            assert self.here.factors == visit
            return found

        return checked

    def queries_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Of the other kernel: the keys are there, and then the values, of the same tile."""

        def checked(*args: Any) -> Any:
            x = given(step, *args)
            keys = self.read(self.loaded[2].index(x.k_stage))
            assert keys[3] == x.tile * BLOCK
            self.steps.append(("queries", *keys[1:4], self.loaded[0].content))
            self.here.started = []
            found = step(*args)
            values, following = self.here.started
            assert values == (("v", *keys[1:]), 0)
            assert not x.more or (following[0][:3] == keys[:3] and not following[1])
            return found

        return checked


class Factors(Tile):
    """The tile by which one consumer hands to the other what belongs to a visit."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch

    def store(self, value: object) -> None:
        self.content = self.launch.here.visit
        self.launch.dawdle()

    def load(self, *_: object) -> Any:
        self.launch.here.factors = self.launch.read(self)
        return NOTHING


def of(spec: AttentionSpec) -> HopperBackward:
    return HopperBackward(backward_plan(lower(spec, "x")))


def _tiles(
    launch: Launch, visits: HopperVisits, place: tuple[int, int, int], call: tuple[Any, ...]
) -> list[int]:
    """What a tile visits, by the rendered functions themselves."""
    kernel = launch.kernel
    of_keys = visits.of == "q"
    counts = kernel["_backward_visits" if of_keys else "_visits_of_queries"]
    finds = kernel["_query_tile" if of_keys else "_tile_of_keys"]
    runs = counts(*place, call, BLOCK, BLOCK)
    if visits.splits:
        return [finds(visit, runs) for visit in range(runs[0])]
    return [finds(visit, runs, call, place[2], BLOCK)[0] for visit in range(runs[0])]


MASKS = {
    "full": full(),
    "causal": causal(align="bottom_right"),
    "window": sliding_window(20, 0),
    "two_runs": causal() & (sink_tokens(4) | sliding_window(9, 0)),
}
#: With more keys than queries see, there are tiles of keys that nothing visits.
LENGTHS = ((48, 48), (40, 150), (100, 20))
#: With roles, and of a pair of consumers.
SPECS = {256: AttentionSpec(256), 64: AttentionSpec(64, deterministic=True)}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", SPECS)
@pytest.mark.parametrize("mask", MASKS)
def test_keys(mask: str, head_dim: int, lengths: tuple[int, int]) -> None:
    names = of(replace(SPECS[head_dim], mask=MASKS[mask]))
    for seed in range(2):
        launch = Launch(names, lengths, seed)
        launch.run_over_keys()
        call = tuple(launch.known[name] for name in names.call)
        roles = ("values", "keys") if names.has_roles else ("both", "both")
        places = launch._places(HEADS, lengths[1])
        assert sorted(launch.steps) == sorted(
            (role, batch, head, tile * BLOCK, ("k", batch, kv_head, first, 0))
            for batch, kv_head, first in places
            for head in range(GROUP * kv_head, GROUP * kv_head + GROUP)
            for tile in _tiles(launch, names.visits, (batch, head, first), call)
            for role in roles
        )
        offsets = (0,) if names.has_roles else (0, 64)
        assert sorted(launch.stored) == sorted(
            (name, (batch, head, first + offset, 0))
            for batch, head, first in places
            for name in ("grad_k", "grad_v")
            for offset in offsets
        )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", SPECS)
@pytest.mark.parametrize("mask", MASKS)
def test_queries(mask: str, head_dim: int, lengths: tuple[int, int]) -> None:
    names = of(replace(SPECS[head_dim], mask=MASKS[mask]))
    queries = names.of_queries
    for seed in range(2):
        launch = Launch(names, lengths, seed)
        launch.run_over_queries()
        call = tuple(launch.known[name] for name in queries.call)
        places = launch._places(HEADS * GROUP, lengths[0])
        assert sorted(launch.steps) == sorted(
            ("queries", batch, head // GROUP, tile * BLOCK, ("q", batch, head, first, 0))
            for batch, head, first in places
            for tile in _tiles(launch, queries.visits, (batch, head, first), call)
            for _ in range(2)
        )
        assert sorted(launch.stored) == sorted(
            ("grad_q", (batch, head, first + 64 * number, 0))
            for batch, head, first in places
            for number in range(2)
        )

"""Engine: runs the steps that a scheduler decides on."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from .attention import ints
from .model import GPT, Attend
from .scheduler import Part, Request, Scheduler


class Decoding(Protocol):
    """A step of one token for each request: see `FlashgenDecoding`."""

    batch: int
    inputs: Any
    variants: Sequence[Any]
    variant: Any

    def put(self, requests: Sequence[Request]) -> list[Request | None]:
        """Makes a step one of these requests; returns the request of each row, or None."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The step's attention, for one token of each row."""


class Attention(Protocol):
    """What the engine needs of an attention: see `Flashgen`."""

    name: str

    def mixed(self, parts: list[Part]) -> Attend:
        """Attention of a step's packed tokens: parts that have keys before them come first."""

    def rows(self, requests: Sequence[Request]) -> int:
        """The rows that a step of decoding these requests has."""

    def decoding(self, batch: int) -> Decoding:
        """Steps of up to `batch` rows with one token each."""


class Engine:
    """A model that serves requests.

    On a GPU, steps that only decode are CUDA graphs, one for each of some batch sizes.

    Attributes:
        steps: how many steps of each kind there were.
    """

    def __init__(
        self,
        model: GPT,
        attention: Attention,
        scheduler: Scheduler,
        clock: Callable[[], float],
    ):
        self.model, self.attention = model, attention
        self.scheduler, self.clock = scheduler, clock
        self.device = model.head.weight.device
        most = scheduler.max_batch
        self.batches = sorted({n for n in (1, 2, 4, 8, *range(16, most, 16)) if n < most} | {most})
        self.decodings = {batch: attention.decoding(batch) for batch in self.batches}
        self.graphs: dict[tuple[int, Any], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.steps: Counter[str] = Counter()

    @torch.no_grad()
    def step(self) -> bool:
        """Computes a step; False if there is nothing to do yet."""
        parts = self.scheduler.next(self.clock())
        if not parts:
            return False
        if all(part.begin > 0 and part.count == 1 for part in parts):
            tokens = self._decode([part.request for part in parts])
        else:
            parts.sort(key=lambda part: part.begin == 0)  # as `mixed` wants them
            tokens = self._mixed(parts)
        self.scheduler.finish(parts, tokens, self.clock())
        return True

    def _mixed(self, parts: list[Part]) -> list[int]:
        """The tokens that follow the parts that are their requests' last."""
        self.steps["mixed"] += 1
        tokens = ints((token for part in parts for token in part.tokens), self.device)
        positions = ints((i for part in parts for i in range(part.begin, part.end)), self.device)
        ends = accumulate(part.count for part in parts)
        rows = ints(
            (e - 1 for e, part in zip(ends, parts, strict=True) if part.is_last), self.device
        )
        attend = self.attention.mixed(parts)
        return self.model(tokens, positions, attend, rows).argmax(-1).tolist()

    def _decode(self, requests: list[Request]) -> list[int]:
        needed = self.attention.rows(requests)
        decoding = self.decodings[self.batches[bisect_left(self.batches, needed)]]
        rows = decoding.put(requests)
        self.steps[f"decoding {decoding.variant}"] += 1
        tokens = self._decoded(decoding).tolist()
        of = {id(request): token for request, token in zip(rows, tokens, strict=True)}
        return [of[id(request)] for request in requests]

    def _decoded(self, decoding: Decoding) -> torch.Tensor:
        """The token of each row."""
        if self.device.type != "cuda":
            return self._next_tokens(decoding)
        key = (decoding.batch, decoding.variant)
        if key not in self.graphs:
            self.graphs[key] = self._captured(decoding)
        graph, tokens = self.graphs[key]
        graph.replay()
        return tokens

    def _next_tokens(self, decoding: Decoding) -> torch.Tensor:
        x = decoding.inputs.device
        return self.model(x["tokens"], x["positions"], decoding.attend).argmax(-1)

    def _captured(self, decoding: Decoding) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        for _ in range(2):  # kernels are compiled, and memory is taken, before
            self._next_tokens(decoding)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next((graph.pool() for graph, _ in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            tokens = self._next_tokens(decoding)
        return graph, tokens

    @torch.no_grad()
    def capture(self) -> None:
        """Makes all graphs, so that no step has to."""
        if self.device.type != "cuda":
            return
        for decoding in self.decodings.values():
            for variant in decoding.variants:
                decoding.variant = variant
                self.graphs[decoding.batch, variant] = self._captured(decoding)

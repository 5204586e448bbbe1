"""Work: the calls of a module that one rank makes of its part of a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from flashgen.distributed.exchange import Exchange
from flashgen.distributed.layout import Span
from flashgen.distributed.plan import Call

#: A chunk of a rank's queries, as a run of its shard, and its calls by ascending keys.
Chunk = tuple[Span, tuple[Call, ...]]


@dataclass(frozen=True, eq=False)
class Work:
    """What a rank does in a call.

    Attributes:
        module: whose attention it is.
        exchange: the rows that travel.
        scale: that of the call.
        numbers: parameters that are no tensors.
        tensors: the names of those that are.
        reduce_learned: whether gradients of these are added up over the ranks.
        first_head: the number of the first head of queries that calls get.
    """

    module: ModuleType
    exchange: Exchange
    scale: float | None
    numbers: Mapping[str, Any]
    tensors: tuple[str, ...]
    reduce_learned: bool
    first_head: int = 0

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The calls of each chunk of this rank's queries that has some."""
        plan, rank = self.exchange.plan, self.exchange.rank
        return tuple(
            ((start, start + end - begin), calls)
            for (begin, end), start, calls in zip(
                plan.queries.chunks[rank],
                plan.queries.starts(rank),
                plan.calls(rank),
                strict=True,
            )
            if begin < end
        )

    def attend(
        self,
        call: Call,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        first_head: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of a call.

        Args:
            call: which queries and keys of the following it has.
            q: queries of this rank's shard.
            keys: keys of the rows that the call names.
            values: likewise.
            tensors: parameters.
            first_head: the number of the first head of q, among those of the work.
        """
        seen = slice(*call.keys)
        given = q[:, :, slice(*call.queries)], keys[:, :, seen], values[:, :, seen]
        options = self._options(call, tensors, first_head)
        found: tuple[torch.Tensor, torch.Tensor]
        found = self.module.attention(*given, return_lse=True, **options)
        return found

    def gradients(
        self,
        call: Call,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        first_head: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of a call: of its queries, keys, values and learned tensors.

        Args:
            call: as of `attend`, like q, keys, values, tensors and first_head.
            q: queries.
            keys: keys.
            values: values.
            saved: output, log-sum-exp and the output's gradient of the call's queries.
            tensors: parameters.
            first_head: the number of the first head of q, among those of the work.
        """
        seen = slice(*call.keys)
        given = q[:, :, slice(*call.queries)], keys[:, :, seen], values[:, :, seen], *saved
        options = self._options(call, tensors, first_head)
        found: tuple[torch.Tensor, ...] = self.module.partial_gradients(*given, **options)
        return found

    def _options(
        self, call: Call, tensors: Sequence[torch.Tensor], first_head: int
    ) -> dict[str, Any]:
        """The keywords of a call of the module."""
        head = self.first_head + first_head
        at = {"q_offset": call.q_offset, "kv_offset": call.kv_offset, "head_offset": head}
        offsets = {name: at[name] for name in self.module.MESH["offsets"]}
        named = dict(zip(self.tensors, tensors, strict=True))
        return {"scale": self.scale, **self.numbers, **offsets, **named}

    def merged(
        self, results: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of calls with the same queries."""
        if len(results) == 1:
            return results[0]
        found: tuple[torch.Tensor, torch.Tensor] = self.module.merge(*zip(*results, strict=True))
        return found

    def no_learned(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Zeros for the gradients of learned tensors, in float32 or wider."""
        named = dict(zip(self.tensors, tensors, strict=True))
        learned = [named[name] for name in self.module.MESH["learned"]]
        return [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in learned]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def unseen(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of queries that see no key."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=wide(q.dtype))


def in_order(parts: Iterable[tuple[Span, torch.Tensor]], empty: torch.Tensor) -> torch.Tensor:
    """A tensor (batch, heads, rows, ...) from its runs of rows; a single run is not copied.

    Args:
        parts: all runs, each with its tensor.
        empty: what no run at all makes.
    """
    tensors = [part for _, part in sorted(parts, key=lambda part: part[0])]
    if len(tensors) < 2:
        return tensors[0] if tensors else empty
    return torch.cat(tensors, 2)

"""Both passes of one rank: calls of a module for parts of the whole, while others' rows travel.

Heads go in groups, one after another: while a group is computed, the keys of the next travel, and
the gradients of the one before go back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashgen.distributed.exchange import Exchange, Returned
from flashgen.distributed.plan import Call


@dataclass(frozen=True, eq=False)
class Work:
    """What a rank does in a call.

    Attributes:
        module: whose attention it is.
        exchange: the rows that travel.
        parts: the number of groups of heads.
        scale: that of the call.
        numbers: parameters that are no tensors.
        tensors: the names of those that are.
    """

    module: ModuleType
    exchange: Exchange
    parts: int
    scale: float | None
    numbers: Mapping[str, Any]
    tensors: tuple[str, ...]

    @cached_property
    def chunks(self) -> tuple[tuple[Call, ...], ...]:
        """The calls for each chunk of this rank's queries."""
        return self.exchange.plan.calls(self.exchange.rank)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each chunk of this rank's shard."""
        queries = self.exchange.plan.queries
        starts = queries.starts(self.exchange.rank)
        chunks = zip(queries.chunks[self.exchange.rank], starts, strict=True)
        return tuple((start, start + end - begin) for (begin, end), start in chunks)

    @cached_property
    def most_calls(self) -> int:
        """How many calls read a row of keys, at most."""
        ends = [(end, sign) for call in self._calls for end, sign in _signed(call)]
        most = now = 0
        for _, sign in sorted(ends):  # an end comes before a begin at the same row
            now += sign
            most = max(most, now)
        return most

    @property
    def _calls(self) -> Iterator[Call]:
        return (call for calls in self.chunks for call in calls)

    def arguments(self, call: Call, tensors: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """The keywords of a call of the module."""
        at = {"q_offset": call.q_offset, "kv_offset": call.kv_offset}
        offsets = {name: at[name] for name in self.module.MESH["offsets"]}
        named = dict(zip(self.tensors, tensors, strict=True))
        return {"scale": self.scale, **self.numbers, **offsets, **named}

    def heads(self, q: torch.Tensor, k: torch.Tensor) -> list[tuple[slice, slice]]:
        """The heads of the queries and of the keys of each part."""
        of_q, of_k = q.shape[1] // self.parts, k.shape[1] // self.parts
        return [
            (slice(i * of_q, (i + 1) * of_q), slice(i * of_k, (i + 1) * of_k))
            for i in range(self.parts)
        ]

    def arriving(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """The heads of each part and its keys and values, while those of the next travel."""
        heads = self.heads(q, k)
        coming = self.exchange.bring(*(x[:, heads[0][1]] for x in (k, v)))
        for number, (of_q, of_k) in enumerate(heads):
            rows = coming.wait()
            if number + 1 < len(heads):
                coming = self.exchange.bring(*(x[:, heads[number + 1][1]] for x in (k, v)))
            rows = rows.permute(1, 2, 0, 3)
            yield of_q, of_k, rows[..., : k.shape[3]], rows[..., k.shape[3] :]


def run(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor
) -> torch.Tensor:
    """The output of a rank's queries: see `flashgen.distributed.attend`."""
    out: torch.Tensor = _Attention.apply(work, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    """The attention of a rank's queries; its backward pass asks for the keys again."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for of_q, _, keys, values in work.arriving(q, k, v):
            for (begin, end), calls in zip(work.spans, work.chunks, strict=True):
                rows = slice(None), of_q, slice(begin, end)
                if begin == end:
                    continue
                if not calls:
                    out[rows], lse[rows] = 0.0, -torch.inf
                    continue
                outs, lses = [], []
                for call in calls:
                    seen = slice(*call.keys)
                    result = work.module.attention(
                        q[rows],
                        keys[:, :, seen],
                        values[:, :, seen],
                        return_lse=True,
                        **work.arguments(call, tensors),
                    )
                    outs.append(result[0])
                    lses.append(result[1])
                out[rows], lse[rows] = (
                    work.module.merge(outs, lses) if len(outs) > 1 else (outs[0], lses[0])
                )
        ctx.work = work
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        work: Work = ctx.work
        wide = torch.promote_types(q.dtype, torch.float32)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        learned = [
            torch.zeros(tensors[work.tensors.index(name)].shape, dtype=wide, device=q.device)
            for name in work.module.MESH["learned"]
        ]
        going: list[tuple[slice, Returned]] = []
        for of_q, of_k, keys, values in work.arriving(q, k, v):
            sums = _Sums(work, keys, values)
            for (begin, end), calls in zip(work.spans, work.chunks, strict=True):
                rows = slice(None), of_q, slice(begin, end)
                if begin == end:
                    continue
                if not calls:
                    grads[0][rows] = 0.0
                    continue
                saved = out[rows].contiguous(), lse[rows].contiguous()
                of_queries = []
                for call in calls:
                    seen = slice(*call.keys)
                    found = work.module.partial_gradients(
                        q[rows],
                        keys[:, :, seen],
                        values[:, :, seen],
                        *saved,
                        grad_out[rows],
                        **work.arguments(call, tuple(tensors)),
                    )
                    of_queries.append(found[0])
                    sums.add(call, found[1], found[2])
                    for total, x in zip(learned, found[3:], strict=True):
                        total += x
                grads[0][rows] = _sum(of_queries, wide)
            going.append((of_k, work.exchange.give_back(sums.total())))
        for of_k, returned in going:
            returned.add_to(grads[1][:, of_k], grads[2][:, of_k])
        for total in learned:
            dist.all_reduce(total, group=work.exchange.group)
        of_tensors = dict(zip(work.module.MESH["learned"], learned, strict=True))
        return (
            None,
            *grads,
            *(
                of_tensors[name].to(x.dtype) if name in of_tensors else None
                for name, x in zip(work.tensors, tensors, strict=True)
            ),
        )


def _sum(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A sum in a dtype and in order; of one number it is that."""
    first, *others = parts
    return sum((x.to(dtype) for x in others), first.to(dtype)) if others else first


def _signed(call: Call) -> tuple[tuple[int, int], tuple[int, int]]:
    """The ends of a call's keys: 1 where they begin, -1 where they end."""
    return (call.keys[0], 1), (call.keys[1], -1)


class _Sums:
    """The gradients of the rows that a rank needs, over its calls, in float32.

    Two numbers of 16 bits have one sum in 16 bits, whether it was rounded once or from float32. So
    where a row is in two calls at most, the sums are in the dtype of the keys.
    """

    def __init__(self, work: Work, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._dtype, self._width = keys.dtype, keys.shape[3]
        dtype = keys.dtype
        if work.most_calls > 2:
            dtype = torch.promote_types(keys.dtype, torch.float32)
        batch, heads, rows, _ = keys.shape
        self._sums = keys.new_zeros(
            rows, batch, heads, keys.shape[3] + values.shape[3], dtype=dtype
        )

    def add(self, call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
        """Adds the gradients of a call's keys and values."""
        rows = self._sums[slice(*call.keys)]
        rows[..., : self._width] += grad_k.permute(2, 0, 1, 3)
        rows[..., self._width :] += grad_v.permute(2, 0, 1, 3)

    def total(self) -> torch.Tensor:
        """The sums, in the keys' dtype."""
        return self._sums.to(self._dtype)

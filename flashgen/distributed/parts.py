"""Both passes of one rank: calls of a module for parts of the whole, while others' rows travel.

Heads go in groups, one after another: while a group is computed, the keys of the next travel, and
the gradients of the one before go back. Calls run in turns on two streams: the last tiles of a call
leave SMs idle, which the next call takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashgen.distributed.exchange import Exchange, Returned
from flashgen.distributed.lanes import Lanes
from flashgen.distributed.layout import Span
from flashgen.distributed.plan import Call


@dataclass(frozen=True, eq=False)
class Work:
    """What a rank does in a call.

    Attributes:
        module: whose attention it is.
        exchange: the rows that travel.
        parts: the number of groups of heads, all alike; None: groups that begin and end small.
        scale: that of the call.
        numbers: parameters that are no tensors.
        tensors: the names of those that are.
        reduce_learned: whether gradients of these are added up over the ranks.
    """

    module: ModuleType
    exchange: Exchange
    parts: int | None
    scale: float | None
    numbers: Mapping[str, Any]
    tensors: tuple[str, ...]
    reduce_learned: bool

    @cached_property
    def chunks(self) -> tuple[tuple[Call, ...], ...]:
        """The calls for each chunk of this rank's queries."""
        return self.exchange.plan.calls(self.exchange.rank)

    @cached_property
    def longest_first(self) -> tuple[tuple[Span, tuple[Call, ...]], ...]:
        """Each chunk of this rank's shard and its calls; those with most keys come first."""
        chunks = [x for x in zip(self._spans, self.chunks, strict=True) if x[0][0] < x[0][1]]
        keys = [sum(call.keys[1] - call.keys[0] for call in calls) for _, calls in chunks]
        return tuple(chunks[i] for i in sorted(range(len(chunks)), key=lambda i: (-keys[i], i)))

    @property
    def _spans(self) -> tuple[Span, ...]:
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

    def arguments(
        self, call: Call, tensors: tuple[torch.Tensor, ...], of_q: slice
    ) -> dict[str, Any]:
        """The keywords of a call of the module, for some heads of the queries."""
        at = {"q_offset": call.q_offset, "kv_offset": call.kv_offset, "head_offset": of_q.start}
        offsets = {name: at[name] for name in self.module.MESH["offsets"]}
        named = dict(zip(self.tensors, tensors, strict=True))
        return {"scale": self.scale, **self.numbers, **offsets, **named}

    def heads(self, q: torch.Tensor, k: torch.Tensor, backward: bool) -> list[tuple[slice, slice]]:
        """The heads of the queries and of the keys of each group, in their order."""
        group = q.shape[1] // k.shape[1]
        ends = list(accumulate(self.groups(k.shape[1], backward), initial=0))
        return [
            (slice(begin * group, end * group), slice(begin, end)) for begin, end in pairwise(ends)
        ]

    def groups(self, heads: int, backward: bool) -> tuple[int, ...]:
        """How many heads of keys each group has.

        Nothing is computed before the rows of the first group are there, and nothing while the
        gradients of the last go back, so that these are small.
        """
        if self.parts is not None:
            return (heads // self.parts,) * self.parts
        few = max(1, heads // 8)
        if heads < 2:
            return (heads,)
        if not backward or heads < 3:
            return few, heads - few
        return few, heads - 2 * few, few

    def arriving(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backward: bool
    ) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """The heads of each group and its keys and values, while those of the next travel."""
        heads = self.heads(q, k, backward)
        coming = [self.exchange.bring(k[:, of_k], v[:, of_k]) for _, of_k in heads[:2]]
        for number, (of_q, of_k) in enumerate(heads):
            rows = coming.pop(0).wait().permute(1, 2, 0, 3)
            if number + 2 < len(heads):
                after = heads[number + 2][1]
                coming.append(self.exchange.bring(k[:, after], v[:, after]))
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
        lanes = Lanes(q.device)
        found: list[tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        for of_q, _, keys, values in work.arriving(q, k, v, backward=False):
            lanes.keep(keys, values)
            for span, calls in work.longest_first:
                rows = slice(None), of_q, slice(*span)
                results = []
                for call in calls:
                    seen = slice(*call.keys)
                    given = q[rows], keys[:, :, seen], values[:, :, seen]
                    options = work.arguments(call, tensors, of_q)
                    results.append(
                        lanes.run(work.module.attention, *given, return_lse=True, **options)
                    )
                found.append((rows, results))
        lanes.join()
        for rows, results in found:
            if not results:
                out[rows], lse[rows] = 0.0, -torch.inf
            elif len(results) == 1:
                out[rows], lse[rows] = results[0]
            else:
                out[rows], lse[rows] = work.module.merge(*zip(*results, strict=True))
        ctx.work = work
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        work: Work = ctx.work
        wide = torch.promote_types(q.dtype, torch.float32)
        named = dict(zip(work.tensors, tensors, strict=True))
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        learned = [
            torch.zeros(named[name].shape, dtype=wide, device=q.device)
            for name in work.module.MESH["learned"]
        ]
        lanes = Lanes(q.device)
        going: list[tuple[slice, Returned]] = []

        def take(of_k: slice, returned: Returned) -> None:
            returned.add_to(grads[1][:, of_k], grads[2][:, of_k])

        def finish(group: Group) -> None:
            """Adds up what the calls of a group have found, and sends it back."""
            lanes.join(group.number)
            sums = Sums(work, group.keys, group.values)
            for rows, calls, results in group.found:
                for call, result in zip(calls, results, strict=True):
                    sums.add(call, result[1], result[2])
                    for total, x in zip(learned, result[3:], strict=True):
                        total += x
                grads[0][rows] = _sum([result[0] for result in results], wide) if results else 0.0
            going.append((group.of_k, work.exchange.give_back(sums.total())))
            if len(going) > 1:  # those of the group before have had the time of this one
                take(*going.pop(0))

        before: Group | None = None
        arriving = work.arriving(q, k, v, backward=True)
        for number, (of_q, of_k, keys, values) in enumerate(arriving):
            group = Group(number, of_k, keys, values)
            lanes.keep(keys, values)
            for span, calls in work.longest_first:
                rows = slice(None), of_q, slice(*span)
                saved = out[rows].contiguous(), lse[rows].contiguous()
                lanes.keep(*saved)
                results = []
                for call in calls:
                    seen = slice(*call.keys)
                    given = q[rows], keys[:, :, seen], values[:, :, seen], *saved, grad_out[rows]
                    options = work.arguments(call, tuple(tensors), of_q)
                    results.append(lanes.run(work.module.partial_gradients, *given, **options))
                group.found.append((rows, calls, results))
            lanes.mark(number)
            # What the group before has found is added up while this one is computed.
            if before is not None:
                finish(before)
            before = group
        if before is not None:
            finish(before)
        for each in going:
            take(*each)
        for total in learned if work.reduce_learned else ():
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


@dataclass(eq=False)
class Group:
    """A group of heads in the backward pass.

    Attributes:
        number: its place.
        of_k: its heads of keys.
        keys: its keys, and likewise its values.
        found: for each chunk of queries its index, its calls, and the gradients of these.
    """

    number: int
    of_k: slice
    keys: torch.Tensor
    values: torch.Tensor
    found: list[tuple[Any, tuple[Call, ...], list[tuple[torch.Tensor, ...]]]] = field(
        default_factory=list
    )


def _sum(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A sum in a dtype and in order; of one number it is that."""
    first, *others = parts
    return sum((x.to(dtype) for x in others), first.to(dtype)) if others else first


def _signed(call: Call) -> tuple[tuple[int, int], tuple[int, int]]:
    """The ends of a call's keys: 1 where they begin, -1 where they end."""
    return (call.keys[0], 1), (call.keys[1], -1)


class Sums:
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
        shape = rows, batch, heads, keys.shape[3] + values.shape[3]
        # The first call is the longest: often all rows are in it.
        self._empty = bool(work.longest_first) and any(
            call.keys == (0, rows) for call in work.longest_first[0][1][:1]
        )
        made = torch.empty if self._empty else torch.zeros
        self._sums = made(shape, dtype=dtype, device=keys.device)

    def add(self, call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
        """Adds the gradients of a call's keys and values."""
        rows = self._sums[slice(*call.keys)]
        parts = (rows[..., : self._width], grad_k), (rows[..., self._width :], grad_v)
        for total, x in parts:
            if self._empty and len(rows) == len(self._sums):
                total.copy_(x.permute(2, 0, 1, 3))
            else:
                total += x.permute(2, 0, 1, 3)
        self._empty = False

    def total(self) -> torch.Tensor:
        """The sums, in the keys' dtype."""
        return self._sums.to(self._dtype)

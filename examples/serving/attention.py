"""Attention of a step to keys in pages, by flashgen's modules: what examples/serve.py is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from types import ModuleType

import torch

from flashgen import AttentionSpec, causal

from .cascade import cascade, groups_of
from .model import Attend, Size
from .pages import Pages
from .scheduler import Part, Request

#: Groups that share a prefix: so many in a step at most.
MOST_GROUPS = 4

#: Bytes of a layer's keys and values that a group has to save before its prefix is read apart,
#: which takes two kernels more. On an H100 64 requests with 16 heads over 4 of keys took 64 us to
#: read 1,536 keys each, and 62 with 1,024 of them apart; 157 and 75 with 4,096 of 4,608. With 32
#: requests and 1,024 of 1,280 keys it was 27 and 36.
CASCADE_FROM = 128 * 2**20


def specs(head_dim: int, dtype: str) -> tuple[AttentionSpec, AttentionSpec]:
    """The attentions of a server: causal, and without a mask for prefixes that all have read."""
    own = AttentionSpec(
        head_dim,
        dtype,
        mask=causal(align="bottom_right"),
        forms=("dense", "varlen", "cache"),
        name="serve_causal",
    )
    return own, AttentionSpec(head_dim, dtype, forms=("dense", "cache"), name="serve_prefix")


class Inputs:
    """int32 tensors that are written on the host and copied to a device at once.

    Attributes:
        host: numpy arrays by name.
        device: tensors by name, which stay where they are: a CUDA graph may read them.
    """

    def __init__(self, device: torch.device, **shapes: tuple[int, ...]):
        # Each begins at a multiple of 16 bytes.
        sizes = {name: -(-prod(shape) // 4) * 4 for name, shape in shapes.items()}
        host = torch.zeros(sum(sizes.values()), dtype=torch.int32)
        self._host = host.pin_memory() if device.type == "cuda" else host
        self._device = self._host.to(device, copy=True)

        def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = dict(zip(sizes, x.split(list(sizes.values())), strict=True))
            return {n: part[: prod(shapes[n])].view(shapes[n]) for n, part in parts.items()}

        self.host = {name: x.numpy() for name, x in views(self._host).items()}
        self.device = views(self._device)

    def send(self) -> None:
        """Copies what the host wrote, which may not change before the copy has ended."""
        self._device.copy_(self._host, non_blocking=True)


def ints(numbers: Iterable[int], device: torch.device) -> torch.Tensor:
    """An int32 tensor."""
    return torch.tensor(list(numbers), dtype=torch.int32).to(device, non_blocking=True)


def table_of(requests: Sequence[Request], device: torch.device) -> torch.Tensor:
    """The pages of requests, (requests, pages) int32, -1 behind the last."""
    most = max(len(request.pages) for request in requests)
    rows = [request.pages + [-1] * (most - len(request.pages)) for request in requests]
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)


def caches_of(size: Size, shape: tuple[int, ...], like: torch.Tensor) -> list[list[torch.Tensor]]:
    """The keys and the values of each layer, of zeros."""
    return [[like.new_zeros(shape) for _ in "kv"] for _ in range(size.depth)]


class Flashgen:
    """Keys in pages. Prompts that begin are computed packed, all else against the cache."""

    name = "flashgen"

    def __init__(
        self,
        modules: tuple[ModuleType, ModuleType],
        size: Size,
        pages: Pages,
        like: torch.Tensor,
        cascade_from: int = CASCADE_FROM,
    ):
        """Pages of zeros in the dtype and on the device of a tensor."""
        self.causal, self.full = modules
        self.size, self.page_size, self.device = size, pages.size, like.device
        shape = (len(pages.users), pages.size, size.kv_heads, size.head_dim)
        self.caches = caches_of(size, shape, like)
        page_bytes = pages.size * size.cached * like.element_size()
        self.shares = pages.keep
        self.least_saved = -(-cascade_from // page_bytes)

    def mixed(self, parts: list[Part]) -> Attend:
        """Attention of a step's packed tokens: parts that have keys before them come first."""
        ends = [0, *accumulate(part.count for part in parts)]
        old = sum(part.begin > 0 for part in parts)
        of_old, longest = ends[old], max((part.count for part in parts[:old]), default=0)
        longest_new = max((part.count for part in parts[old:]), default=0)
        begins = ints(ends, self.device)
        begins_new = ints((end - of_old for end in ends[old:]), self.device)
        lens = ints((part.end for part in parts), self.device)
        table = table_of([part.request for part in parts], self.device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = self.caches[layer]
            # All keys are written before any is read: parts may share pages of this very step.
            self.causal.append(k, v, *cache, lens, table, cu_seqlens=begins)
            out = q.new_empty(q.shape)
            if old:
                self.causal.cache_attention(
                    q[:of_old], *cache, lens[:old], block_table=table[:old],
                    cu_seqlens_q=begins[: old + 1], max_q_len=longest, out=out[:of_old],
                )  # fmt: skip
            if old < len(parts):
                new = (x[of_old:] for x in (q, k, v))
                lengths = (begins_new, begins_new, longest_new, longest_new)
                out[of_old:] = self.causal.varlen_attention(*new, *lengths)
            return out

        return attend

    def rows(self, requests: Sequence[Request]) -> int:
        """The rows that a step of them has."""
        return len(requests)

    def decoding(self, batch: int) -> FlashgenDecoding:
        """Steps of up to `batch` requests with one token each."""
        return FlashgenDecoding(self, batch)


class FlashgenDecoding:
    """A step of one token for each request, on tensors that stay where they are.

    Attributes:
        batch: the most requests.
        inputs: what a step reads: `tokens` and `positions`, and where keys are.
        variant: whether prefixes are read apart, for the requests that were put in last.
        variants: what it may be.
    """

    def __init__(self, attention: Flashgen, batch: int):
        self.attention, self.batch, self.variant = attention, batch, False
        self.variants = (False, True) if attention.shares else (False,)
        pages = -(-attention.size.max_len // attention.page_size)
        self.inputs = Inputs(
            attention.device,
            tokens=(batch,),
            positions=(batch,),
            lens=(batch,),
            table=(batch, pages),
            own_lens=(batch,),
            own_table=(batch, pages),
            group_ends=(MOST_GROUPS + 2,),
            prefix_lens=(MOST_GROUPS + 1,),
            prefix_table=(MOST_GROUPS + 1, pages),
        )

    def put(self, requests: Sequence[Request]) -> list[Request | None]:
        """Makes a step one of these requests; returns the request of each row, or None."""
        attention, host = self.attention, self.inputs.host
        groups = groups_of(requests, attention.page_size, attention.least_saved, MOST_GROUPS)
        self.variant = bool(groups)
        prefix = {id(r): group.pages for group in groups for r in group.requests}
        rows = [r for group in groups for r in group.requests]
        rows += [r for r in requests if id(r) not in prefix]
        host["lens"][:] = host["own_lens"][:] = host["prefix_lens"][:] = 0
        for row, request in enumerate(rows):
            skipped, pages = prefix.get(id(request), 0), request.pages
            host["tokens"][row] = request.tokens[-1]
            host["positions"][row] = request.computed
            host["lens"][row] = request.computed + 1
            host["table"][row, : len(pages)] = pages
            host["own_lens"][row] = request.computed + 1 - skipped * attention.page_size
            host["own_table"][row, : len(pages) - skipped] = pages[skipped:]
        end = 0
        host["group_ends"][0] = 0
        for number in range(MOST_GROUPS):
            if number < len(groups):
                group = groups[number]
                end += len(group.requests)
                host["prefix_lens"][number] = group.pages * attention.page_size
                host["prefix_table"][number, : group.pages] = group.requests[0].pages[: group.pages]
            host["group_ends"][number + 1] = end
        host["group_ends"][MOST_GROUPS + 1] = self.batch  # the others are a group without a prefix
        self.inputs.send()
        return [*rows, *[None] * (self.batch - len(rows))]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The step's attention; rows without a request are 0."""
        x, module, cache = self.inputs.device, self.attention.causal, self.attention.caches[layer]
        module.append(k[:, None], v[:, None], *cache, x["lens"], x["table"])
        if not self.variant:
            out = module.cache_attention(q[:, None], *cache, x["lens"], block_table=x["table"])
            return out[:, 0]
        names = ("group_ends", "prefix_lens", "prefix_table", "own_lens", "own_table")
        return cascade(module, self.attention.full, q, *cache, *(x[name] for name in names))

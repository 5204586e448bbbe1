"""Attention of a step by others, for comparison: torch's SDPA over padded rows, and FlashInfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from .attention import Inputs, caches_of, ints, table_of
from .model import Attend, Size, dense
from .pages import Pages
from .scheduler import Part, Request

#: Rows are read up to a multiple of so many keys.
STEP = 1024


class Padded:
    """A row of the cache for each request, as long as the longest may be.

    A page is such a row. Attention of many requests reads the rows up to the longest one's end.
    """

    name = "SDPA, padded"

    def __init__(self, size: Size, pages: Pages, like: torch.Tensor):
        """Rows of zeros in the dtype and on the device of a tensor."""
        self.size, self.device = size, like.device
        shape = (len(pages.users), size.kv_heads, pages.size, size.head_dim)
        self.caches = caches_of(size, shape, like)
        self.positions = torch.arange(pages.size, device=like.device)

    def mixed(self, parts: list[Part]) -> Attend:
        """A part of several tokens by itself, all parts of one token together."""
        ends = [0, *accumulate(part.count for part in parts)]
        spans = [(part, slice(*ends[i : i + 2])) for i, part in enumerate(parts)]
        singles = [(part, span) for part, span in spans if part.count == 1]
        at = ints((span.start for _, span in singles), self.device)
        rows = ints((part.request.pages[0] for part, _ in singles), self.device)
        last = ints((part.begin for part, _ in singles), self.device)
        used = 1 + max((part.request.pages[0] for part, _ in singles), default=0)
        longest = max((part.end for part, _ in singles), default=0)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = q.new_empty(q.shape)
            for part, span in spans:
                if part.count == 1:
                    continue
                row, keys = part.request.pages[0], []
                for cache, x in zip(self.caches[layer], (k, v), strict=True):
                    cache[row, :, part.begin : part.end] = x[span].transpose(0, 1)
                    keys.append(cache[row, :, : part.end].transpose(0, 1))
                if part.begin == 0:
                    out[span] = dense(layer, q[span], k[span], v[span])
                    continue
                seen = self.positions[part.begin : part.end, None] >= self.positions[: part.end]
                heads_first = (x.transpose(0, 1)[None] for x in (q[span], *keys))
                of_part = F.scaled_dot_product_attention(
                    *heads_first, attn_mask=seen, enable_gqa=True
                )
                out[span] = of_part[0].transpose(0, 1)
            if singles:
                self.write(layer, k[at], v[at], rows, last)
                of_rows, positions = q.new_zeros(used, *q.shape[1:]), last.new_zeros(used)
                of_rows[rows], positions[rows] = q[at], last
                out[at] = self.read(layer, of_rows, positions, longest)[rows]
            return out

        return attend

    def write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Writes one key of each row."""
        for cache, x in zip(self.caches[layer], (k, v), strict=True):
            cache[rows, :, positions] = x

    def read(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """One query of each of the first rows, at these positions, none of them past `longest`."""
        keys = (cache[: len(q), :, :longest] for cache in self.caches[layer])
        seen = self.positions[:longest] <= positions[:, None]
        # Heads that share keys are queries of one head: kernels with a mask know no groups.
        grouped = q.unflatten(1, (self.size.kv_heads, -1))
        out = F.scaled_dot_product_attention(grouped, *keys, attn_mask=seen[:, None, None])
        return out.flatten(1, 2)

    def rows(self, requests: Sequence[Request]) -> int:
        """The rows that a step of them has."""
        return 1 + max(request.pages[0] for request in requests)

    def decoding(self, batch: int) -> PaddedDecoding:
        """Steps of up to `batch` requests with one token each."""
        return PaddedDecoding(self, batch)


class PaddedDecoding:
    """A step of one token for each request; its variant is how many keys of each row it reads."""

    def __init__(self, attention: Padded, batch: int):
        self.attention, self.batch = attention, batch
        most = attention.size.max_len
        self.variants = [*range(STEP, most, STEP), most]
        self.variant = most
        names = ("tokens", "positions", "rows")
        self.inputs = Inputs(attention.device, **dict.fromkeys(names, (batch,)))
        self.inputs.host["rows"][:] = range(batch)

    def put(self, requests: Sequence[Request]) -> list[Request | None]:
        """A request is in the row of its page, so that nothing has to be gathered.

        Rows without a request get a key that the next request of the row writes anew.
        """
        host, rows = self.inputs.host, [None] * self.batch
        host["positions"][:] = 0
        for request in requests:
            row = request.pages[0]
            rows[row] = request
            host["tokens"][row] = request.tokens[-1]
            host["positions"][row] = request.computed
        longest = max(request.computed for request in requests) + 1
        self.variant = min(-(-longest // STEP) * STEP, self.attention.size.max_len)
        self.inputs.send()
        return rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The step's attention."""
        x = self.inputs.device
        self.attention.write(layer, k, v, x["rows"], x["positions"])
        return self.attention.read(layer, q, x["positions"], self.variant)


def has_flashinfer() -> bool:
    """Whether FlashInfer can be imported."""
    return find_spec("flashinfer") is not None


def begins_of(counts: Iterable[int]) -> torch.Tensor:
    """Where runs of so many begin, and the end of the last: int32 on the host."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def keys_in_pages(
    requests: Sequence[Request | None], ends: Sequence[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's indptr, indices and last_page_len of requests' first keys, as many as `ends`.

    They are int32 on the host: where the pages of each request begin among all, the pages, and the
    keys in the last page of each. Nobody's key is the first of page 0.
    """
    ends = [1 if r is None else end for r, end in zip(requests, ends, strict=True)]
    used = [-(-end // page_size) for end in ends]
    pages = [
        page
        for request, n in zip(requests, used, strict=True)
        for page in ([0] if request is None else request.pages[:n])
    ]
    last = [(end - 1) % page_size + 1 for end in ends]
    return begins_of(used), *(torch.tensor(x, dtype=torch.int32) for x in (pages, last))


class FlashInfer:
    """Keys in the same pages, read by FlashInfer's wrappers; flashgen's `append` writes them."""

    name = "FlashInfer"

    def __init__(self, module: ModuleType, size: Size, pages: Pages, like: torch.Tensor):
        """Pages of zeros in the dtype and on the device of a tensor."""
        import flashinfer

        self.library, self.module = flashinfer, module
        self.size, self.page_size = size, pages.size
        self.device, self.dtype = like.device, like.dtype
        shape = (len(pages.users), pages.size, size.kv_heads, size.head_dim)
        self.caches = caches_of(size, shape, like)
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace(), "NHD")

    def workspace(self) -> torch.Tensor:
        """Memory that a wrapper works in."""
        return torch.zeros(128 * 2**20, dtype=torch.uint8, device=self.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What plans are told of a cache."""
        return self.size.heads, self.size.kv_heads, self.size.head_dim, self.page_size

    def mixed(self, parts: list[Part]) -> Attend:
        """Attention of a step's packed tokens."""
        begins = ints([0, *accumulate(part.count for part in parts)], self.device)
        lens = ints((part.end for part in parts), self.device)
        table = table_of([part.request for part in parts], self.device)
        requests = [part.request for part in parts]
        keys = keys_in_pages(requests, [part.end for part in parts], self.page_size)
        # From the host: a plan reads all of it but the pages there.
        tokens = begins_of(part.count for part in parts)
        self.prefill.plan(tokens, *keys, *self.shape, causal=True, q_data_type=self.dtype)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = self.caches[layer]
            self.module.append(k, v, *cache, lens, table, cu_seqlens=begins)
            return self.prefill.run(q.contiguous(), tuple(cache))

        return attend

    def rows(self, requests: Sequence[Request]) -> int:
        """The rows that a step of them has."""
        return len(requests)

    def decoding(self, batch: int) -> FlashInferDecoding:
        """Steps of up to `batch` requests with one token each."""
        return FlashInferDecoding(self, batch)


class FlashInferDecoding:
    """A step of one token for each request."""

    variants = (None,)
    variant = None

    def __init__(self, attention: FlashInfer, batch: int):
        self.attention, self.batch = attention, batch
        pages = -(-attention.size.max_len // attention.page_size)
        self.inputs = Inputs(
            attention.device,
            tokens=(batch,),
            positions=(batch,),
            lens=(batch,),
            table=(batch, pages),
        )
        int32: dict[str, Any] = {"dtype": torch.int32, "device": attention.device}
        self.wrapper = attention.library.BatchDecodeWithPagedKVCacheWrapper(
            attention.workspace(),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(batch + 1, **int32),
            paged_kv_indices_buffer=torch.zeros(batch * pages, **int32),
            paged_kv_last_page_len_buffer=torch.ones(batch, **int32),
        )
        self._plan([None] * batch)

    def put(self, requests: Sequence[Request]) -> list[Request | None]:
        """Rows without a request read the first key of page 0."""
        host = self.inputs.host
        host["lens"][:] = 0
        for row, request in enumerate(requests):
            host["tokens"][row] = request.tokens[-1]
            host["positions"][row] = request.computed
            host["lens"][row] = request.computed + 1
            host["table"][row, : len(request.pages)] = request.pages
        self.inputs.send()
        rows = [*requests, *[None] * (self.batch - len(requests))]
        self._plan(rows)
        return rows

    def _plan(self, rows: Sequence[Request | None]) -> None:
        attention = self.attention
        ends = [1 if request is None else request.computed + 1 for request in rows]
        keys = keys_in_pages(rows, ends, attention.page_size)
        types = {"q_data_type": attention.dtype, "kv_data_type": attention.dtype}
        self.wrapper.plan(*keys, *attention.shape, **types)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The step's attention."""
        x, cache = self.inputs.device, self.attention.caches[layer]
        self.attention.module.append(k[:, None], v[:, None], *cache, x["lens"], x["table"])
        return self.wrapper.run(q.contiguous(), tuple(cache))

"""Calls of `cache_attention`: sequences of different lengths in a cache, and what is right."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, Tensor, alibi, causal
from flashgen.reference import attention_reference
from flashgen.symbols import evaluate
from support.cases import Case
from support.oracle import error_and_bound, low_precision


@dataclass(frozen=True)
class CacheCall:
    """A call: the sequences, their heads, and where their keys lie.

    Attributes:
        kv_lens: the keys of each sequence.
        q_lens: its queries: one number for all, or, packed, one of each.
        heads, kv_heads: of queries, and of keys.
        page_size: 0 for rows of one tensor.
        slots: with rows, whether sequences lie in other rows than their own.
        num_splits: as of `cache_attention`.
        freed: keys behind the last ones from which on a sequence's pages are given back: their
            entries are -1 or stay. None for none.
        gap: every so many of the earlier pages, from the second on, are given back likewise. 0 for
            none.
        padding: tokens behind the last sequence, packed.
    """

    kv_lens: tuple[int, ...]
    q_lens: int | tuple[int, ...] = 1
    heads: int = 4
    kv_heads: int = 2
    page_size: int = 0
    slots: bool = False
    num_splits: int | None = None
    freed: int | None = None
    gap: int = 0
    padding: int = 0
    params: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def packed(self) -> bool:
        """Whether tokens are packed."""
        return isinstance(self.q_lens, tuple)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The queries of each sequence."""
        return self.q_lens if isinstance(self.q_lens, tuple) else (self.q_lens,) * len(self.kv_lens)

    @property
    def capacity(self) -> int:
        """The keys that a sequence may have: some more than it has."""
        longest = max(self.kv_lens) + 7
        return -(-longest // self.page_size) * self.page_size if self.page_size else longest

    @property
    def largest(self) -> Case:
        """The dense call that sizes of parameters go by."""
        sizes = (max(self.lengths), self.capacity, len(self.kv_lens), self.heads, self.kv_heads)
        return Case(*sizes, params=self.params)


@dataclass
class Cached:
    """A call's tensors.

    Attributes:
        arguments: of `cache_attention`, with the spec's parameters.
        q, k, v: the tokens of each sequence, (length, heads, head_dim).
    """

    arguments: dict[str, Any]
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def cached(call: CacheCall, spec: AttentionSpec, dtype: torch.dtype, device: str = "cpu") -> Cached:
    """Random tensors for a call, with NaN wherever the cache holds no key."""
    generator = torch.Generator().manual_seed(len(call.kv_lens) + sum(call.kv_lens))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch, dims = len(call.kv_lens), (spec.qk_head_dim, spec.v_head_dim)
    q = [drawn(n, call.heads, dims[0]) for n in call.lengths]
    k, v = ([drawn(n, call.kv_heads, d) for n in call.kv_lens] for d in dims)
    places: torch.Tensor | None = None
    if call.page_size:
        entries = call.capacity // call.page_size
        count = sum(-(-n // call.page_size) for n in call.kv_lens) + 2
        shapes = [(count, call.page_size, call.kv_heads, d) for d in dims]
        places = torch.full((batch, entries), -1, dtype=torch.int32)
        free = iter(torch.randperm(count, generator=generator).tolist())
    else:
        rows = batch + 2 if call.slots else batch
        shapes = [(rows, call.capacity, call.kv_heads, d) for d in dims]
        if call.slots:
            places = torch.randperm(rows, generator=generator)[:batch].int()
    caches = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
    for b, kv_len in enumerate(call.kv_lens):
        if not call.page_size:
            row = b if places is None else int(places[b])
            for cache, x in zip(caches, (k[b], v[b]), strict=True):
                cache[row, :kv_len] = x
            continue
        for i, first in enumerate(range(0, kv_len, call.page_size)):
            page, end = next(free), min(first + call.page_size, kv_len)
            in_gap = call.gap > 0 and i % call.gap == 1
            if in_gap or (call.freed is not None and end <= kv_len - call.freed):
                places[b, i] = page if page % 2 else -1  # of the page's next owner: NaN here
                continue
            places[b, i] = page
            for cache, x in zip(caches, (k[b], v[b]), strict=True):
                cache[page, : end - first] = x[first:end]
    arguments: dict[str, Any] = {"q": torch.stack(q) if not call.packed else torch.cat(q)}
    if call.packed:
        padding = torch.full((call.padding, *q[0].shape[1:]), torch.nan, dtype=dtype)
        arguments["q"] = torch.cat([*q, padding])
        ends = torch.tensor([0, *call.lengths]).cumsum(0)
        arguments |= {"cu_seqlens_q": ends.int(), "max_q_len": max(call.lengths)}
    arguments |= {"k_cache": caches[0], "v_cache": caches[1]}
    arguments["kv_lens"] = torch.tensor(call.kv_lens, dtype=torch.int32)
    if places is not None:
        arguments["block_table" if call.page_size else "cache_slots"] = places
    arguments |= call.largest.arguments(spec)
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    return Cached(moved, *([x.to(device) for x in xs] for xs in (q, k, v)))


def check_cached(
    module: ModuleType,
    spec: AttentionSpec,
    call: CacheCall,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Fails unless `cache_attention`, and its reference, are as right as torch, twice over."""
    given = cached(call, spec, dtype, device)
    with torch.no_grad():
        splits = {"num_splits": call.num_splits}
        result = module.cache_attention(**given.arguments, **splits, return_lse=True)
        hold(*result, given, spec, call)
        if dtype == torch.float32:
            return
        wide = {
            name: x.double() if name in ("q", "k_cache", "v_cache") else x
            for name, x in given.arguments.items()
        }
        out, lse = module.cache_reference(**wide, return_lse=True)
        hold(out, lse, given, spec, call)


def hold(
    out: torch.Tensor, lse: torch.Tensor, given: Cached, spec: AttentionSpec, call: CacheCall
) -> None:
    """Fails unless out and lse are right for each sequence."""
    out, lse = (x if call.packed else x.flatten(0, 1) for x in (out, lse))
    end = 0
    for b in range(len(call.kv_lens)):
        begin, end = end, end + call.lengths[b]
        if begin == end:
            continue
        right, rough, size = _right(given, spec, call, b)
        for name, x, exact, low in zip(("out", "lse"), (out, lse), right, rough, strict=True):
            got = x[begin:end].transpose(0, 1)
            finite = exact.isfinite()
            assert torch.equal(got.isfinite(), finite), f"{name} of {b}: infinite or NaN"
            assert torch.equal(got[~finite].double(), exact[~finite]), f"{name} of {b}: not -inf"
            of_lse = size if name == "lse" else 0.0
            error, allowed = error_and_bound(got[finite], exact[finite], low[finite], of_lse)
            assert error <= allowed, f"{name} of {b}: error {error:.3g}, allowed {allowed:.3g}"


def _right(given: Cached, spec: AttentionSpec, call: CacheCall, b: int) -> tuple[Any, Any, float]:
    """(out, lse) of a sequence in float64, in low precision, and the size of its largest score."""
    batch = len(call.kv_lens)
    # A mask may read which sequence it is of: one of a batch of copies.
    tensors = [
        x[b].transpose(0, 1).expand(batch, x[b].shape[1], *x[b].shape[::2])
        for x in (given.q, given.k, given.v)
    ]
    params = {param.name: given.arguments[param.name] for param in spec.params}
    sizes = {n: v for n, v in params.items() if not isinstance(v, torch.Tensor)}
    sizes |= {"batch": batch, "num_q_heads": call.heads, "num_kv_heads": call.kv_heads}
    sizes |= {"q_len": call.lengths[b], "kv_len": call.kv_lens[b]}
    for param in spec.params:
        if isinstance(param, Tensor):
            ends = [None if dim is None else evaluate(dim.sym, sizes) for dim in param.dims]
            params[param.name] = params[param.name][tuple(map(slice, ends))]
    scale = spec.scale or spec.qk_head_dim**-0.5
    exact = attention_reference(
        *tensors,
        spec.mask,
        score=spec.score,
        normaliser=spec.normaliser,
        scale=scale,
        params=params,
        return_lse=True,
    )
    *low, size = low_precision(*tensors, spec, scale, params)
    return [x[b] for x in exact], [x[b] for x in low], size


def with_queries(call: CacheCall, q_len: int) -> CacheCall:
    """The call with so many queries of each sequence, none of more than its keys."""
    return replace(call, q_lens=q_len, kv_lens=tuple(max(n, q_len) for n in call.kv_lens))


FORMS = ("dense", "cache")

#: A spec with a tensor, and a call of it with pages.
SPEC = AttentionSpec(
    16,
    "float32",
    mask=causal(align="bottom_right"),
    score=alibi(Tensor("slopes", ("num_q_heads",)), align="bottom_right"),
    forms=FORMS,
)
PAGES = CacheCall((20, 9, 33), (3, 0, 5), page_size=16, padding=2)

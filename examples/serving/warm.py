"""Warm-up: calls of a server's kernels before it serves, so that they are compiled side by side.

Triton compiles a kernel at its first call; a server's calls ask for a dozen, seconds each. Most of
that time is the compiler's, which lets other threads run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .attention import Flashgen
from .model import Size
from .scheduler import Part, Request

#: Threads that compile.
THREADS = 12

#: Parts of packed steps as (keys before, tokens): prompts that begin, and tokens of one or of many
#: sequences against keys that are there, as few as decoding has and as many as a chunk of a prompt.
#: They ask for all tiles of queries, of one head and of several, with keys in parts and whole.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 600), (0, 90)),
    ((1024, 1),) * 40,
    ((1024, 20),),
    ((1024, 100),),
    ((1024, 480),),
    ((1024, 1100),),
    ((1024, 1900),),
    ((512, 258),) * 3,
    (((1024, 1),) * 40 + ((512, 1500),)),
    ((512, 200),) * 8,
    # A few tokens more of one of few sequences, or of many.
    *(
        ((1024, 1),) * others + ((1024, count),)
        for others in (8, 60)
        for count in (1, 3, 12, 20, 100, 430)
    ),
)


def warm(attention: Flashgen, size: Size, most: int) -> int:
    """Makes calls of every kind, in threads; returns how many. They leave no state but keys.

    Args:
        attention: the server's.
        size: of its model.
        most: the most requests that decode together.
    """
    calls: list[Callable[[], object]] = []
    for batch in {1, most}:
        for variant in attention.decoding(batch).variants:
            decoding = attention.decoding(batch)
            decoding.variant = variant
            calls.append(lambda x=decoding, n=batch: x.attend(0, *_tokens(attention, size, n)))
    for step in STEPS:
        parts = [_part(attention, size, *part) for part in step]
        calls.append(lambda x=parts: _attend(attention, size, x))
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(_without_gradients, call) for call in calls]:
            done.result()
    return len(calls)


def _attend(attention: Flashgen, size: Size, parts: list[Part]) -> None:
    tokens = _tokens(attention, size, sum(part.count for part in parts))
    attention.mixed(parts)(0, *tokens)


def _part(attention: Flashgen, size: Size, begin: int, count: int) -> Part:
    """Tokens of a request that has the first pages, within what the model and the pages hold."""
    page, pages = attention.page_size, len(attention.caches[0][0])
    count = min(count, size.max_len // 2, pages * page // 2)
    begin = min(begin, size.max_len - count, pages * page - count)
    request = Request([0] * (begin + count), 1, computed=begin)
    request.pages = list(range(-(-(begin + count) // page)))
    return Part(request, count)


def _tokens(attention: Flashgen, size: Size, count: int) -> Sequence[torch.Tensor]:
    """Queries, keys and values of so many tokens."""
    like = attention.caches[0][0]
    heads = (size.heads, size.kv_heads, size.kv_heads)
    return [like.new_zeros(count, n, size.head_dim) for n in heads]


@torch.no_grad()
def _without_gradients(call: Callable[[], object]) -> None:
    call()

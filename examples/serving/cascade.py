"""Cascade: a prefix that many sequences share is read once for all of them.

The queries of a group are one packed sequence against the prefix: a tile of queries holds rows of
many sequences, and reads each of its keys once. Each sequence reads its own keys behind the prefix,
and `merge` makes one output of both parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from .scheduler import Request


def cascade(
    causal: ModuleType,
    full: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group_ends: torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_table: torch.Tensor,
    own_lens: torch.Tensor,
    own_table: torch.Tensor,
) -> torch.Tensor:
    """Attention of one query of each sequence: those of a group stand side by side, groups first.

    Args:
        causal: a module with the form "cache" for a sequence's own keys, aligned bottom right.
        full: one of the same head_dim and dtype whose mask hides no key of a prefix.
        q: (batch, heads, head_dim).
        k_cache: pages of both parts.
        v_cache: the same.
        group_ends: (groups + 1,) int32, from 0 to batch: the queries of a group, as cu_seqlens_q.
            Queries that share nothing are a group, too, the last one.
        prefix_lens: (groups,) int32, multiples of the page size; 0 for a group without a prefix.
        prefix_table: (groups, pages) int32.
        own_lens: (batch,) int32: the keys behind the prefix, or all of a sequence without one.
        own_table: (batch, pages) int32: their pages.

    Returns:
        (batch, heads, head_dim).
    """
    # A group without a prefix gets an LSE of -inf: merging counts it as no key.
    shared, shared_lse = full.cache_attention(
        q, k_cache, v_cache, prefix_lens,
        cu_seqlens_q=group_ends, max_q_len=len(q), block_table=prefix_table, return_lse=True,
    )  # fmt: skip
    own, own_lse = causal.cache_attention(
        q[:, None], k_cache, v_cache, own_lens, block_table=own_table, return_lse=True
    )
    out, _ = causal.merge((shared, own[:, 0]), (shared_lse, own_lse[:, 0]))
    return out


@dataclass(frozen=True)
class Group:
    """Requests that begin with the same pages, and how many pages all of them share."""

    requests: list[Request]
    pages: int

    @property
    def saved(self) -> int:
        """The pages that need not be read again."""
        return (len(self.requests) - 1) * self.pages


def groups_of(requests: Sequence[Request], page_size: int, least: int, most: int) -> list[Group]:
    """Groups that save at least so many pages each; so many groups at most, the largest.

    Each request keeps at least one key, that of its last token, to itself.
    """
    by_first: dict[int, list[Request]] = {}
    for request in requests:
        by_first.setdefault(request.pages[0], []).append(request)
    groups = []
    for members in by_first.values():
        # What the least and the greatest of several lists begin with, all of them begin with.
        one, other = min(r.pages for r in members), max(r.pages for r in members)
        longest, pages = min(len(r.tokens) - 1 for r in members) // page_size, 0
        while pages < longest and one[pages] == other[pages]:
            pages += 1
        groups.append(Group(members, pages))
    groups = [group for group in groups if group.saved >= max(1, least)]
    return sorted(groups, key=lambda group: -group.saved)[:most]

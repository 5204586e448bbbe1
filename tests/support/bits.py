"""What launchers take besides a spec's parameters, where a kernel decides tiles."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec
from support.variants import lowered


def with_bits(
    module: ModuleType,
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    params: dict[str, Any],
) -> tuple[Any, ...]:
    """The parameters of a call, and the bits of its tiles, if any, as launchers take them."""
    plan = lowered(spec)
    if not plan.classifies:
        return tuple(params.values())
    keywords = dict(plan.keywords)
    params = dict(params)
    for argument in plan.block_lists:
        lists, counts = argument.lists, ()
        assert lists is not None
        if lists.counts:
            counts = (params[keywords.get(lists.counts, lists.counts)],)
        table = getattr(module, f"_table_of_{argument.name}")
        params[argument.keyword] = table(q, k, params[argument.keyword], *counts)
    read = [params[keywords.get(name, name)] for name in plan.mask_arguments]
    of_group = (k.shape[1],) if "num_kv_heads" in plan.listing.sizes else ()
    return (*params.values(), module._tile_bits(q, k.shape[2], *of_group, *read))

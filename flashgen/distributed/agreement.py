"""Agreement: all ranks call alike, or each of them gets an error that names the difference.

Ranks that disagree would wait for one another in a collective for ever. So at the first call of a
kind each rank writes what it is about to do to the store of torch.distributed, and reads what the
others have written. Nothing of it touches a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

#: How long a rank waits for the others.
TIMEOUT = timedelta(seconds=120)


class Disagreement(RuntimeError):
    """Ranks that call differently, or not at all."""


def agree(
    group: Any, name: str, facts: Mapping[str, Any], problem: str = "", timeout: timedelta = TIMEOUT
) -> None:
    """Returns if all ranks of a group call it with equal facts.

    Args:
        group: the ranks.
        name: of this agreement, for the group once only, and the same on each rank.
        facts: what has to be equal, by what it is called.
        problem: an error of this rank's own arguments; the others then end as well.
        timeout: how long to wait for the others.

    Raises:
        Disagreement: naming the rank, and what differs from the group's first rank.
    """
    ranks = dist.get_process_group_ranks(group)
    store = _store(name)
    mine = json.dumps({**{key: str(value) for key, value in facts.items()}, "": problem})
    store.set(str(dist.get_rank(group)), mine)
    keys = [str(i) for i in range(len(ranks))]
    try:
        store.wait(keys, timeout)
    except (RuntimeError, dist.DistStoreError) as error:
        missing = [ranks[i] for i in range(len(ranks)) if not store.check([str(i)])]
        raise Disagreement(
            f"rank {_listed(missing)} made no such call within {timeout.total_seconds():.0f} s: "
            "all ranks of the mesh call with the same shapes, in the same order"
        ) from error
    found = [json.loads(store.get(key)) for key in keys]
    for rank, said in zip(ranks, found, strict=True):
        if said[""]:
            raise Disagreement(f"rank {rank}: {said['']}")
    for rank, said in zip(ranks, found, strict=True):
        for key, value in said.items():
            if value != found[0].get(key):
                raise Disagreement(
                    f"{key}: rank {rank} has {value}, rank {ranks[0]} has {found[0].get(key)}"
                )


def forget(group: Any, name: str) -> None:
    """Deletes what this rank wrote for an agreement that all ranks have read."""
    _store(name).delete_key(str(dist.get_rank(group)))


def _store(name: str) -> Any:
    return PrefixStore(f"flashgen/{name}", _get_default_store())


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))

"""DTensors: their local shards go into a call, and its output becomes one of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

#: The dimension of the positions in q, k and v.
SEQUENCE = 2


@dataclass(frozen=True)
class Kind:
    """What the DTensors of a call have in common.

    Attributes:
        mesh: their DeviceMesh.
        placements: theirs, one for each dimension of the mesh.
    """

    mesh: Any
    placements: tuple[Placement, ...]

    def wrap(self, out: torch.Tensor) -> DTensor:
        """A rank's output as the DTensor of all of them."""
        return DTensor.from_local(out, self.mesh, self.placements, run_check=False)


def unwrapped(
    module: ModuleType,
    group: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parameters: Mapping[str, Any],
    *,
    reduced: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any], Kind | None]:
    """The local tensors of a call, and the kind of its DTensors; None if it has none.

    Gradients of parameters are reduced over the ranks of the call, or else partial there.

    Raises:
        TypeError: some of q, k and v are DTensors, and some are not.
        ValueError: placements that a call cannot have, or DTensors of another mesh.
    """
    given = {"q": q, "k": k, "v": v}
    which = [name for name, x in given.items() if isinstance(x, DTensor)]
    if which and len(which) < len(given):
        other = next(name for name in given if name not in which)
        raise TypeError(
            f"{other}: is no DTensor, {which[0]} is one; pass q, k and v alike, as by to_local() "
            "or DTensor.from_local"
        )
    kind = None
    if isinstance(q, DTensor):
        kind = Kind(q.device_mesh, tuple(q.placements))
        for name, x in given.items():
            _check(name, x, kind, module, group)
        q, k, v = (x.to_local() for x in given.values())  # type: ignore[attr-defined]
    named = {name: _whole(name, x, kind, group, reduced) for name, x in parameters.items()}
    return q, k, v, named, kind


def _check(name: str, x: Any, kind: Kind, module: ModuleType, group: Any) -> None:
    """Fails unless a DTensor is sharded as a call needs it."""
    if x.device_mesh != kind.mesh or tuple(x.placements) != kind.placements:
        raise ValueError(
            f"{name}: is {_shown(x)}, q has {kind.placements}; redistribute() all three alike"
        )
    place = _place(name, x, group)
    found = x.placements[place]
    if type(found) is not Shard or found.dim != SEQUENCE:
        raise ValueError(
            f"{name}: is {found!r} over the ranks of the call; redistribute() it to "
            f"Shard({SEQUENCE}), positions in the order of `shard`"
        )
    for dim, other in enumerate(x.placements):
        # Batch entries and heads of other ranks take no part in a call.
        if dim != place and not (
            isinstance(other, Replicate) or (type(other) is Shard and other.dim in (0, 1))
        ):
            raise ValueError(
                f"{name}: is {other!r} over dimension {dim} of its mesh; beside Shard({SEQUENCE}) "
                "over the ranks of the call pass Replicate(), Shard(0) or Shard(1)"
            )
        if isinstance(other, Shard) and other.dim == 1 and module.MESH["by_head"]:
            raise ValueError(
                f"{name}: has heads on several ranks, over dimension {dim} of its mesh, but the "
                f"module differs between heads; redistribute() it to Replicate() there"
            )
    if x.shape[SEQUENCE] % x.device_mesh.size(place):
        raise ValueError(
            f"{name}: a DTensor of {x.shape[SEQUENCE]} positions on {x.device_mesh.size(place)} "
            "ranks has uneven shards; pad the sequence, or pass local tensors"
        )


def _whole(name: str, x: Any, kind: Kind | None, group: Any, reduced: bool) -> Any:
    """A parameter: a DTensor that is whole on all ranks of the call as a plain tensor."""
    if not isinstance(x, DTensor):
        return x
    place = _place(name, x, group)
    if not isinstance(x.placements[place], Replicate):
        raise ValueError(
            f"{name}: is {_shown(x)}; parameters are whole on all ranks of the call: "
            "redistribute() it to Replicate()"
        )
    if x.requires_grad and torch.is_grad_enabled():
        # A call adds the gradient up over its own ranks; batch entries of others have theirs.
        of_grad = list(x.placements)
        if kind is not None and x.device_mesh == kind.mesh:
            for dim, placement in enumerate(kind.placements):
                if (
                    isinstance(placement, Shard)
                    and placement.dim == 0
                    and x.placements[dim] == Replicate()
                ):
                    of_grad[dim] = Partial()
        of_grad[place] = Replicate() if reduced else Partial()
        return x.to_local(grad_placements=of_grad)
    with torch.no_grad():
        return x.to_local()  # the tensor itself, by which plans are found again


def _place(name: str, x: DTensor, group: Any) -> int:
    """Which dimension of a DTensor's mesh has the ranks of the call."""
    ranks = dist.get_process_group_ranks(group)
    mesh = x.device_mesh
    for dim in range(mesh.ndim):
        if dist.get_process_group_ranks(mesh.get_group(dim)) == ranks:
            return dim
    raise ValueError(
        f"{name}: is a DTensor of {mesh}; none of its dimensions has the ranks of the call, {ranks}"
    )


def _shown(x: DTensor) -> str:
    return f"{tuple(x.placements)} over {x.device_mesh}"

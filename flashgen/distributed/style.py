"""ContextParallelStyle: context parallel for modules of a model, by torch's parallelize_module."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from flashgen.distributed.attend import ContextParallel, context_parallel, known_by
from flashgen.distributed.dtensors import SEQUENCE
from flashgen.distributed.layout import Layout
from flashgen.distributed.wholes import part_with_gradient, whole_with_gradient


class ContextParallelStyle(ParallelStyle):
    """Shards the sequence of attention modules.

    The modules' ``forward(q, k, v, **parameters)`` computes a generated module's attention, and
    nothing else; it becomes a call of `attend`, one for all modules of the style. Apply it before
    torch.compile, activation checkpointing and ``fully_shard``.

    Args:
        module: a generated module whose spec has ``forms=("dense", "mesh")``.
        whole: whether q, k and v come with all positions on every rank, the same on all, and the
            output, too. Else they are this rank's parts, as ``attend.shard`` gives them, or
            DTensors of these.
        **options: those of `context_parallel`. ``reduce_learned`` is ``whole`` by default: so
            gradients of learned tensors are as those of the model's other parameters, which FSDP
            or DDP add up.

    Raises:
        TypeError: when it is applied, a forward that does not take three tensors; and what
            `context_parallel` raises.
        ValueError: when it is applied to modules on several meshes.
    """

    def __init__(self, module: ModuleType, *, whole: bool = False, **options: Any) -> None:
        super().__init__()
        self.module, self.whole = module, whole
        self._options = {"reduce_learned": whole, **options}
        self._applied: tuple[DeviceMesh, ContextParallel] | None = None
        # The key of the last layout, it, and the tensors that the key has the addresses of.
        self._laid_out: tuple[Any, Layout, tuple[Any, ...]] | None = None

    @property
    def attend(self) -> ContextParallel:
        """What the modules call; its `shard` cuts tokens, labels and positions of a batch.

        Raises:
            RuntimeError: the style was not yet applied.
        """
        if self._applied is None:
            raise RuntimeError("ContextParallelStyle: apply it by parallelize_module before")
        return self._applied[1]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_forward(module)
        if self._applied is None:
            attend = context_parallel(self.module, device_mesh, **self._options)
            self._applied = device_mesh, attend
        elif self._applied[0] != device_mesh:
            raise ValueError(
                "ContextParallelStyle: was applied on another mesh before; make one for each mesh"
            )
        module.forward = self._of_whole if self.whole else self._applied[1].__call__
        return module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **parameters: Any
    ) -> torch.Tensor:
        attend = self.attend
        if any(isinstance(x, DTensor) for x in (q, k, v)):
            raise TypeError("ContextParallelStyle: with whole=True pass plain tensors")
        read = {n: parameters[n] for n in self.module.MESH["of_runs"] if n in parameters}
        # Layers with the same length and the same tensors of ids have the same layout.
        key = q.shape[SEQUENCE], *map(known_by, read.values())
        if self._laid_out is None or self._laid_out[0] != key:
            layout = attend.layout(q.shape[SEQUENCE], **read)
            self._laid_out = key, layout, tuple(read.values())
        layout = self._laid_out[1]
        attend.use(layout)
        where = layout, attend.group, SEQUENCE
        parts = (part_with_gradient(x, *where) for x in (q, k, v))
        return whole_with_gradient(attend(*parts, **parameters), *where)


def _check_forward(module: nn.Module) -> None:
    """Fails unless a module's forward takes q, k and v by position."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = list(inspect.signature(module.forward).parameters.values())
    given = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    if len(given) != 3:
        names = ", ".join(p.name for p in given) or "none"
        raise TypeError(
            f"{type(module).__name__}.forward: takes {names}; the style is for a module whose "
            "forward is the attention of three tensors, q, k and v"
        )

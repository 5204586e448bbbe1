"""What the tensors of a call tell about the module that serves it."""

from __future__ import annotations

import functools

import torch

from flashgen.budget.targets import DEFAULT_TARGETS, TARGETS


def autocast(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What torch.autocast makes of query, key and value."""
    device = given[0].device.type if isinstance(given[0], torch.Tensor) else "meta"
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype != torch.float64 else x for x in given)


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor with zeros behind each head's elements."""
    missing = width - x.shape[-1]
    return x if missing == 0 else torch.nn.functional.pad(x, (0, missing))


def supported_head_dim(head_dim: int) -> int:
    """The head dimension that a head is padded to."""
    return max(16, -(-head_dim // 8) * 8)


@functools.lru_cache
def targets_of(device: torch.device) -> tuple[str, ...]:
    """The targets that a module is made for: the device's own, which takes less time than all."""
    if device.type == "cpu":
        return DEFAULT_TARGETS[:1]  # whose kernels do not run there
    if device.type != "cuda":
        return DEFAULT_TARGETS
    properties = torch.cuda.get_device_properties(device)
    name = (
        "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        if torch.version.hip is None
        else properties.gcnArchName.split(":")[0]
    )
    return (name,) if name in TARGETS else DEFAULT_TARGETS


def precision_of(query: torch.Tensor) -> str | None:
    """How matrix units read float32, as in torch."""
    if query.dtype != torch.float32:
        return None
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

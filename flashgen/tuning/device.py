"""The GPU of this machine, by its driver, without importing torch or triton."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

# From cuda.h: CUdevice_attribute.
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76

AMD_DRIVER = Path("/dev/kfd")


@dataclass(frozen=True)
class Gpu:
    """A GPU to measure on.

    Attributes:
        name: as its driver gives it, ``"NVIDIA H200"``.
        target: its architecture, ``"sm_90"``; flashgen may not support it.
    """

    name: str
    target: str


def detect_gpu() -> Gpu | None:
    """The first GPU that this process may use, or None."""
    return _nvidia() or _amd()


def _nvidia() -> Gpu | None:
    """Device 0 of the CUDA driver, which heeds CUDA_VISIBLE_DEVICES itself."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(), "sm_{}{}".format(*capability))


def _amd() -> Gpu | None:
    """Device 0 of torch's HIP runtime, imported only where AMD's driver is loaded."""
    if not AMD_DRIVER.exists():
        return None
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.gcnArchName.split(":")[0])

"""The kernels that the modules of generated/ run on Hopper, as they stand there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from flashgen.budget.targets import get_target
from flashgen.config import BACKWARD_KERNELS, HOPPER, KernelConfig
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_triton.kernel import FUNCTIONS as BACKWARD_FUNCTIONS
from flashgen.kernels.backward_triton.shared_memory import backward_usage
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.plan.backward import backward_plan
from support.compiling import backward_hopper, hopper, portable
from support.compiling.backward import portable_backward_kernel
from support.compiling.hopper import OPTIONS
from support.compiling.kernel import Kernel
from support.compiling.machine_code import MachineCode, by_stages
from support.compiling.predicted import (
    predicted_backward_usage,
    predicted_queries_usage,
    predicted_usage,
)
from support.variants import shipped_module, shipped_plan


@dataclass(frozen=True)
class Shipped:
    """A kernel of a module.

    Attributes:
        module: whose it is.
        kernel: with the call that it is compiled for.
        options: of the compiler.
        predicted: bytes of shared memory, by flashgen.
    """

    module: ModuleType
    kernel: Kernel
    options: Mapping[str, Any]
    predicted: int

    def compiled(self) -> MachineCode:
        """What the compiler and ptxas of the Triton that is here say of it."""
        function = getattr(self.module, self.kernel.name)
        return by_stages(self.kernel.source(function), HOPPER, self.options)


def shipped_kernels(name: str) -> dict[str, Shipped]:
    """The main kernels of a module by their functions' names, configured as it configures them."""
    module, plan = shipped_module(name), shipped_plan(name)
    backward, target, tma = backward_plan(plan), get_target(HOPPER), plan.uses_tma(HOPPER)
    kernels = {}

    def add(kernel: Kernel, options: Mapping[str, Any], predicted: int) -> None:
        kernels[kernel.name] = Shipped(module, kernel, options, predicted)

    config = _config(module.CONFIGS[HOPPER])
    forward = portable.forward_kernel(plan, config, HOPPER, tma=tma)
    add(forward, portable.options_of(config), sram_usage(plan, config, target).total)
    tables = {"keys": module.BACKWARD_OF_KEYS, "queries": module.BACKWARD_OF_QUERIES}
    for kernel in BACKWARD_KERNELS:
        assert hasattr(module, BACKWARD_FUNCTIONS[kernel])
        config = _config(tables[kernel][HOPPER])
        predicted = backward_usage(plan, kernel, config, target).total
        of_call = portable_backward_kernel(backward, kernel, config, HOPPER, tma)
        add(of_call, portable.options_of(config), predicted)
    if hasattr(module, "HOPPER_CONFIG"):
        config = _config(module.HOPPER_CONFIG)
        add(hopper.hopper_kernel(plan, config), OPTIONS, predicted_usage(plan, config).total)
    if hasattr(module, "BACKWARD_HOPPER"):
        config, names = _config(module.BACKWARD_HOPPER), HopperBackwardSplit(backward)
        predicted = predicted_backward_usage(names, config).total
        add(backward_hopper.backward_kernel(backward, config), OPTIONS, predicted)
        if names.both_in_gluon:
            predicted = predicted_queries_usage(names).total
            add(backward_hopper.queries_kernel(backward), OPTIONS, predicted)
    return kernels


def _config(shipped: Mapping[str, Any]) -> KernelConfig:
    return KernelConfig(**{key: shipped[key] for key in shipped if key != "USE_TMA"})

"""What the model would ship does not spill, and the occupancy it counts on is there."""

from __future__ import annotations

import functools

import pytest

from compile.usage import AS_PTXAS_12_8_DOES
from flashgen.budget.occupancy import register_limit
from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import KernelPlan
from support.compiling.portable import compile_kernel
from support.variants import shipped_plan

# Variants whose kernels differ in more than the mask.
VARIANTS = (
    "full_d64", "causal_d80", "causal_d128", "causal_d192_v128", "causal_d256",
    "dropout_causal_d64",
)  # fmt: skip
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

# A few values that rest in memory between two loops cost nothing: the fastest d128 kernel that an
# H200 ran has 88 bytes of them.
HARMLESS_BYTES = 256


@functools.cache
def chosen(name: str, target: str) -> tuple[KernelPlan, KernelConfig]:
    """A variant and the configuration that its module would ship without any measurement."""
    plan = shipped_plan(name)
    return plan, rank(plan, target, search_space(plan, target).candidates)[0][0]


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_models_choice_compiles_without_spilling(
    name: str,
    target: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    plan, config = chosen(name, target)
    architecture = get_target(target)
    compiled = compile_kernel(plan, config, target)
    assert compiled.spilled <= HARMLESS_BYTES, config
    assert compiled.registers <= register_limit(config, architecture)
    assert compiled.shared == sram_usage(plan, config, architecture).total

"""On Hopper, no kernel that flashgen ships computes a tile's address from nothing.

ptxas 12.8, which Triton 3.6 and 3.7 bring, drops the shared base of the addresses that wgmma gets
of two tiles which lie in one place of shared memory in rows of different widths (Triton issues
10486 and 11366). Tiles that are copied asynchronously never share a place. Seen on an H200: wrong
values, or an illegal memory access.
"""

from __future__ import annotations

import pytest

from compile.usage import AS_PTXAS_12_8_DOES
from flashgen import AttentionSpec, Blocks
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import lower
from support.compiling.portable import compile_kernel
from support.variants import shipped_module, shipped_specs
from support.variety import HEAD_DIM_SPECS

TARGET = "sm_90"
SPECS = shipped_specs()


def _unset(
    spec: AttentionSpec, config: KernelConfig, *, tma: bool, aligned: bool = True
) -> list[str]:
    plan = lower(spec, "kernel")
    return compile_kernel(plan, config, TARGET, tma=tma, aligned=aligned).unset


# Where tiles are of unequal widths, the launcher copies what TMA cannot read.
WAYS = [
    (name, aligned)
    for name, spec in SPECS.items()
    for aligned in (True, False)
    if aligned or not lower(spec, name).mixes_widths
]


@pytest.mark.parametrize(("name", "aligned"), WAYS)
def test_shipped_configurations(name: str, aligned: bool) -> None:
    shipped = shipped_module(name).CONFIGS[TARGET]
    config = KernelConfig(**{key: shipped[key] for key in shipped if key != "USE_TMA"})
    assert not _unset(SPECS[name], config, tma=aligned, aligned=aligned)


@pytest.mark.parametrize("name", HEAD_DIM_SPECS)
def test_the_models_first_choice(name: str) -> None:
    spec = HEAD_DIM_SPECS[name]
    plan = lower(spec, name)
    config, _ = rank(plan, TARGET, search_space(plan, TARGET).candidates)[0]
    assert not _unset(spec, config, tma=True)


@AS_PTXAS_12_8_DOES
def test_the_compiler_still_does_it() -> None:
    """When this fails, the copies of the launcher and the rule of the search space can go."""
    config = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    assert _unset(HEAD_DIM_SPECS["96"], config, tma=False, aligned=False)


def test_one_stage_is_left_out() -> None:
    plan = lower(AttentionSpec(96, "float16", blocks=Blocks(num_stages=(1, 2))), "d96")
    space = search_space(plan, TARGET)
    assert {config.num_stages for config in space.candidates} == {2}
    reasons = {why for config, why in space.rejected if config.num_stages == 1}
    assert any("wrong addresses" in why for why in reasons)

"""Every mask, score function and normaliser becomes machine code, in the memory that is predicted.

The interpreter takes what the compiler would not: types that do not match, branches, layouts.
"""

from __future__ import annotations

import pytest

from compile.usage import hold_never_below
from flashgen.budget.targets import get_target
from flashgen.config import BACKWARD_KERNELS, KernelConfig
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.plan import lower
from support.compiling.portable import compile_kernel, shared_bytes
from support.variety import SCORE_SPECS
from support.vocabulary import VOCABULARY

SPECS = {name: entry.spec("bfloat16", 64) for name, entry in VOCABULARY.items()}
SM_90 = get_target("sm_90")
HOPPER = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("name", SPECS)
def test_machine_code(name: str) -> None:
    plan = lower(SPECS[name], name)
    compiled = compile_kernel(plan, HOPPER, "sm_90")
    assert compiled.shared <= sram_usage(plan, HOPPER, SM_90).total


# One for each way to reach memory: none, numbers, rows' tables, elements of each width.
KINDS = ("softcap", "chunked_causal", "document_causal", "sink_by_head", "tree", "relative_bias",
         "additive_bias", "additive_bias_of_keys")  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", KINDS)
def test_other_targets(name: str, target: str) -> None:
    config = KernelConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    plan = lower(SPECS[name], name)
    needed = shared_bytes(plan, config, target)
    assert needed <= sram_usage(plan, config, get_target(target)).total


@pytest.mark.parametrize("name", SCORE_SPECS)
def test_odd_scores(name: str) -> None:
    config = KernelConfig(64, 32, num_warps=4, num_stages=2)
    plan = lower(SCORE_SPECS[name], name)
    assert shared_bytes(plan, config, "sm_90") <= sram_usage(plan, config, SM_90).total


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_scores_of_positions_alone(target: str) -> None:
    """No product gives the weights a layout: they pass through shared memory to the next one."""
    config = KernelConfig(128, 128, num_warps=8, num_stages=2)
    plan = lower(SCORE_SPECS["positions_alone"], "positions_alone")
    predicted = sram_usage(plan, config, get_target(target))
    assert shared_bytes(plan, config, target) <= predicted.total
    assert ("P", 128 * 128 * 2) in predicted.parts
    for kernel in BACKWARD_KERNELS:
        hold_never_below(plan, kernel, target, [config])

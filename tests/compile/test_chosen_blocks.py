"""The Gluon forward kernel of chosen blocks, whose tiles have rows of heads that share lists."""

from __future__ import annotations

import pytest

from compile.usage import AS_PTXAS_12_8_DOES, predicted_usage
from flashgen import AttentionSpec, causal, chosen_blocks
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import lower
from support.compiling.hopper import compile_hopper


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize(("head_dim", "query_block"), [(64, 64), (128, 64), (128, 1)])
def test_it_is_fast_machine_code(head_dim: int, query_block: int) -> None:
    mask = chosen_blocks(query_block=query_block) & causal()
    plan = lower(AttentionSpec(head_dim, mask=mask), "chosen")
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    assert (config.BLOCK_M, config.BLOCK_N) == (128, 64)
    compiled = compile_hopper(plan, config, packed=8)
    assert compiled.shared == predicted_usage(plan, config).total
    assert (compiled.spilled, compiled.warnings, compiled.unset) == (0, (), [])

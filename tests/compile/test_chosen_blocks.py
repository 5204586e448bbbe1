"""The Gluon forward kernel of chosen blocks, whose tiles have rows of heads that share lists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile.usage import AS_PTXAS_12_8_DOES, check_backward_usage, predicted_usage
from flashgen import AttentionSpec, causal, chosen_blocks
from flashgen.kernels.backward_hopper.space import rank_hopper_backward
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.compiling.backward_hopper import compile_backward_hopper
from support.compiling.hopper import compile_hopper

#: Bytes of a thread's numbers that are read once a tile, or rest between tiles.
FEW = 256

#: Of three consumers of 128 columns: the address of the lists, which each tile reads a few times.
ADDRESS = 8


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize(
    ("head_dim", "query_block", "block_m", "heads"),
    [(64, 64, 192, 8), (80, 64, 192, 8), (128, 64, 192, 8), (128, 64, 192, 16), (128, 1, 128, 8)],
)
def test_it_is_fast_machine_code(head_dim: int, query_block: int, block_m: int, heads: int) -> None:
    mask = chosen_blocks(query_block=query_block) & causal()
    plan = lower(AttentionSpec(head_dim, mask=mask), "chosen")
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    found = (config.BLOCK_M, config.BLOCK_N)
    assert found == (block_m, 64)
    for rows in {128, block_m}:  # what the launcher may make of it
        of_rows = replace(config, BLOCK_M=rows, num_warps=rows // 16)
        compiled = compile_hopper(plan, of_rows, packed=heads)
        assert compiled.shared == predicted_usage(plan, of_rows).total
        assert (compiled.warnings, compiled.unset) == ((), [])
        assert compiled.spilled <= (ADDRESS if (rows, head_dim) == (192, 128) else 0)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("head_dim", [64, 128])
def test_so_is_that_of_gradients(head_dim: int) -> None:
    """Its tiles of keys have a part for some heads each."""
    plan = lower(AttentionSpec(head_dim, mask=chosen_blocks() & causal()), "chosen")
    names = HopperBackwardSplit(backward_plan(plan))
    assert names.divides
    config = rank_hopper_backward(split_space(names).candidates)[0]
    check_backward_usage(names, config)
    compiled = compile_backward_hopper(names.backward, config)
    assert compiled.spilled <= FEW
    assert (compiled.warnings, compiled.unset) == ((), [])

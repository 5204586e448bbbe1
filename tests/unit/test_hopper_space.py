"""Which configurations of the Gluon kernel are candidates, why not the others, and their order."""

from __future__ import annotations

import pytest

from flashgen import (
    AttentionSpec,
    Blocks,
    Mask,
    Tensor,
    block_sparse,
    causal,
    chosen_blocks,
    document,
    full,
    q_len,
    sliding_window,
)
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper, why_not
from flashgen.plan import KernelPlan, lower


def plan(head_dim=128, dtype="bfloat16", **fields) -> KernelPlan:
    return lower(AttentionSpec(head_dim, dtype, **({"mask": causal()} | fields)), "x")


def rejected(kernel: KernelPlan, *numbers: int) -> str:
    return dict(hopper_space(kernel).rejected)[KernelConfig(*numbers)]


@pytest.mark.parametrize(
    ("kernel", "best"),
    [
        (plan(64), (192, 128, 12, 4)),
        (plan(64, mask=full()), (192, 128, 12, 4)),
        (plan(80), (192, 64, 12, 4)),
        (plan(), (192, 64, 12, 4)),
        (plan(mask=full()), (192, 64, 12, 4)),
        (plan(dtype="float16"), (192, 64, 12, 4)),
        (plan(mask=sliding_window(1024, 0)), (192, 64, 12, 4)),
        (plan(mask=document()), (192, 64, 12, 4)),
        (plan(256), (128, 64, 8, 2)),
    ],
)
def test_the_best_is_what_was_fastest(kernel: KernelPlan, best: tuple[int, ...]) -> None:
    assert rank_hopper(kernel, hopper_space(kernel).candidates)[0] == KernelConfig(*best)


def test_all_are_looked_at_once() -> None:
    space = hopper_space(plan())
    seen = [*space.candidates, *(config for config, _ in space.rejected)]
    assert len(seen) == len(set(seen)) == 12
    assert sorted(rank_hopper(plan(), space.candidates)) == sorted(space.candidates)


def test_what_does_not_fit_says_what_it_consists_of() -> None:
    assert rejected(plan(256), 128, 64, 8, 3) == (
        "needs 295,576 B of shared memory, sm_90 has 232,448 B (Q 65,536 + K 98,304 + V 98,304 + "
        "output 32,768 + captures 344 + growth 144 + tiles handed over 48 + barriers 128)"
    )


def test_what_would_spill_says_how_much() -> None:
    assert rejected(plan(), 192, 128, 12, 2) == (
        "a step keeps 160 of a consumer's 160 registers busy: it would spill"
    )


def test_listed_masks_take_powers_of_two() -> None:
    kernel = plan(64, mask=block_sparse())
    assert {config.BLOCK_M for config in hopper_space(kernel).candidates} == {128}
    assert "power of two" in rejected(kernel, 192, 128, 12, 2)


def test_tiles_of_lists_have_three_consumers_or_as_few_as_a_call_needs() -> None:
    kernel = plan(mask=chosen_blocks() & causal())
    assert {config.BLOCK_M for config in hopper_space(kernel).candidates} == {192}
    assert rejected(kernel, 128, 64, 8, 4) == (
        "BLOCK_M=192 takes 128 rows where a call has as few tiles of them"
    )
    pinned = plan(mask=chosen_blocks() & causal(), blocks=Blocks(BLOCK_M=128))
    assert {config.BLOCK_M for config in hopper_space(pinned).candidates} == {128}


@pytest.mark.parametrize(
    "mask",
    [
        chosen_blocks(query_block=1) & causal(),  # of a list of 16 queries that is one tile
        chosen_blocks(block=16),  # a tile reads four entries
        chosen_blocks(Tensor("mine", (1, "num_q_heads", (q_len + 63) // 64, None), "int32")),
    ],
)
def test_others_have_two(mask: Mask) -> None:
    kernel = plan(mask=mask)
    assert {config.BLOCK_M for config in hopper_space(kernel).candidates} == {128}
    assert "one block of them" in rejected(kernel, 192, 64, 12, 4)


@pytest.mark.parametrize(
    ("blocks", "numbers", "reason"),
    [
        ({"BLOCK_M": 64}, (64, 64, 4, 2), "it computes 128 or 192 query rows at a time"),
        ({"num_warps": 4}, (128, 64, 4, 2), "128 query rows take 8 warps"),
        ({"num_stages": 1}, (128, 64, 8, 1), "one stage loads no keys while"),
        ({"BLOCK_N": 256}, (128, 256, 8, 2), "it would spill"),
    ],
)
def test_pins_that_the_kernel_cannot_take(
    blocks: dict[str, int], numbers: tuple[int, ...], reason: str
) -> None:
    kernel = plan(blocks=Blocks(**blocks))
    assert hopper_space(kernel).candidates == ()
    assert reason in rejected(kernel, *numbers)
    assert reason in why_not(kernel)


def test_pins_that_it_can_take_are_kept() -> None:
    kernel = plan(blocks=Blocks(BLOCK_M=(64, 128), BLOCK_N=32, num_stages=(1, 3)))
    assert hopper_space(kernel).candidates == (KernelConfig(128, 32, 8, 3),)
    assert why_not(kernel) == ""


def test_of_several_reasons_the_one_that_comes_last_is_told() -> None:
    kernel = plan(256, blocks=Blocks(BLOCK_M=(64, 128), num_stages=(1, 4)))
    assert why_not(kernel).startswith("BLOCK_M=128 BLOCK_N=64 num_warps=8 num_stages=4: needs")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (plan(dtype="float32", input_precision="tf32"), "float32: its tiles are of 16-bit"),
        (plan(targets=("sm_80", "sm_100")), "sm_90 is not among the targets"),
        (plan(512), "512 columns in one piece"),
        (
            plan(mask=document() & causal(), dropout=True),
            "with dropout, tiles start at multiples of 16, not at segments",
        ),
    ],
)
def test_kernels_without_a_gluon_form(kernel: KernelPlan, reason: str) -> None:
    assert why_not(kernel).startswith(reason)
    assert hopper_space(kernel).candidates == ()

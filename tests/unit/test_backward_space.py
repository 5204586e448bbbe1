"""The backward kernels' candidates: few, explained, and in the order that an H200 found."""

import pytest

from flashgen import AttentionSpec, Blocks, causal, full, softcap
from flashgen.budget.buffers import MEANINGS
from flashgen.budget.targets import DEFAULT_TARGETS, get_target
from flashgen.config import BACKWARD_KERNELS, KernelConfig
from flashgen.kernels.backward_triton.kernel import KEYS
from flashgen.kernels.backward_triton.occupancy import backward_blocks, backward_tensor_memory
from flashgen.kernels.backward_triton.rank import rank_backward
from flashgen.kernels.backward_triton.shared_memory import backward_usage, worst_backward_usage
from flashgen.kernels.backward_triton.space import SHAPES, SMALL, STAGES, backward_space
from flashgen.plan import KernelPlan, lower
from flashgen.plan.backward import ROWS
from flashgen.symbols import evaluate
from flashgen.tuning.choose import choices, search_spaces
from support.turns import in_turns
from support.variants import shipped_plan, shipped_specs


def plan(head_dim=128, dtype="bfloat16", mask=None, **fields) -> KernelPlan:
    mask = causal() if mask is None else mask
    return lower(AttentionSpec(head_dim, dtype, mask, **fields), "x")


def first(kernel_plan: KernelPlan, kernel, target: str = "sm_90") -> KernelConfig:
    candidates = backward_space(kernel_plan, kernel, target).candidates
    return rank_backward(kernel_plan, kernel, target, candidates)[0]


EACH = [(kernel, target) for target in DEFAULT_TARGETS for kernel in BACKWARD_KERNELS]


@pytest.mark.parametrize(("name", "kernel", "target"), in_turns(shipped_specs(), EACH, every=4))
def test_every_shipped_variant_has_a_handful_of_candidates(name, kernel, target):
    kernel_plan = shipped_plan(name)
    architecture = get_target(target)
    space = backward_space(kernel_plan, kernel, target)
    assert 1 <= len(space.candidates) <= 14
    for config in space.candidates:
        assert worst_backward_usage(kernel_plan, kernel, config, architecture).fits
        assert backward_blocks(kernel_plan, kernel, config, architecture) >= 1


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_every_combination_is_a_candidate_or_has_a_reason(kernel, target):
    space = backward_space(plan(), kernel, target)
    rejected = [config for config, _ in space.rejected]
    looked_at = [*space.candidates, *rejected]
    stages = STAGES[get_target(target).backend]
    assert len(looked_at) == len(set(looked_at)) == len(SHAPES[kernel]) * len(stages)
    assert all(len(why.split()) > 4 for _, why in space.rejected)


@pytest.mark.parametrize(
    ("kernel_plan", "kernel", "target", "numbers", "words"),
    [
        (plan(256), "keys", "sm_90", (128, 128, 8, 2), "needs 394,272 B of shared memory"),
        (plan(), "keys", "sm_90", (128, 64, 4, 2), "it would spill"),
        (plan(), "keys", "sm_90", (64, 64, 8, 2), "8 warps have 8 rows each"),
        (plan(64), "keys", "sm_90", (32, 64, 4, 2), "steps of 32 wait twice as often"),
        (plan(64), "keys", "sm_90", (128, 128, 8, 1), "no other such program shares the SM"),
        (plan(), "keys", "sm_80", (64, 64, 4, 1), "changes layout on the way"),
        (plan(80), "keys", "sm_90", (64, 64, 4, 1), "tiles of unequal widths"),
        (plan(256), "keys", "sm_100", (32, 128, 4, 1), "columns of tensor memory"),
        (
            plan(),
            "keys",
            "sm_100",
            (64, 64, 4, 1),
            "with 64 rows read the others more often",
        ),
    ],
)
def test_reasons(kernel_plan, kernel, target, numbers, words):
    rejected = dict(backward_space(kernel_plan, kernel, target).rejected)
    assert words in rejected[KernelConfig(*numbers)]


# BLOCK_M, BLOCK_N, num_warps, num_stages, and milliseconds of 16,384 tokens in bfloat16.
MEASURED = [
    (plan(64, mask=full()), "keys", [(128, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)]),
    (plan(mask=full()), "keys", [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 3), (64, 128, 8, 2)]),
    (plan(), "keys", [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 3), (64, 128, 8, 3)]),
    (plan(256), "keys", [(64, 64, 8, 2), (32, 64, 8, 3)]),
    (plan(64, mask=full()), "queries", [(128, 64, 8, 3), (64, 64, 4, 2)]),
    (plan(mask=full()), "queries", [(64, 64, 4, 2), (128, 64, 8, 3)]),
    (plan(score=softcap(30.0)), "queries", [(64, 64, 4, 2), (128, 64, 8, 3)]),
    (plan(256), "queries", [(128, 64, 8, 1), (128, 32, 8, 2), (64, 32, 4, 2)]),
]


@pytest.mark.parametrize(("kernel_plan", "kernel", "numbers"), MEASURED)
def test_the_order_is_that_of_an_h200(kernel_plan, kernel, numbers):
    fastest_first = [KernelConfig(*x) for x in numbers]
    candidates = backward_space(kernel_plan, kernel, "sm_90").candidates
    ranked = rank_backward(kernel_plan, kernel, "sm_90", candidates)
    assert ranked[0] == fastest_first[0]
    assert [config for config in ranked if config in fastest_first] == fastest_first


def test_the_order_of_candidates_makes_no_difference():
    for kernel in BACKWARD_KERNELS:
        candidates = backward_space(plan(), kernel, "sm_90").candidates
        ranked = rank_backward(plan(), kernel, "sm_90", candidates)
        assert rank_backward(plan(), kernel, "sm_90", reversed(candidates)) == ranked


@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_tiles_of_queries_divide_the_padded_rows(kernel):
    """The kernels read rows without a mask."""
    assert all(ROWS % block_m == 0 for block_m, _, _ in (*SHAPES[kernel], *SMALL[kernel]))


def test_pins_are_of_the_forward_kernel():
    pinned = plan(blocks=Blocks(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3))
    assert backward_space(pinned, "keys", "sm_90") == backward_space(plan(), "keys", "sm_90")


def test_small_tiles_where_no_others_fit():
    wide = plan(512)
    for kernel in BACKWARD_KERNELS:
        config = first(wide, kernel, "sm_86")
        assert max(config.BLOCK_M, config.BLOCK_N) <= 32
        assert worst_backward_usage(wide, kernel, config, get_target("sm_86")).fits


def test_a_target_that_no_tiles_fit_has_no_configuration():
    wide = plan(512, "float32", input_precision="ieee", targets=("sm_86", "sm_90"))
    spaces = search_spaces(wide)
    found = choices(wide, {}, {key: spaces[key] for key in KEYS.values()}, ())
    assert [list(choice.configs) for choice in found.values()] == [["sm_90"]] * 2
    assert all("shared memory" in why for _, why in spaces["backward_keys"]["sm_86"].rejected)


def test_parts_add_up_and_have_a_meaning():
    for target in DEFAULT_TARGETS:
        for kernel in BACKWARD_KERNELS:
            config = first(plan(), kernel, target)
            usage = backward_usage(plan(), kernel, config, get_target(target))
            assert sum(size for _, size in usage.parts) == usage.total
            assert usage.meanings.items() <= MEANINGS.items()
            values = {**config.as_dict(), "itemsize": 2, "qk_0": 128, "v_0": 128}
            assert evaluate(usage.formula, values) == usage.total


def test_half_the_lanes_of_tensor_memory_hold_64_rows():
    config = KernelConfig(64, 128, 8, 2)
    assert backward_tensor_memory(plan(), "keys", config) == 128 + 128 + 2 * 64 + 2 * 32
    half = KernelConfig(64, 64, 4, 2)
    assert backward_tensor_memory(plan(), "keys", half) == (128 + 128 + 2 * 64 + 2 * 32) // 2

"""The shared memory that flashgen predicts is what Triton's compiler allots, without a GPU.

Every shipped variant is compiled for each kind of target, over its whole candidate space if it is
the first with such buffers. A kernel is taken as far as the stage that decides its shared memory;
machine code is not made.
"""

from __future__ import annotations

import functools

import pytest

from flashgen import AttentionSpec, Blocks, causal, document
from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import KernelPlan, lower
from flashgen.plan.step_cost import tile_loads, unordered_comparisons
from support.compiling.portable import shared_bytes
from support.loads import kernel_spec
from support.turns import numbered, share
from support.variants import shipped_plan, shipped_specs

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

# sm_86 and sm_89 compile as sm_80 does: one configuration of each variant shows it.
COUSINS = ("sm_86", "sm_89")


@functools.cache
def chosen(name: str, target: str) -> KernelConfig:
    """What a module would ship without any measurement."""
    plan = shipped_plan(name)
    return rank(plan, target, search_space(plan, target).candidates)[0][0]


def structure(name: str) -> tuple[object, ...]:
    """What a kernel's buffers depend on besides its configuration."""
    plan = shipped_plan(name)
    fields = (plan.qk_segments, plan.v_segments, plan.torch_dtype, plan.input_precision)
    loads = (tile_loads(plan), unordered_comparisons(plan))
    return (*fields, plan.normaliser, bool(plan.code.score), *loads, plan.dropout)


def sweep(name: str, target: str) -> tuple[KernelConfig, ...]:
    """The whole space of the first variant of a structure, and what the others would ship."""
    first = next(other for other in shipped_specs() if structure(other) == structure(name))
    if name == first:
        return search_space(shipped_plan(name), target).candidates
    return (chosen(name, target),)


@pytest.mark.parametrize(("turn", "name", "target"), numbered(shipped_specs(), TARGETS))
def test_the_space_needs_exactly_what_is_predicted(turn: int, name: str, target: str) -> None:
    plan = shipped_plan(name)
    for config in share(sweep(name, target), turn):
        predicted = sram_usage(plan, config, get_target(target))
        needed = shared_bytes(plan, config, target)
        assert predicted.total == needed, (config, predicted.breakdown)


@pytest.mark.parametrize("target", COUSINS)
@pytest.mark.parametrize("name", shipped_specs())
def test_targets_of_one_family_agree(name: str, target: str) -> None:
    plan, config = shipped_plan(name), chosen(name, target)
    assert sram_usage(plan, config, get_target(target)).total == shared_bytes(plan, config, target)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", shipped_specs())
def test_the_way_by_pointers_is_predicted_too(name: str, target: str) -> None:
    """For strides that a descriptor cannot hold; odd ones keep tiles from being copied ahead."""
    plan, config = shipped_plan(name), chosen(name, target)
    predicted = sram_usage(plan, config, get_target(target), tma=False).total
    assert predicted == shared_bytes(plan, config, target, tma=False)
    assert predicted >= shared_bytes(plan, config, target, tma=False, aligned=False)


# One for each way in which loads inside the loop need memory; see forward_triton/elements.py.
READERS = (
    "bias", "half", "backward", "capped_bias", "capped_keys", "half_keys", "ids_of_rows", "ends",
    "shown", "two_biases", "shown_and_half", "sigmoid_keys",
)  # fmt: skip
READER_CONFIGS = [
    (target, KernelConfig(*numbers))
    for target in TARGETS
    for numbers in ((128, 64, 4, 2), (128, 32, 4, 3), (128, 128, 8, 2))
    if (target, numbers[-1]) != ("gfx942", 3)
]


@functools.cache
def reader(name: str, head_dim: int = 128) -> KernelPlan:
    return lower(kernel_spec(name, head_dim), name)


@pytest.mark.parametrize(("target", "config"), READER_CONFIGS)
@pytest.mark.parametrize("name", READERS)
def test_loads_in_the_loop_need_exactly_what_is_predicted(
    name: str, target: str, config: KernelConfig
) -> None:
    predicted = sram_usage(reader(name), config, get_target(target))
    if predicted.fits:
        assert predicted.total == shared_bytes(reader(name), config, target), predicted.breakdown


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", READERS)
def test_loads_beside_tiles_by_pointers(name: str, target: str) -> None:
    plan, config = reader(name, 64), KernelConfig(128, 64, num_warps=8, num_stages=2)
    predicted = sram_usage(plan, config, get_target(target), tma=False).total
    assert predicted == shared_bytes(plan, config, target, tma=False)


# Tiles with as many rows, columns or both as there are threads: what the branch for ids out of
# order loads then decides on layouts.
@pytest.mark.parametrize(
    ("target", "numbers"),
    [
        ("sm_80", (128, 64, 4, 2)),
        ("sm_80", (64, 128, 4, 1)),
        ("sm_90", (128, 64, 4, 2)),
        ("sm_90", (64, 128, 4, 2)),
        ("sm_90", (128, 128, 4, 2)),
        ("sm_100", (128, 128, 4, 2)),
    ],
)
def test_ids_out_of_order_need_exactly_what_is_predicted(
    target: str, numbers: tuple[int, int, int, int]
) -> None:
    plan, config = lower(AttentionSpec(64, mask=document() & causal()), "x"), KernelConfig(*numbers)
    predicted = sram_usage(plan, config, get_target(target))
    assert predicted.total == shared_bytes(plan, config, target), predicted.breakdown


# What a spec can pin and flashgen would not propose, and head dims that no shipped variant has:
# there the prediction may be above the compiler's figure, never below.
UNUSUAL = [
    (head_dim, dtype, precision, KernelConfig(*numbers), target)
    for head_dim, dtype, precision, numbers in [
        (16, "bfloat16", None, (128, 256, 4, 3)),
        (64, "bfloat16", None, (16, 16, 1, 5)),
        (64, "bfloat16", None, (32, 64, 2, 2)),
        (64, "bfloat16", None, (64, 64, 8, 2)),
        (64, "bfloat16", None, (256, 64, 16, 2)),
        (72, "float16", None, (64, 32, 4, 3)),
        ((64, 128), "bfloat16", None, (64, 32, 4, 1)),
        ((128, 64), "bfloat16", None, (128, 64, 4, 1)),
        (192, "bfloat16", None, (64, 32, 4, 2)),
        (512, "bfloat16", None, (32, 16, 4, 1)),
        (64, "float32", "ieee", (64, 32, 4, 2)),
        (64, "float32", "ieee", (64, 64, 8, 1)),
        (96, "float32", "ieee", (32, 32, 4, 2)),
        (80, "float32", "tf32", (64, 32, 4, 2)),
        (128, "float32", "tf32", (64, 64, 4, 1)),
    ]
    for target in TARGETS
]


@pytest.mark.parametrize(("head_dim", "dtype", "precision", "config", "target"), UNUSUAL, ids=str)
def test_the_prediction_is_never_below(
    head_dim: int | tuple[int, int],
    dtype: str,
    precision: str | None,
    config: KernelConfig,
    target: str,
) -> None:
    spec = AttentionSpec(head_dim, dtype, causal(), input_precision=precision, blocks=Blocks())
    plan = lower(spec, "x")
    ways = {plan.uses_tma(target), False}
    for tma in ways:
        predicted = sram_usage(plan, config, get_target(target), tma=tma)
        assert predicted.total >= shared_bytes(plan, config, target, tma=tma), predicted.breakdown

"""The Gluon kernel for Hopper: shared memory as predicted, and machine code that does not spill.

Every candidate of the first shipped variant with such buffers, and one of every mask, score and
normaliser, is taken as far as the pass that allots shared memory. What each module would ship
without a measurement becomes machine code.
"""

from __future__ import annotations

import pytest

from compile.usage import AS_PTXAS_12_8_DOES, check_usage, predicted_usage
from flashgen import AttentionSpec, full
from flashgen.budget.traffic import Workload
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.kernel import render_hopper
from flashgen.kernels.forward_hopper.pack_gqa import launched
from flashgen.kernels.forward_hopper.shared_memory import spills
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper, why_not
from flashgen.plan import lower
from support.compiling.hopper import compile_hopper
from support.loads import kernel_spec
from support.segments import CUT
from support.variants import gluon_specs, shipped_plan
from support.vocabulary import VOCABULARY

SHIPPED = tuple(gluon_specs())


def config_id(config: KernelConfig) -> str:
    return "{BLOCK_M}x{BLOCK_N}s{num_stages}".format(**config.as_dict())


def structure(name: str) -> tuple[object, ...]:
    """What a kernel's buffers depend on besides its configuration, but for what it captures."""
    plan = shipped_plan(name)
    return (plan.qk_segments, plan.v_segments, plan.torch_dtype, plan.tiles.uneven)


FIRST = {structure(name): name for name in reversed(SHIPPED)}
SPACES = [
    pytest.param(name, config, id=f"{name}-{config_id(config)}")
    for name in FIRST.values()
    for config in hopper_space(shipped_plan(name)).candidates
]


@pytest.mark.parametrize(("name", "config"), SPACES)
def test_every_candidate_needs_exactly_what_is_predicted(name: str, config: KernelConfig) -> None:
    plan = shipped_plan(name)
    check_usage(plan, config)


# Bytes of a thread's numbers that may rest in memory from one tile of queries to the next: up to
# eight of them, which no step of the loop over keys reads.
BETWEEN_TILES = 32


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", SHIPPED)
def test_what_would_be_shipped_is_fast_machine_code(name: str) -> None:
    plan = shipped_plan(name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    compiled = compile_hopper(plan, config)
    assert compiled.shared == predicted_usage(plan, config).total
    assert compiled.spilled <= BETWEEN_TILES, config
    assert compiled.warnings == (), config
    assert compiled.unset == [], config


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("head_dim", [64, 256])
def test_steps_that_only_drop_weights(head_dim: int) -> None:
    """With dropout a step reads where its keys are, though no mask and no score function does."""
    plan = lower(AttentionSpec(head_dim, "bfloat16", full(), dropout=True), "dropped")
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    compiled = compile_hopper(plan, config)
    assert compiled.shared == predicted_usage(plan, config).total
    assert compiled.warnings == (), config


def test_two_loops_that_share_addresses_would_be_miscompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the template hides that both loops over keys multiply with the same queries.

    Seen on an H200: wrong values of full_d64, where ptxas computed on the way to the first loop
    what the second one reads too.
    """
    plan, config = shipped_plan("full_d64"), KernelConfig(192, 128, num_warps=12, num_stages=2)
    text = render_hopper(plan)
    plain = text.replace("q_again,", "q,")
    assert plain != text
    monkeypatch.setattr("support.compiling.hopper.render_hopper", lambda _: plain)
    unset = compile_hopper(plan, config).unset
    assert any("HGMMA" in line for line in unset)


@pytest.mark.parametrize("number", range(len(VOCABULARY)), ids=list(VOCABULARY))
def test_masks_scores_and_normalisers_need_what_is_predicted(number: int) -> None:
    name, entry = list(VOCABULARY.items())[number]
    head_dim, dtype = ((64, "bfloat16"), (128, "float16"))[number % 2]
    plan = lower(entry.spec(dtype, head_dim), name)
    candidates = hopper_space(plan).candidates
    config = candidates[number % len(candidates)]
    check_usage(plan, config)


@pytest.mark.parametrize("name", CUT)
def test_tiles_that_start_at_segments_need_what_is_predicted(name: str) -> None:
    plan = lower(CUT[name], name)
    for config in {c.BLOCK_M: c for c in hopper_space(plan).candidates}.values():
        check_usage(plan, config)


# Numbers that a spec can pin, and the scratch of consumers that reduce over their rows.
UNUSUAL = [
    (name, head_dim, KernelConfig(*numbers))
    for name, head_dim, numbers in [
        ("ends", 64, (192, 128, 12, 3)),
        ("ends", 128, (128, 128, 8, 2)),
        ("two_biases", 64, (192, 64, 12, 2)),
        ("causal", 16, (128, 16, 8, 2)),
        ("causal", 72, (128, 32, 8, 5)),
        ("causal", 256, (128, 32, 8, 2)),
        ("causal", (256, 64), (128, 64, 8, 2)),
    ]
]


@pytest.mark.parametrize(("name", "head_dim", "config"), UNUSUAL, ids=str)
def test_the_unusual_is_predicted_too(
    name: str, head_dim: int | tuple[int, int], config: KernelConfig
) -> None:
    plan = lower(kernel_spec(name, head_dim), name)
    check_usage(plan, config)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize(("name", "block_n"), [("window_d128", 128), ("causal_d80", 128)])
def test_what_is_turned_down_for_its_registers_does_spill(name: str, block_n: int) -> None:
    plan, config = shipped_plan(name), KernelConfig(192, block_n, num_warps=12, num_stages=2)
    assert spills(plan, config)
    compiled = compile_hopper(plan, config)
    assert compiled.spilled > 128
    assert any("C7512" in line for line in compiled.warnings)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("packed", [2, 64])
@pytest.mark.parametrize("name", ["causal_d64", "window_d128", "softcap_d128", "causal_d192_v128"])
def test_rows_of_several_heads_take_no_more(name: str, packed: int) -> None:
    """Nor do the two consumers that few rows have in the place of three."""
    plan = shipped_plan(name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    few = launched(plan, config, Workload(1, packed, 1, q_len=1, kv_len=1), packed)
    assert few.BLOCK_M == 128
    for used in {config, few}:
        compiled = compile_hopper(plan, used, packed)
        assert (compiled.shared, compiled.warnings) == (predicted_usage(plan, used).total, ())
        assert compiled.spilled <= 64


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_variant_of_16_bits_has_a_gluon_kernel(name: str) -> None:
    assert why_not(shipped_plan(name)) == ""

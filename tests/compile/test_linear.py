"""The kernels of linear attention become machine code, in the memory that is predicted."""

from __future__ import annotations

import pytest

from compile.usage import AS_PTXAS_12_8_DOES
from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    exp2,
    favor,
    full,
    identity,
    linear,
    relu,
)
from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.forms.registry import why_no_form
from flashgen.kernels.linear_triton.shared_memory import linear_usage
from flashgen.kernels.linear_triton.space import linear_space, rank_linear
from flashgen.plan import KernelPlan, lower
from support.compiling.linear import (
    FORWARD,
    GRADIENTS,
    compile_linear,
    linear_bytes,
)

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def of_features(number: int) -> Tensor:
    """A decay for each of so many features."""
    return Tensor("decay", ("batch", "num_kv_heads", "kv_len", number))


SPECS = {
    "elu_d128": AttentionSpec(128, mask=causal(), normaliser=linear(elu_plus_one())),
    "plain_d128": AttentionSpec(128, mask=causal(), normaliser=linear(identity(), normalise=False)),
    "elu_d64": AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one())),
    "full_d64": AttentionSpec(64, mask=full(), normaliser=linear(elu_plus_one())),
    "unequal": AttentionSpec((40, 24), mask=causal(), normaliser=linear(relu())),
    "favor_d128": AttentionSpec(128, mask=causal(), normaliser=linear(favor(256))),
    "favor_d64": AttentionSpec((128, 64), mask=causal(), normaliser=linear(favor(128))),
    "tf32_d64": AttentionSpec(
        64, "float32", mask=causal(), normaliser=linear(relu()), input_precision="tf32"
    ),
    "decays_d128": AttentionSpec(
        128, mask=causal(), normaliser=linear(identity(), decay=DECAY, normalise=False)
    ),
    "decays_favor_d128": AttentionSpec(
        128, mask=causal(), normaliser=linear(favor(256), decay=DECAY)
    ),
    "decays_unequal": AttentionSpec(
        (40, 24), mask=causal(), normaliser=linear(relu(), decay=DECAY)
    ),
    "retention_float32_d64": AttentionSpec(
        64, "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=lambda h: -exp2(-h))
    ),
    "features_d128": AttentionSpec(
        128, mask=causal(), normaliser=linear(identity(), decay=of_features(128), normalise=False)
    ),
    "features_elu_d128": AttentionSpec(
        128, mask=causal(), normaliser=linear(elu_plus_one(), decay=of_features(128))
    ),
    "features_unequal": AttentionSpec(
        (40, 24), mask=causal(), normaliser=linear(relu(), decay=of_features(40))
    ),
    "features_float32_d64": AttentionSpec(
        64, "float32", mask=causal(), normaliser=linear(relu(), decay=of_features(64))
    ),
    "documents_d128": AttentionSpec(
        128, mask=document() & causal(), normaliser=linear(elu_plus_one())
    ),
    "documents_favor_d128": AttentionSpec(
        128, mask=document() & causal(), normaliser=linear(favor(256), decay=DECAY)
    ),
    "documents_float32_d64": AttentionSpec(
        64, "float32", mask=document() & causal(), normaliser=linear(elu_plus_one(), decay=DECAY)
    ),
    "chunks_unequal": AttentionSpec(
        (40, 24), mask=chunked(512) & causal(), normaliser=linear(relu())
    ),
    "float32_d128": AttentionSpec(128, "float32", mask=causal(), normaliser=linear(elu_plus_one())),
}
PLANS = {name: lower(spec, name) for name, spec in SPECS.items()}
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")


#: Bytes that spill: selecting 0 for values of padding takes registers where none are left.
SPILLED = {("documents_d128", "_linear_forward"): 72}

#: A state of this size in float32 leaves no room in 64 KiB, which the build says.
UNFIT = [("float32_d128", "gfx942")]
CASES = [(name, target) for name in PLANS for target in TARGETS if (name, target) not in UNFIT]


def first(plan: KernelPlan, target: str, gradients: bool) -> KernelConfig:
    """The configuration that a build chooses."""
    candidates = linear_space(plan, target, gradients=gradients).candidates
    return rank_linear(plan, target, candidates, gradients=gradients)[0]


@pytest.mark.parametrize(("name", "target"), UNFIT)
def test_what_does_not_fit_is_turned_down(name: str, target: str) -> None:
    plan = PLANS[name]
    space = linear_space(plan, target, gradients=True)
    assert not space.candidates
    smallest, _ = min(space.rejected, key=lambda x: (x[0].BLOCK_M, x[0].num_stages))
    needed = linear_bytes(plan, smallest, target, gradients=True, tma=False)
    assert max(needed.values()) > get_target(target).max_shared


@pytest.mark.parametrize(("name", "target"), CASES)
def test_what_ships_needs_no_more_than_predicted(name: str, target: str) -> None:
    plan = PLANS[name]
    for gradients in (False, True):
        config = first(plan, target, gradients)
        predicted = linear_usage(plan, config, get_target(target), gradients=gradients)
        assert predicted.fits
        for tma in {plan.uses_tma(target), False}:
            needed = linear_bytes(plan, config, target, gradients=gradients, tma=tma)
            assert max(needed.values()) <= predicted.total, (config, tma, needed)


@pytest.mark.parametrize(
    "name",
    ["elu_d128", "plain_d128", "favor_d128", "favor_d64", "features_d128", "features_elu_d128"],
)
def test_tiles_of_64_rows_and_more_need_exactly_what_is_predicted(name: str) -> None:
    plan = PLANS[name]
    for gradients in (False, True):
        for config in linear_space(plan, "sm_90", gradients=gradients).candidates:
            if config.BLOCK_M >= 64 and config.num_stages > 1:
                predicted = linear_usage(plan, config, get_target("sm_90"), gradients=gradients)
                needed = linear_bytes(plan, config, "sm_90", gradients=gradients, tma=True)
                assert max(needed.values()) == predicted.total, (config, needed)


@pytest.mark.parametrize("name", ["elu_d128", "elu_d64", "unequal"])
def test_what_is_tried_besides_comes_last_and_needs_what_is_predicted(name: str) -> None:
    """Long chunks, and half the warps: in front they would ship where nothing was measured."""
    plan = PLANS[name]
    space = linear_space(plan, "sm_90", gradients=False)
    order = rank_linear(plan, "sm_90", space.candidates, gradients=False)
    assert all(config.BLOCK_M <= 64 for config in order[:9])
    assert len({config.num_warps for config in order[:9]}) == 1
    besides = {(config.BLOCK_M, config.num_warps) for config in order[9:]}
    assert besides == {"elu_d128": {(128, 8), (64, 4)}}.get(name, {(128, 4)})
    for config in order[9:]:
        predicted = linear_usage(plan, config, get_target("sm_90"), gradients=False)
        needed = max(linear_bytes(plan, config, "sm_90", gradients=False, tma=True).values())
        assert needed == predicted.total if name != "unequal" else needed <= predicted.total
    assert not any(x.BLOCK_M > 64 for x in linear_space(plan, "sm_90", gradients=True).candidates)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize(
    "name",
    ["elu_d128", "plain_d128", "decays_d128", "documents_d128", "favor_d128", "features_d128"],
)
def test_they_do_not_spill(name: str) -> None:
    plan = PLANS[name]
    for gradients, functions in ((False, FORWARD), (True, GRADIENTS)):
        config = first(plan, "sm_90", gradients)
        for function in functions:
            spilled = compile_linear(plan, config, "sm_90", function).spilled
            assert spilled <= SPILLED.get((name, function), 0), function


#: What functions for packed sequences hold besides: where tiles of results change their layout.
MORE_OF_PACKED = 1024

#: Those that have the form, and spill most: what each of their functions may spill, in bytes.
SPILLED_OF_PACKED = {"elu_d128": 176, "decays_d128": 96, "full_d64": 0, "decays_unequal": 224}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (name, target)
        for name, target in CASES
        if not why_no_form("varlen", PLANS[name]) and target in ("sm_80", "sm_90", "gfx942")
    ],
)
def test_packed_sequences_need_no_more_than_there_is(name: str, target: str) -> None:
    plan, most = PLANS[name], get_target(target).max_shared
    for gradients in (False, True):
        config = first(plan, target, gradients)
        predicted = linear_usage(plan, config, get_target(target), gradients=gradients)
        needed = linear_bytes(plan, config, target, gradients=gradients, tma=False, packed=True)
        assert max(needed.values()) <= min(predicted.total + MORE_OF_PACKED, most), needed


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", SPILLED_OF_PACKED)
def test_packed_sequences_spill_little(name: str) -> None:
    """What is used between sequences, mostly: docs/design/linear.md."""
    plan = PLANS[name]
    for gradients, functions in ((False, FORWARD), (True, GRADIENTS)):
        config = first(plan, "sm_90", gradients)
        for function in functions:
            report = compile_linear(plan, config, "sm_90", function, packed=True)
            assert report.spilled <= SPILLED_OF_PACKED[name], function

"""The search space: small, complete, explained, and the user's where the user says so."""

import dataclasses
import math

import pytest

from flashgen import AttentionSpec, Blocks, causal
from flashgen.budget.targets import DEFAULT_TARGETS, get_target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.occupancy import occupancy
from flashgen.kernels.forward_triton.shared_memory import worst_usage
from flashgen.kernels.forward_triton.space import SMALL, USUAL, search_space
from flashgen.plan import KernelPlan, lower
from support.loads import kernel_spec
from support.variants import shipped_plan, shipped_specs


def plan(head_dim=128, dtype="bfloat16", blocks=None, precision=None) -> KernelPlan:
    spec = AttentionSpec(
        head_dim, dtype, causal(), blocks=blocks or Blocks(), input_precision=precision
    )
    return lower(spec, "x")


def reason(plan: KernelPlan, target: str, *numbers: int) -> str:
    return dict(search_space(plan, target).rejected)[KernelConfig(*numbers)]


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
@pytest.mark.parametrize("name", shipped_specs())
def test_every_shipped_variant_has_a_handful_of_candidates(name: str, target: str) -> None:
    kernel = shipped_plan(name)
    space = search_space(kernel, target)
    assert 1 <= len(space.candidates) <= 20
    usages = (worst_usage(kernel, config, get_target(target)) for config in space.candidates)
    assert all(usage.fits for usage in usages)
    assert all(occupancy(kernel, c, get_target(target)).blocks >= 1 for c in space.candidates)


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_every_combination_is_a_candidate_or_has_a_reason(target: str) -> None:
    space = search_space(plan(), target)
    lists = USUAL[get_target(target).backend]
    rejected = [config for config, _ in space.rejected]
    looked_at = [*space.candidates, *rejected]
    assert len(looked_at) == len(set(looked_at)) == math.prod(map(len, lists.values()))
    for config in looked_at:
        assert all(number in lists[name] for name, number in config.as_dict().items())
    assert all(len(why.split()) > 4 for _, why in space.rejected)


@pytest.mark.parametrize(
    ("kernel", "target", "numbers", "words"),
    [
        (
            plan(256),
            "sm_90",
            (128, 128, 8, 3),
            "needs 458,808 B of shared memory, sm_90 has 232,448 B "
            "(Q 65,536 + K 196,608 + V 196,608 + barriers 56)",
        ),
        (plan(), "sm_90", (64, 64, 8, 2), "8 warps get 8 query rows each; a matrix product has 16"),
        (
            plan(),
            "sm_90",
            (128, 128, 4, 2),
            "a step keeps 256 of a thread's 255 registers busy: it would spill",
        ),
        (
            plan(64),
            "sm_90",
            (128, 32, 4, 2),
            "steps of 32 keys reduce and rescale twice as often as steps of 64",
        ),
        (
            plan(),
            "sm_100",
            (64, 64, 4, 2),
            "the tensor cores of this target compute 128 rows at a time",
        ),
        (
            plan(),
            "sm_80",
            (64, 64, 4, 2),
            "warps share 64 rows of 128 columns out by columns: weights and row maxima would pass "
            "through shared memory",
        ),
        (
            plan(80),
            "gfx942",
            (128, 32, 8, 2),
            "a thread's share of 32 x 16 keys is 2 bytes; asynchronous copies move 4 at least",
        ),
    ],
    ids=["fit", "idle warps", "spill", "short steps", "half a unit", "by columns", "small copies"],
)
def test_reasons(kernel, target, numbers, words) -> None:
    assert reason(kernel, target, *numbers) == words


TARGETS_BY_UNIT = ("sm_80", "sm_90", "sm_100", "gfx942")


def _tile(config: KernelConfig) -> tuple[int, int, int]:
    return config.BLOCK_M, config.BLOCK_N, config.num_warps


def tiles_of(configs) -> set[tuple[int, int, int]]:
    return set(map(_tile, configs))


@pytest.mark.parametrize("target", TARGETS_BY_UNIT)
@pytest.mark.parametrize("name", ["bias", "levels"])
def test_tiles_whose_elements_spill_are_not_offered(name: str, target: str) -> None:
    """Of tensors indexed for each score, by the score function or by the mask."""
    plain, loading = (lower(kernel_spec(n), "x") for n in ("causal", name))
    before, after = (search_space(kernel, target) for kernel in (plain, loading))
    reasons, taken = dict(after.rejected), tiles_of(after.candidates)
    lost = [reasons.get(c, "") for c in before.candidates if _tile(c) not in taken]
    assert any(why.endswith("registers busy: it would spill") for why in lost)
    assert all("would spill" in why or "of shared memory" in why for why in lost)
    vectors = search_space(lower(kernel_spec("keys"), "x"), target)
    assert tiles_of(vectors.candidates) == tiles_of(before.candidates)


@pytest.mark.parametrize("target", TARGETS_BY_UNIT[:3])
def test_steps_of_32_keys_are_for_those_whose_64_would_spill(target: str) -> None:
    plain, biased = (search_space(lower(kernel_spec(n), "x"), target) for n in ("causal", "bias"))
    assert 32 not in {config.BLOCK_N for config in plain.candidates}
    short = [config for config in biased.candidates if config.BLOCK_N == 32]
    assert short
    reasons = dict(biased.rejected)
    for config in short:
        wider = reasons[dataclasses.replace(config, BLOCK_N=64)]
        assert "would spill" in wider or "shared memory" in wider
    for config, why in biased.rejected:
        if "twice as often" in why:
            assert "spill" not in reasons.get(dataclasses.replace(config, BLOCK_N=64), "")


def test_pins_are_honoured_against_every_rule() -> None:
    """64 rows on 8 warps is what flashgen would never propose."""
    blocks = Blocks(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=(2, 5))
    space = search_space(plan(blocks=blocks), "sm_90")
    assert space.candidates == (KernelConfig(64, 32, 8, 2), KernelConfig(64, 32, 8, 5))
    assert space.rejected == ()


def test_a_pin_leaves_the_rest_to_the_rules() -> None:
    space = search_space(plan(blocks=Blocks(BLOCK_M=64)), "sm_90")
    assert {config.num_warps for config in space.candidates} == {4}
    assert {config.BLOCK_M for config in space.candidates} == {64}


def test_a_pin_that_leaves_nothing_wise_leaves_what_fits() -> None:
    """256 columns on 4 warps spill at 128 rows, whatever BLOCK_N is."""
    space = search_space(plan(256, blocks=Blocks(BLOCK_M=128, num_warps=4)), "sm_90")
    assert space.candidates
    assert all(config.BLOCK_M == 128 for config in space.candidates)


def test_pins_that_do_not_fit_leave_nothing() -> None:
    blocks = Blocks(BLOCK_M=256, BLOCK_N=256, num_stages=4)
    space = search_space(plan(256, blocks=blocks), "sm_90")
    assert space.candidates == ()
    assert all("shared memory" in why for _, why in space.rejected)


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(512, "bfloat16"), ((512, 256), "float16"), (512, "float32")], ids=str
)
def test_wide_heads_get_small_tiles(target: str, head_dim, dtype: str) -> None:
    kernel = plan(head_dim, dtype, precision="tf32" if dtype == "float32" else None)
    space = search_space(kernel, target)
    usages = (worst_usage(kernel, config, get_target(target)) for config in space.candidates)
    assert all(usage.fits for usage in usages)
    if not space.candidates:
        assert {why.split()[0] for _, why in space.rejected} == {"needs"}
        smallest = dataclasses.replace(space.rejected[0][0], BLOCK_M=16, BLOCK_N=16, num_stages=1)
        assert smallest in dict(space.rejected)
        assert {name: min(values) for name, values in SMALL.items()} == smallest.as_dict()

"""measure's bookkeeping, with a stand-in for the GPU; tests/gpu measures for real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashgen import AttentionSpec, causal, elu_plus_one, linear
from flashgen.config import KernelConfig
from flashgen.errors import TuneError
from flashgen.kernels.registry import kernels_of, keys
from flashgen.kernels.workload import usual_heads
from flashgen.plan import lower
from flashgen.tuning import measure as tuning
from flashgen.tuning.forward_bench import load_rendered
from flashgen.tuning.store import Measurement, TuneResult

FAST, SLOW, MEDIUM = (KernelConfig(64, n, 4, 2) for n in (32, 64, 128))
SPEEDS = {FAST: 300.0, MEDIUM: 200.0, SLOW: 100.0}
PLAN = lower(AttentionSpec(64, mask=causal()), "causal")
KERNELS = kernels_of(PLAN)
FORWARD = KERNELS["portable"], MEDIUM


class StandIn:
    """Answers as a GPU would: a rate for each candidate, or what `faults` raises."""

    faults: dict[KernelConfig, BaseException]
    timed: list[KernelConfig]
    compiled: list[KernelConfig]
    of: tuple[object, ...]

    def __init__(self, *args: object) -> None:
        StandIn.of = args

    def compile(self, configs: list[KernelConfig]) -> None:
        self.compiled.extend(configs)

    def check(self, config: KernelConfig) -> None:
        if config in self.faults:
            raise self.faults[config]

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        self.timed.append(config)
        return Measurement(config, (1.0, 1.0), (SPEEDS[config], SPEEDS[config]))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuneResult]:
    def call(**options: object) -> TuneResult:
        StandIn.timed, StandIn.compiled = [], []
        StandIn.faults = options.pop("faults", {})  # type: ignore[assignment]
        monkeypatch.setattr(tuning, "_bench", StandIn)
        order = (SLOW, FAST, MEDIUM)
        options = {"kernel": KERNELS["portable"], **options}
        return tuning.measure(PLAN, "sm_90", "A GPU", order, **options)  # type: ignore[arg-type]

    return call


def test_the_fastest_comes_first_and_the_best_few_are_timed_again_in_turns(
    run: Callable[..., TuneResult],
) -> None:
    result = run()
    assert [m.config for m in result.measured] == [FAST, MEDIUM, SLOW]
    assert result.ended == "complete"
    there_and_back = [FAST, MEDIUM, SLOW, SLOW, MEDIUM, FAST]
    assert StandIn.timed == [SLOW, FAST, MEDIUM, *2 * there_and_back]
    assert sorted(StandIn.compiled) == sorted(SPEEDS)


def test_how_many_are_timed_again_can_be_said(run: Callable[..., TuneResult]) -> None:
    result = run(finalists=1)
    assert StandIn.timed == [SLOW, FAST, MEDIUM, *4 * [FAST]]
    assert [m.config for m in result.measured] == [FAST, MEDIUM, SLOW]


def test_a_gpu_that_slows_down_favours_nobody(
    run: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, the slower of two that are 2% apart would be ahead."""
    speeds = {FAST: 300.0, MEDIUM: 294.0, SLOW: 200.0}
    calls = 0

    def time(self: StandIn, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        nonlocal calls
        calls += 1
        if effort is tuning.FIRST_LOOK:  # which MEDIUM is ahead in, and so first afterwards
            return Measurement(config, (1.0,), ({MEDIUM: 301.0}.get(config, speeds[config]),))
        rate = speeds[config] * (1 - 0.03 * calls)
        return Measurement(config, (3.0 / rate,), (rate,))

    monkeypatch.setattr(StandIn, "time", time)
    result = run(finalists=2)
    assert [m.config for m in result.measured] == [FAST, MEDIUM, SLOW]


def test_of_several_looks_the_median_counts(
    run: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 9.0, 9.0, 4.0, 2.0, 1.0, 40.0])

    def time(self: StandIn, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        ms = next(times)
        return Measurement(config, (ms, 2 * ms), (12 / ms, 12 / ms))

    monkeypatch.setattr(StandIn, "time", time)
    first, *_ = run(finalists=1).measured
    assert first == Measurement(SLOW, (3.0, 6.0), (4.0, 4.0))


def test_an_interrupt_of_closer_looks_keeps_those_that_were_had(
    run: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = StandIn.time

    def gone(self: StandIn, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        if len(self.timed) == 5:
            raise KeyboardInterrupt
        return time(self, config, effort)

    monkeypatch.setattr(StandIn, "time", gone)
    result = run()
    assert [m.config for m in result.measured] == [FAST, MEDIUM, SLOW]
    assert result.ended == "interrupt"


@pytest.mark.parametrize("key", keys())
def test_the_result_is_of_the_kernel_that_was_asked_for(
    run: Callable[..., TuneResult], key: str
) -> None:
    result = run(kernel=KERNELS[key], forward=FORWARD)
    assert result.form == key
    assert result.kernel == KERNELS[key].digest(PLAN)
    assert StandIn.of == (PLAN, "sm_90", (SLOW, FAST, MEDIUM), KERNELS[key], FORWARD)


@pytest.mark.parametrize("key", keys())
def test_who_measures_a_kernel(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(tuning, "ForwardBench", lambda *given: ("forward", *given))
    monkeypatch.setattr(tuning, "BackwardBench", lambda *given: ("backward", *given))
    kernel = KERNELS[key]
    made: tuple[object, ...] = ("forward", PLAN, "sm_90", (SLOW, FAST), kernel)
    if kernel.gradients:
        made = ("backward", PLAN, "sm_90", kernel, FORWARD)
    assert tuning._bench(PLAN, "sm_90", (SLOW, FAST), kernel, FORWARD) == made


def test_who_measures_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other benches launch what its modules lack; and a module without its configuration."""
    plan = lower(AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one())), "linear")
    forward, gradients = kernels_of(plan).values()
    module = load_rendered(plan, "sm_90", FAST, forward, gradients)
    config = {"CHUNK": 64, "num_warps": 4, "num_stages": 2, "USE_TMA": True, "PROGRAMS": 2}
    assert module.CONFIGS == module.CONFIGS_OF_GRADIENTS == {"sm_90": config}
    monkeypatch.setattr(tuning, "LinearForwardBench", lambda *given: ("forward", *given))
    monkeypatch.setattr(tuning, "LinearBackwardBench", lambda *given: ("backward", *given))
    made = ("forward", plan, "sm_90", (FAST,), forward)
    assert tuning._bench(plan, "sm_90", (FAST,), forward, None) == made
    before = forward, FAST
    made = ("backward", plan, "sm_90", gradients, before)
    assert tuning._bench(plan, "sm_90", (FAST,), gradients, before) == made


@pytest.mark.parametrize(
    ("decay", "heads"), [(lambda h: 0.25 * h - 0.75, 4), ((-0.5, 0.0, -1.0), 3), (lambda h: -h, 32)]
)
def test_inputs_have_as_many_heads_as_there_are_decays_for(decay: object, heads: int) -> None:
    """With 32 of them modules refuse the call, and every candidate of a build fails."""
    for algorithm in (None, "quadratic"):
        normaliser = linear(elu_plus_one(), decay=decay, algorithm=algorithm)
        spec = AttentionSpec(64, mask=causal(), normaliser=normaliser)
        assert usual_heads(lower(spec, "x")) == heads


def test_the_kernels_have_digests_of_their_own() -> None:
    assert len({kernel.digest(PLAN) for kernel in KERNELS.values()}) == len(KERNELS) == 5


def test_where_nothing_fits_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is kept, so that it is not tried again with each build."""
    monkeypatch.setattr(tuning, "_bench", None)
    rejected = ((FAST, "needs 1 B"),)
    kernel = KERNELS["backward_keys"]
    result = tuning.measure(PLAN, "sm_90", "A GPU", (), rejected, kernel=kernel, forward=FORWARD)
    assert (result.measured, result.rejected, result.ended) == ((), rejected, "complete")


def test_a_module_rendered_to_be_measured_launches_the_configuration() -> None:
    module = load_rendered(PLAN, "sm_90", FAST, KERNELS["hopper"])
    assert FAST.as_dict() == module.HOPPER_CONFIG and module.CONFIGS == {}
    module = load_rendered(PLAN, "sm_90", FAST, KERNELS["portable"])
    assert {**FAST.as_dict(), "USE_TMA": True} == module.CONFIGS["sm_90"]
    assert not hasattr(module, "HOPPER_CONFIG")
    assert not hasattr(module, "_backward_kernels_hopper")
    module = load_rendered(PLAN, "sm_90", FAST, KERNELS["portable"], KERNELS["hopper_backward"])
    assert {**FAST.as_dict(), "USE_TMA": True} == module.CONFIGS["sm_90"]
    assert module._backward_kernels_hopper and not hasattr(module, "HOPPER_CONFIG")


def test_a_full_gpu_is_told_of(
    run: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: StandIn, *args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    monkeypatch.setattr(StandIn, "__init__", full)
    with pytest.raises(TuneError) as caught:
        run()
    assert str(caught.value) == (
        "causal: A GPU cannot run what is measured "
        "(OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB); "
        "free the GPU, or build with --no-tune"
    )


def test_a_gpu_that_gives_up_is_no_result(
    run: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access nothing runs: the candidates since then are not at fault."""
    faults = {MEDIUM: RuntimeError("CUDA error: an illegal memory access\nmore")}
    time = StandIn.time

    def gone(self: StandIn, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        if effort is tuning.CLOSER_LOOK:
            raise faults[MEDIUM]
        return time(self, config, effort)

    monkeypatch.setattr(StandIn, "time", gone)
    with pytest.raises(TuneError) as caught:
        run(faults=faults)
    assert str(caught.value) == (
        f"causal: {FAST} ran once on A GPU and then no more "
        "(RuntimeError: CUDA error: an illegal memory access); "
        "free the GPU, or build with --no-tune"
    )


def test_closer_looks_are_not_compared_with_first_looks(
    run: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def time(self: StandIn, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        warm = 0.1 if effort is tuning.CLOSER_LOOK else 1.0
        return Measurement(config, (1.0, 1.0), (warm * SPEEDS[config], warm * SPEEDS[config]))

    monkeypatch.setattr(StandIn, "time", time)
    monkeypatch.setattr(tuning, "FINALISTS", 1)
    assert [m.config for m in run().measured] == [FAST, MEDIUM, SLOW]


def test_a_candidate_that_fails_is_rejected_with_its_reason(
    run: Callable[..., TuneResult],
) -> None:
    before = ((KernelConfig(16, 16, 4, 1), "does not fit"),)
    result = run(rejected=before, faults={FAST: RuntimeError("out of resources\nmore lines")})
    assert [m.config for m in result.measured] == [MEDIUM, SLOW]
    assert result.rejected == (*before, (FAST, "RuntimeError: out of resources"))


def test_a_wrong_result_is_a_failure(run: Callable[..., TuneResult]) -> None:
    wrong = ArithmeticError("wrong result: relative error 0.5")
    assert run(faults={SLOW: wrong}).rejected == ((SLOW, f"ArithmeticError: {wrong}"),)


def test_time_ends_after_the_first_candidate_at_least(run: Callable[..., TuneResult]) -> None:
    result = run(seconds=-1.0)
    assert [m.config for m in result.measured] == [SLOW]
    assert result.ended == "time"


def test_an_interrupt_keeps_the_best_so_far(run: Callable[..., TuneResult]) -> None:
    result = run(faults={MEDIUM: KeyboardInterrupt()})
    assert [m.config for m in result.measured] == [FAST, SLOW]
    assert result.ended == "interrupt"


def test_an_interrupt_before_anything_is_measured_goes_through(
    run: Callable[..., TuneResult],
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(faults={SLOW: KeyboardInterrupt()})


def test_nothing_that_runs_is_the_users_to_know(run: Callable[..., TuneResult]) -> None:
    faults = {config: RuntimeError("no kernel image") for config in SPEEDS}
    with pytest.raises(TuneError) as failure:
        run(faults=faults)
    assert str(failure.value) == (
        "causal: none of 3 candidates ran on A GPU (the last, BLOCK_M=64 BLOCK_N=128 num_warps=4 "
        "num_stages=2: RuntimeError: no kernel image); free the GPU, or build with --no-tune"
    )


def test_progress_is_reported_up_to_the_end(run: Callable[..., TuneResult]) -> None:
    seen: list[tuple[int, int]] = []
    run(report=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]

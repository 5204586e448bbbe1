"""measure: candidates timed on this machine's GPU, on the mask itself.

Every candidate runs in the module that would be published. A candidate that fails or whose result
is wrong is rejected.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import monotonic

from flashgen.config import KernelConfig
from flashgen.errors import TuneError, first_line
from flashgen.kernels.base import ForwardKernel, GradientKernel, Kernel
from flashgen.kernels.workload import usual_lengths
from flashgen.plan import KernelPlan
from flashgen.tuning.backward_bench import BackwardBench, Forward
from flashgen.tuning.forward_bench import ForwardBench
from flashgen.tuning.linear_bench import LinearBackwardBench, LinearForwardBench
from flashgen.tuning.store import Ending, Measurement, TuneResult

# Milliseconds of one timing: a first look at every candidate, closer ones at the best few.
FIRST_LOOK = {"warmup": 10, "rep": 40}
CLOSER_LOOK = {"warmup": 25, "rep": 50}
FINALISTS = 3

# Closer looks at each of the best few. They take turns, every second round in the reverse order: a
# GPU that has rested is faster by up to a tenth, and one that is limited by its power slows down.
ROUNDS = 4

# Candidates that are compiled in parallel before they are timed one by one.
WAVE = min(16, os.cpu_count() or 1)

# The most characters of a reason: some compilers put a whole message into one line.
LONGEST_REASON = 200

Report = Callable[[int, int], None]

#: What compiles, checks and times the candidates of a kernel.
Bench = ForwardBench | BackwardBench | LinearForwardBench | LinearBackwardBench


def measure(
    plan: KernelPlan,
    target: str,
    gpu: str,
    candidates: Sequence[KernelConfig],
    rejected: Sequence[tuple[KernelConfig, str]] = (),
    *,
    kernel: Kernel,
    forward: Forward | None = None,
    seconds: float = math.inf,
    finalists: int = FINALISTS,
    report: Report = lambda done, total: None,
) -> TuneResult:
    """Times candidates in the given order, then the best few again in turns.

    Args:
        plan: the kernel.
        target: the architecture of the GPU that torch sees as its current one.
        gpu: that GPU's name, for the record.
        candidates: most promising first.
        rejected: candidates rejected before, for the record.
        kernel: which kernel they are configurations of.
        forward: for a backward kernel, the forward kernel before it, with its configuration.
        seconds: the time after which no further candidate starts; at least one is measured.
        finalists: how many of the best get closer looks.
        report: called with (candidates looked at, candidates) as it goes.

    Returns:
        The rates, best first; none if a backward kernel, which a module does not need, has no
        candidates. An interrupt (Ctrl-C) after the first candidate ends the measuring
        and keeps what there is.

    Raises:
        TuneError: inputs could not be made, no candidate ran, or one that had run did not
            when it was looked at closely.
        KeyboardInterrupt: interrupted before the first candidate was measured.
    """
    import triton

    assert candidates or kernel.gradients, "no forward kernel is done without"
    rejected = list(rejected)
    measured: dict[KernelConfig, Measurement] = {}
    looks: dict[KernelConfig, list[Measurement]] = {}
    ended: Ending = "complete"
    if candidates:
        try:
            bench = _bench(plan, target, candidates, kernel, forward)
        except RuntimeError as error:  # no memory, or a GPU that a fault left unusable
            raise TuneError(
                f"{plan.name}: {gpu} cannot run what is measured ({first_line(error)}); "
                "free the GPU, or build with --no-tune"
            ) from error
    deadline = monotonic() + seconds
    try:
        for done, config in enumerate(candidates):
            report(done, len(candidates))
            if measured and monotonic() > deadline:
                ended = "time"
                break
            if done % WAVE == 0:
                bench.compile(candidates[done : done + WAVE])
            try:
                bench.check(config)
                measured[config] = bench.time(config, FIRST_LOOK)
            except Exception as error:  # any error of Triton, its compilers or the driver
                rejected.append((config, first_line(error)[:LONGEST_REASON]))
        report(len(candidates), len(candidates))
        best = sorted(measured, key=lambda c: -_rate(measured[c]))[:finalists]
        for number in range(ROUNDS):
            for config in best if number % 2 == 0 else reversed(best):
                look = _closer_look(bench, config, plan.name, gpu)
                looks.setdefault(config, []).append(look)
    except KeyboardInterrupt:
        if not measured:
            raise
        ended = "interrupt"
    if candidates and not measured:
        config, reason = rejected[-1]
        raise TuneError(
            f"{plan.name}: none of {len(candidates)} candidates ran on {gpu} "
            f"(the last, {config}: {reason}); free the GPU, or build with --no-tune"
        )
    finals = map(_median, looks.values())
    rest = (measured[config] for config in measured if config not in looks)
    return TuneResult(
        target=target,
        gpu=gpu,
        triton=triton.__version__,
        kernel=kernel.digest(plan),
        lengths=usual_lengths(plan),
        # A closer look on a warm GPU is slower: only closer looks are compared with each other.
        measured=(*_best_first(finals), *_best_first(rest)),
        rejected=tuple(rejected),
        ended=ended,
        form=kernel.key,
    )


def _bench(
    plan: KernelPlan,
    target: str,
    candidates: Sequence[KernelConfig],
    kernel: Kernel,
    forward: Forward | None,
) -> Bench:
    if isinstance(kernel, GradientKernel):
        assert forward is not None
        backward = LinearBackwardBench if kernel.linear else BackwardBench
        return backward(plan, target, kernel, forward)
    assert isinstance(kernel, ForwardKernel)
    bench = LinearForwardBench if kernel.linear else ForwardBench
    return bench(plan, target, candidates, kernel)


def _closer_look(bench: Bench, config: KernelConfig, variant: str, gpu: str) -> Measurement:
    """Another timing of a candidate that has run before."""
    try:
        return bench.time(config, CLOSER_LOOK)
    except Exception as error:  # usually a fault that a later candidate left behind
        raise TuneError(
            f"{variant}: {config} ran once on {gpu} and then no more "
            f"({first_line(error)}); free the GPU, or build with --no-tune"
        ) from error


def _median(looks: Sequence[Measurement]) -> Measurement:
    """The median times of a candidate's looks, and their rates."""
    first = looks[0]
    ms = tuple(median(times) for times in zip(*(look.ms for look in looks), strict=True))
    work = (rate * t for rate, t in zip(first.tflops, first.ms, strict=True))
    return Measurement(first.config, ms, tuple(w / t for w, t in zip(work, ms, strict=True)))


def _rate(measurement: Measurement) -> float:
    """Geometric mean of the rates over the lengths."""
    rate: float = math.prod(measurement.tflops) ** (1 / len(measurement.tflops))
    return rate


def _best_first(measurements: Iterable[Measurement]) -> list[Measurement]:
    return sorted(measurements, key=_rate, reverse=True)

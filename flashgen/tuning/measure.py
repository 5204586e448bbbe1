"""measure: candidates timed on this machine's GPU, on the mask itself.

Every candidate runs the very module that would be published. One whose result is wrong is turned
down as one that does not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from flashgen.codegen.render import kernel_digest, render_module
from flashgen.config import ChosenConfig, Form, HopperChoice, KernelConfig
from flashgen.errors import TuneError
from flashgen.plan import KernelPlan
from flashgen.plan.arguments import sizing_numbers
from flashgen.tuning.store import Ending, Measurement, TuneResult
from flashgen.tuning.workload import (
    random_inputs,
    typical_params,
    usual_lengths,
    visible,
    visible_flops,
)

# Milliseconds of one timing: a first look at every candidate, a closer one at the best few.
FIRST_LOOK = {"warmup": 10, "rep": 40}
CLOSER_LOOK = {"warmup": 25, "rep": 150}
FINALISTS = 3

# Candidates that are compiled side by side before they are timed one by one.
WAVE = min(16, os.cpu_count() or 1)

# Largest relative error (Frobenius norm) of a candidate that is not broken: bfloat16 gives 0.004.
WRONG = 0.02

Report = Callable[[int, int], None]


def measure(
    plan: KernelPlan,
    target: str,
    gpu: str,
    candidates: Sequence[KernelConfig],
    rejected: Sequence[tuple[KernelConfig, str]] = (),
    *,
    form: Form = "portable",
    seconds: float = math.inf,
    report: Report = lambda done, total: None,
) -> TuneResult:
    """Times candidates in the given order, then the best few again and more closely.

    Args:
        plan: the kernel.
        target: the architecture of the GPU that torch sees as its current one.
        gpu: that GPU's name, for the record.
        candidates: most promising first.
        rejected: candidates turned down before, for the record.
        form: which kernel they are configurations of.
        seconds: when to stop looking at further candidates; at least one is measured.
        report: called with (candidates looked at, candidates) as it goes.

    Returns:
        The rates, best first. An interrupt (Ctrl-C) after the first candidate ends the measuring
        and keeps what there is.

    Raises:
        TuneError: no candidate ran.
        KeyboardInterrupt: interrupted before the first candidate was measured.
    """
    import triton

    bench = _Bench(plan, target, candidates, form)
    turned_down = list(rejected)
    measured: dict[KernelConfig, Measurement] = {}
    finals: dict[KernelConfig, Measurement] = {}
    ended: Ending = "complete"
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
            except Exception as error:  # whatever Triton, its compilers or the driver raise
                turned_down.append((config, _reason(error)))
        report(len(candidates), len(candidates))
        for config in sorted(measured, key=lambda c: -_rate(measured[c]))[:FINALISTS]:
            finals[config] = bench.time(config, CLOSER_LOOK)
    except KeyboardInterrupt:
        if not measured:
            raise
        ended = "interrupt"
    if not measured:
        config, reason = turned_down[-1]
        raise TuneError(
            f"{plan.name}: none of {len(candidates)} candidates ran on {gpu} "
            f"(the last, {config}: {reason}); free the GPU, or build with --no-tune"
        )
    rest = (measured[config] for config in measured if config not in finals)
    return TuneResult(
        target=target,
        gpu=gpu,
        triton=triton.__version__,
        kernel=kernel_digest(plan, form),
        lengths=usual_lengths(plan),
        # A closer look on a warm GPU is slower: it is compared with other closer looks alone.
        measured=(*_best_first(finals.values()), *_best_first(rest)),
        rejected=tuple(turned_down),
        ended=ended,
        form=form,
    )


def load_rendered(
    plan: KernelPlan, target: str, config: KernelConfig, form: Form = "portable"
) -> ModuleType:
    """The module of a plan with one configuration, imported from a file that is gone again.

    With a configuration of the Gluon kernel, the portable one has none in it.
    """
    choice = ChosenConfig(config, source="model", shared=0)
    hopper = HopperChoice(choice if form == "hopper" else None)
    chosen = {} if form == "hopper" else {target: choice}
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / f"{plan.name}.py"
        path.write_text(render_module(plan, chosen, hopper), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"flashgen_measured_{plan.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


class _Bench:
    """Inputs of every length, and the module to run on them."""

    def __init__(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig], form: Form
    ) -> None:
        self.plan = plan
        self.use_tma = plan.uses_tma(target)
        self.module = load_rendered(plan, target, candidates[0], form)
        self.launch = self.module._launch_hopper if form == "hopper" else self.module._launch
        self.lengths = usual_lengths(plan)
        self.inputs = {length: random_inputs(plan, length) for length in self.lengths}
        self.params = {length: typical_params(plan, q) for length, (q, _, _) in self.inputs.items()}
        self.flops = {
            length: visible_flops(plan, q, visible(plan, q, self.params[length]))
            for length, (q, _, _) in self.inputs.items()
        }

    def run(self, config: KernelConfig, length: int, qkv: Iterable[Any]) -> Any:
        """(out, lse) with one configuration, of inputs with the parameters of a length.

        Launches are repeated as a user's are: between two kernels of one call, the GPU would wait
        for an ordinary launch longer than it computes.
        """
        values = {**config.as_dict(), "USE_TMA": self.use_tma}
        params, tensors = self.params[length], list(qkv)
        by = [x for x in params.values() if hasattr(x, "data_ptr")]
        by += [params[name] for name in sizing_numbers(self.plan.arguments, self.plan.constants)]
        by += [params["dropout_p"]] * self.plan.dropout
        repeated = self.module._known(*tensors, *by)
        return self.launch(*tensors, self.plan.scale, *params.values(), values, *repeated)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Compiles these at once, each in a thread of its own; one that fails will again later."""

        def first_call(config: KernelConfig) -> None:
            with contextlib.suppress(Exception):
                shortest = self.lengths[0]
                self.run(config, shortest, [x[:1, :1, :1] for x in self.inputs[shortest]])

        with ThreadPoolExecutor(max(1, len(configs))) as pool:
            list(pool.map(first_call, configs))

    def check(self, config: KernelConfig) -> None:
        """Holds one head's output to the eager reference's; ArithmeticError if it is wrong."""
        length = self.lengths[0]
        qkv = [x[:1, :1] for x in self.inputs[length]]
        out, _ = self.run(config, length, qkv)
        params = self.params[length]
        expected = self.module.reference(*qkv, scale=self.plan.scale, **params).float()
        error = ((out.float() - expected).norm() / expected.norm()).item()
        if not error <= WRONG:
            raise ArithmeticError(f"wrong result: relative error {error:.2g}")

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        """The median time of a call at every length."""
        import triton

        ms = tuple(
            triton.testing.do_bench(
                lambda length=length: self.run(config, length, self.inputs[length]),
                return_mode="median",
                **effort,
            )
            for length in self.lengths
        )
        rates = zip(self.flops.values(), ms, strict=True)
        return Measurement(config, ms, tuple(flops / t / 1e9 for flops, t in rates))


def _rate(measurement: Measurement) -> float:
    """Geometric mean of the rates over the lengths."""
    rate: float = math.prod(measurement.tflops) ** (1 / len(measurement.tflops))
    return rate


def _best_first(measurements: Iterable[Measurement]) -> list[Measurement]:
    return sorted(measurements, key=_rate, reverse=True)


def _reason(error: Exception) -> str:
    """One line of what a compiler or a driver said."""
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}"[:200]

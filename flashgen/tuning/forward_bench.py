"""ForwardBench: a forward kernel's candidates on this machine's GPU, on the mask itself."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashgen.codegen.module import render_module
from flashgen.config import ChosenConfig, KernelChoice, KernelConfig
from flashgen.kernels.base import ForwardKernel, Kernel
from flashgen.kernels.workload import (
    random_inputs,
    usual_lengths,
    visible,
    visible_flops,
)
from flashgen.plan import KernelPlan
from flashgen.tuning.store import Measurement
from flashgen.tuning.typical_calls import dense_inputs, oracle

if TYPE_CHECKING:
    import torch

# Largest relative error (Frobenius norm) of a candidate that is not broken: bfloat16 gives 0.004.
WRONG = 0.02


def load_rendered(
    plan: KernelPlan, target: str, config: KernelConfig, kernel: Kernel, *others: Kernel
) -> ModuleType:
    """The module of a plan with one configuration, imported from a file that is deleted again.

    The module holds a kernel and others that run before it. Backward kernels for every plan get
    their configuration as an argument.
    """
    choice = KernelChoice({target: ChosenConfig(config, source="model", shared=0)})
    held = [kernel, *others] if not (kernel.gradients and kernel.fallback) else others
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / f"{plan.name}.py"
        text = render_module(plan, {one.key: choice for one in held})
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"flashgen_measured_{plan.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def relative_error(found: torch.Tensor, right: torch.Tensor, least: float = 0.0) -> float:
    """The norm of the difference over that of what is right, or over `least` if that is more."""
    error = (found.float() - right.float()).norm() / right.float().norm().clamp(min=least)
    return float(error.item())


class ForwardBench:
    """Inputs of every length, and the module to run on them."""

    def __init__(
        self,
        plan: KernelPlan,
        target: str,
        candidates: Sequence[KernelConfig],
        kernel: ForwardKernel,
        *others: Kernel,
    ) -> None:
        """Loads the module, which also holds the other kernels."""
        self.plan = plan
        self.use_tma = plan.uses_tma(target)
        self.module = load_rendered(plan, target, candidates[0], kernel, *others)
        self.launch = getattr(self.module, kernel.launcher)
        self.lengths = usual_lengths(plan)
        self._bits: dict[Any, Any] = {}
        self.inputs, self.params = {}, {}
        for length in self.lengths:
            vectors = random_inputs(plan, length)
            self.inputs[length], self.params[length] = dense_inputs(plan, self.module, vectors)

    @cached_property
    def flops(self) -> dict[int, float]:
        """FLOPs of the visible elements by length; computed only if something is timed."""
        return {
            length: visible_flops(self.plan, q, visible(self.plan, q, self.params[length]))
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
        by += [params[name] for name in self.plan.sizing_numbers]
        if self.plan.dropout:
            by.append(params["dropout_p"])
        repeated = self.module._known(*tensors, *by)
        given = (*params.values(), *self.bits(length, tensors))
        return self.launch(*tensors, self.plan.scale, *given, values, *repeated)

    def bits(self, length: int, qkv: Sequence[Any]) -> tuple[Any, ...]:
        """The bits of a call's tiles, where a kernel decides them: they are made once."""
        if not self.plan.classifies:
            return ()
        q, k, _ = qkv
        key = (length, q.shape, k.shape)
        if key not in self._bits:
            params = self.params[length]
            read = [params[name] for name in self.plan.mask_arguments]
            self._bits[key] = self.module._tile_bits(q, k.shape[2], *read)
        return (self._bits[key],)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Compiles the configurations in parallel threads; a failure will recur later."""
        shortest = self.lengths[0]
        row = [x[:1, :1, :1] for x in self.inputs[shortest]]
        at_once(lambda config: self.run(config, shortest, row), configs)

    def check(self, config: KernelConfig) -> None:
        """Compares one head's output with the eager reference; ArithmeticError if it is wrong."""
        length = self.lengths[0]
        qkv = [x[:1, :1] for x in self.inputs[length]]
        out, _ = self.run(config, length, qkv)
        params = self.plan.by_keyword(self.params[length])
        reference = getattr(self.module, oracle(self.plan))
        error = relative_error(out, reference(*qkv, scale=self.plan.scale, **params))
        if not error <= WRONG:
            raise ArithmeticError(f"wrong result: relative error {error:.2g}")

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        """The median time of a call at every length."""
        calls = (partial(self.run, config, n, self.inputs[n]) for n in self.lengths)
        return timed(config, calls, self.flops.values(), effort)


def at_once(first_call: Callable[[KernelConfig], Any], configs: Sequence[KernelConfig]) -> None:
    """Calls each configuration in its own thread, so that they are compiled in parallel.

    A failure will recur later.
    """

    def call(config: KernelConfig) -> None:
        with contextlib.suppress(Exception):
            first_call(config)

    with ThreadPoolExecutor(max(1, len(configs))) as pool:
        list(pool.map(call, configs))


def timed(
    config: KernelConfig,
    calls: Iterable[Callable[[], Any]],
    flops: Iterable[float],
    effort: dict[str, int],
) -> Measurement:
    """The median times of a candidate's calls, and their rates for so many FLOPs."""
    import triton

    ms = tuple(triton.testing.do_bench(call, return_mode="median", **effort) for call in calls)
    rates = tuple(work / t / 1e9 for work, t in zip(flops, ms, strict=True))
    return Measurement(config, ms, rates)

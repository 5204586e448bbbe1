"""LinearForwardBench, LinearBackwardBench: a pass of linear attention on this machine's GPU.

All kernels of a pass share a configuration, and are timed together as the module launches them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.base import ForwardKernel, GradientKernel, Kernel
from flashgen.kernels.linear_triton.occupancy import held_programs
from flashgen.kernels.linear_triton.shared_memory import linear_usage
from flashgen.kernels.linear_workload import divides_by_signed_sums
from flashgen.kernels.workload import random_inputs, typical_params, usual_lengths
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan
from flashgen.tuning.forward_bench import WRONG, at_once, load_rendered, relative_error, timed
from flashgen.tuning.store import Measurement

# The largest error of a gradient of decays, whose sums cancel; rounded features leave up to 0.015.
WRONG_SUM = 0.1

#: Arguments of launchers and of the reference, by their names there.
Given = Mapping[str, Any]


class LinearForwardBench:
    """What the launcher of the forward pass takes for every length, and the module to run."""

    def __init__(
        self,
        plan: KernelPlan,
        target: str,
        candidates: Sequence[KernelConfig],
        kernel: ForwardKernel,
        *others: Kernel,
    ) -> None:
        """Loads the module, which also holds the other kernels."""
        self.linear = LinearPlan(plan)
        self.target, self.use_tma = get_target(target), plan.uses_tma(target)
        self.module = load_rendered(plan, target, candidates[0], kernel, *others)
        self.launcher = kernel.launcher
        self.lengths = usual_lengths(plan)
        self.given = {length: self._inputs(length) for length in self.lengths}
        self.flops = {
            length: self.module._flops(*(given[x].shape for x in "qkv"))
            for length, given in self.given.items()
        }

    def _inputs(self, length: int) -> dict[str, Any]:
        """What launchers take of a call of one length; what they do not find there is None."""
        plan = self.linear.plan
        q, k, v = random_inputs(plan, length)
        given = {**typical_params(plan, q), "scale": plan.scale, "return_state": False}
        matrices = [given.pop(argument.name) for argument in self.linear.matrices]
        if matrices:
            if divides_by_signed_sums(plan):
                matrices = [x.abs() for x in matrices]
            q, k = self.module._multiplied(q, k, *matrices)
        if self.linear.random:
            given["matrix"] = self.module.draw_features(0, device=q.device)
        return {**given, "q": q, "k": k, "v": v}

    def part(self, given: Given, rows: int | None = None) -> dict[str, Any]:
        """A call's first head, and so many of its rows, with the call's strides.

        All heads of an entry where the spec lists a decay for each: it serves no other number.
        """
        found, decay = dict(given), self.linear.decay
        heads = len(decay.numbers) if decay is not None and decay.numbers else 1
        tensors = ["q", "k", "v", "g", "grad_out", "out", "sums", "grad_sums"]
        for name in (*tensors, self.linear.decay_tensor):
            if name in found:
                found[name] = found[name][:1, :heads, :rows]
        if self.linear.of_ids:
            ids = found[self.linear.run_argument]
            found[self.linear.run_argument] = ids[:1, :rows] if ids.dim() == 2 else ids[:rows]
        return found

    def run(self, config: KernelConfig, given: Given) -> tuple[Any, ...]:
        """The output, sums if weights are divided by them, and what else the launcher returns."""
        return self.launch(self.launcher, config, given)

    def launch(self, launcher: str, config: KernelConfig, given: Given) -> tuple[Any, ...]:
        """What a launcher returns with a configuration."""
        gradients = launcher != self.launcher
        shared = linear_usage(self.linear.plan, config, self.target, gradients=gradients).total
        values = {
            "CHUNK": config.BLOCK_M,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "USE_TMA": self.use_tma,
            "PROGRAMS": held_programs(config, self.target, shared),
        }
        found = called(getattr(self.module, launcher), {**given, "config": values})
        return found if isinstance(found, tuple) else (found,)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Compiles the configurations in parallel threads; a failure will recur later."""
        at_once(partial(self._compile, self.run, self.given), configs)

    def _compile(
        self, run: Callable[..., Any], given: Mapping[int, Given], config: KernelConfig
    ) -> None:
        """Runs a head of the shortest length, which has several segments, and one row, with one."""
        shortest = given[self.lengths[0]]
        run(config, self.part(shortest))
        run(config, self.part(shortest, rows=1))

    def check(self, config: KernelConfig) -> None:
        """Compares the output of `part` with the eager reference's in float32.

        Raises:
            ArithmeticError: it is wrong.
        """
        given = self.part(self.given[self.lengths[0]])
        out = self.run(config, given)[0]
        expected = called(self.module._attend, in_float32(given))
        expected = expected[0] if isinstance(expected, tuple) else expected
        if not (error := relative_error(out, expected)) <= WRONG:
            raise ArithmeticError(f"wrong result: relative error {error:.2g}")

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        """The median time of a call's launches at every length."""
        return self.timed(self.run, config, self.given.values(), self.flops.values(), effort)

    @staticmethod
    def timed(
        run: Callable[..., Any],
        config: KernelConfig,
        given: Iterable[Given],
        flops: Iterable[float],
        effort: dict[str, int],
    ) -> Measurement:
        """The median times of what a function launches."""
        return timed(config, (captured(partial(run, config, x)) for x in given), flops, effort)


class LinearBackwardBench:
    """The forward pass's results for every length, and the module to run backward on them."""

    def __init__(
        self,
        plan: KernelPlan,
        target: str,
        kernel: GradientKernel,
        forward: tuple[ForwardKernel, KernelConfig],
    ) -> None:
        """Runs the forward pass."""
        import torch

        by, config = forward
        self.launcher = kernel.timing(plan).launcher
        self.forward = LinearForwardBench(plan, target, [config], by, kernel)
        self.module, self.linear = self.forward.module, self.forward.linear
        self.given: dict[int, dict[str, Any]] = {}
        for length, given in self.forward.given.items():
            out, *others = self.forward.run(config, given)
            generator = torch.Generator(out.device).manual_seed(1)
            drawn = torch.randn(out.shape, device=out.device, generator=generator)
            found = {**given, "out": out, "g": drawn.to(out.dtype)}
            if self.linear.normalise:
                found |= {"sums": others[0], "grad_sums": torch.zeros_like(others[0])}
            self.given[length] = found
        self.flops = {
            length: self.module._backward_flops(*(given[x].shape for x in "qkv"))
            for length, given in self.given.items()
        }

    def run(self, config: KernelConfig, given: Given) -> tuple[Any, ...]:
        """The gradients of q, k and v, and of decays if calls pass them."""
        return self.forward.launch(self.launcher, config, given)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Compiles the configurations in parallel threads; a failure will recur later."""
        at_once(partial(self.forward._compile, self.run, self.given), configs)

    def check(self, config: KernelConfig) -> None:
        """Compares the gradients of `part` with the eager reference's in float32.

        Raises:
            ArithmeticError: a gradient is wrong.
        """
        given = self.forward.part(self.given[self.forward.lengths[0]])
        names = ["q", "k", "v"] + ["decays"] * self.linear.learned
        found = self.run(config, given)
        exact = in_float32({**given, "grad_out": given["g"]})
        expected = called(self.module._reference_gradients, exact)
        for name, mine, right in zip(names, found, expected, strict=False):
            error = relative_error(mine, right)
            if not error <= (WRONG_SUM if name == "decays" else WRONG):
                raise ArithmeticError(f"wrong gradient of {name}: relative error {error:.2g}")

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        """The median time of a pass's launches at every length."""
        values = self.given.values()
        return self.forward.timed(self.run, config, values, self.flops.values(), effort)


def called(function: Callable[..., Any], given: Given) -> Any:
    """What a function returns for its arguments by name; those that are not given are None."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    return function(**{name: given.get(name) for name in needed})


def in_float32(given: Given) -> dict[str, Any]:
    """The arguments with q, k, v and gradients in float32, in which the reference returns them."""
    names = ("q", "k", "v", "out", "g", "grad_out")
    return {name: x.float() if name in names else x for name, x in given.items()}


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A function that repeats a call's launches, as a CUDA graph.

    A call has up to a dozen: the GPU would wait for each one longer than it computes.
    """
    import torch

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay

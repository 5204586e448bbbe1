"""BackwardBench: a backward kernel's candidates on this machine's GPU, each timed alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.config import KernelConfig
from flashgen.kernels.base import ForwardKernel, GradientKernel
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.tuning.forward_bench import WRONG, ForwardBench, at_once, relative_error, timed
from flashgen.tuning.store import Measurement

if TYPE_CHECKING:
    import torch

# The largest error of a learned tensor's gradient: its sums cancel, but out's rounding does not.
WRONG_SUM = 0.1

# Gradients with a smaller norm consist of rounding alone.
NOTHING = 1e-3


#: The kernel that computes the output before a backward kernel is timed, and its configuration.
Forward = tuple[ForwardKernel, KernelConfig]


class BackwardBench:
    """The forward pass's results for inputs of every length, and the module to run on them.

    A backward pass prepares the kernels' inputs and launches one kernel: the others are disabled.
    """

    def __init__(
        self, plan: KernelPlan, target: str, kernel: GradientKernel, forward: Forward
    ) -> None:
        """Runs the forward pass."""
        import torch

        self.plan, self.timing = plan, kernel.timing(plan)
        self.backward = backward_plan(plan)
        by, config = forward
        self.forward = ForwardBench(plan, target, [config], by, kernel)
        self.module, self.lengths = self.forward.module, self.forward.lengths
        for function in self.timing.others:
            setattr(self.module, function, _PutOut())
        self.launched = []
        for function in filter(self.module.__dict__.__contains__, self.timing.functions):
            self.launched.append(_Noted(getattr(self.module, function)))
            setattr(self.module, function, self.launched[-1])
        self.saved: dict[int, list[torch.Tensor]] = {}
        for length, qkv in self.forward.inputs.items():
            out, lse = self.forward.run(config, length, qkv)
            generator = torch.Generator(out.device).manual_seed(1)
            grad_out = torch.randn(out.shape, device=out.device, generator=generator)
            self.saved[length] = [*qkv, out, lse, grad_out.to(out.dtype), torch.zeros_like(lse)]
        qk, v = plan.qk_head_dim, plan.v_head_dim
        of_qk, of_v = self.timing.products
        share = (of_qk * qk + of_v * v) / (qk + v)
        self.flops = {length: share * flops for length, flops in self.forward.flops.items()}

    def run(self, config: KernelConfig, length: int, saved: Iterable[torch.Tensor]) -> Any:
        """Gradients with one configuration; gradients of other kernels are arbitrary."""
        values = {**config.as_dict(), "USE_TMA": self.forward.use_tma}
        q, k, v, *others = saved
        params = self.forward.params[length].values()
        bits = self.forward.bits(length, (q, k, v))
        given = (q, k, v, self.plan.scale, *params, *bits, *others)
        launch = getattr(self.module, self.timing.launcher)
        return launch(*given, *[values] * self.timing.configurations)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Compiles the configurations in parallel threads; a failure will recur later."""
        shortest = self.lengths[0]
        row = [x[:1, :1, :1] for x in self.saved[shortest]]
        at_once(lambda config: self.run(config, shortest, row), configs)

    def check(self, config: KernelConfig) -> None:
        """Compares one head's gradients with the eager reference's in float32.

        Raises:
            ArithmeticError: a gradient that the kernel makes is wrong.
        """
        length = self.lengths[0]
        saved = [x[:1, :1] for x in self.saved[length]]
        found = self._by_name(self.run(config, length, saved))
        q, k, v, _, _, grad_out, grad_lse = saved
        expected = self.module._reference_gradients(
            *(x.float() for x in (q, k, v)),
            self.plan.scale,
            *self.forward.params[length].values(),
            grad_out.float(),
            grad_lse,
        )
        exact = dict(
            zip(["q", "k", "v", *self.backward.differentiable_tensors], expected, strict=True)
        )
        for name, gradient in found.items():
            error = relative_error(gradient, exact[name], least=NOTHING)
            if not error <= (WRONG if name in "qkv" else WRONG_SUM):
                raise ArithmeticError(f"wrong gradient of {name}: relative error {error:.2g}")

    def _by_name(self, gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients that this kernel alone makes, by name."""
        by_name = dict(zip(("q", "k", "v", *self.backward.score_tensors), gradients, strict=False))
        of_keys = {"k", "v", *(item.tensor for item in self.backward.of_keys.input_gradients)}
        of_queries = {"q", *(item.tensor for item in self.backward.of_queries.input_gradients)}
        others = set() if "queries" in self.timing.makes else of_queries
        others |= set() if "keys" in self.timing.makes else of_keys
        return {name: gradient for name, gradient in by_name.items() if name not in others}

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        """The median time of the kernel alone at every length."""
        return timed(
            config, map(partial(self._launch, config), self.lengths), self.flops.values(), effort
        )

    def _launch(self, config: KernelConfig, length: int) -> Callable[[], Any]:
        """A function that launches the kernel alone, as a pass over a length does."""
        self.run(config, length, self.saved[length])
        steps = [kernel.again() for kernel in self.launched]
        if self.launched[-1] is getattr(self.module, "_place_sums", None):
            # The buffer of sums is cleared first, as `_backward_rows` does in a pass.
            steps.insert(0, self.launched[-1].first_argument.zero_)
        return partial(_in_turn, steps)


def _in_turn(steps: Iterable[Callable[[], Any]]) -> None:
    for step in steps:
        step()


class _Noted:
    """A kernel whose last launch can be repeated by the same thread."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._last = threading.local()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._last.launch = partial(self._kernel[grid], *args, **kwargs)
            self._last.launch()

        return launch

    @property
    def first_argument(self) -> Any:
        """The first argument of the last launch."""
        return self._last.launch.args[0]

    def again(self) -> Callable[[], Any]:
        """A function that repeats the last launch."""
        found: Callable[[], Any] = self._last.launch
        return found


class _PutOut:
    """A kernel that does nothing, in place of a disabled kernel."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

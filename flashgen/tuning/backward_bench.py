"""BackwardBench: a backward kernel's candidates on this machine's GPU, each timed alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.codegen.render import BACKWARD_FUNCTIONS
from flashgen.config import BACKWARD_KERNELS, BackwardKernel, KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.tuning.forward_bench import WRONG, ForwardBench, at_once, timed
from flashgen.tuning.store import Measurement

if TYPE_CHECKING:
    import torch

# The same of a learned tensor's gradient: its sums cancel, and what out was rounded by does not.
WRONG_SUM = 0.1

# Norms below it are of gradients that are nothing but rounding.
NOTHING = 1e-3


class BackwardBench:
    """What a forward pass made of inputs of every length, and the module to run on it.

    A pass makes what the kernels read, and launches one of them: the other is put out.
    """

    def __init__(
        self, plan: KernelPlan, target: str, kernel: BackwardKernel, forward: KernelConfig
    ) -> None:
        """Runs the forward pass, by the portable kernel with its configuration."""
        import torch

        self.plan, self.kernel = plan, kernel
        self.backward = backward_plan(plan)
        self.forward = ForwardBench(plan, target, [forward], "portable")
        self.module, self.lengths = self.forward.module, self.forward.lengths
        for name in BACKWARD_KERNELS:
            function = BACKWARD_FUNCTIONS[name]
            if name == kernel:
                self.launched = _Noted(getattr(self.module, function))
                setattr(self.module, function, self.launched)
            else:
                setattr(self.module, function, _PutOut())
        self.saved: dict[int, list[torch.Tensor]] = {}
        for length, qkv in self.forward.inputs.items():
            out, lse = self.forward.run(forward, length, qkv)
            generator = torch.Generator(out.device).manual_seed(1)
            grad_out = torch.randn(out.shape, device=out.device, generator=generator)
            self.saved[length] = [*qkv, out, lse, grad_out.to(out.dtype), torch.zeros_like(lse)]
        qk, v = plan.qk_head_dim, plan.v_head_dim
        # Of scores and their gradients, then of v and k, or of q.
        share = (2 * qk + 2 * v if kernel == "keys" else 2 * qk + v) / (qk + v)
        self.flops = {length: share * flops for length, flops in self.forward.flops.items()}

    def run(self, config: KernelConfig, length: int, saved: Iterable[torch.Tensor]) -> Any:
        """Gradients with one configuration, those that the other kernel makes being anything."""
        values = {**config.as_dict(), "USE_TMA": self.forward.use_tma}
        q, k, v, *others = saved
        params = self.forward.params[length].values()
        return self.module._backward_kernels(
            q, k, v, self.plan.scale, *params, *others, values, values
        )

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Compiles these at once, each in a thread of its own; one that fails will again later."""
        shortest = self.lengths[0]
        row = [x[:1, :1, :1] for x in self.saved[shortest]]
        at_once(lambda config: self.run(config, shortest, row), configs)

    def check(self, config: KernelConfig) -> None:
        """Holds one head's gradients to those of the eager reference in float32.

        Raises:
            ArithmeticError: one of those that the kernel makes is wrong.
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
        arguments = [a.name for a in self.plan.arguments if a.differentiable]
        exact = dict(zip(["q", "k", "v", *arguments], expected, strict=True))
        for name, gradient in found.items():
            difference = (gradient.float() - exact[name].float()).norm()
            error = (difference / exact[name].float().norm().clamp(min=NOTHING)).item()
            if not error <= (WRONG if name in "qkv" else WRONG_SUM):
                raise ArithmeticError(f"wrong gradient of {name}: relative error {error:.2g}")

    def _by_name(self, gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of the gradients those that the kernel makes."""
        if self.kernel == "keys":
            return {"k": gradients[1], "v": gradients[2]}
        learned = self.backward.score_tensors
        return {"q": gradients[0], **dict(zip(learned, gradients[3:], strict=False))}

    def time(self, config: KernelConfig, effort: dict[str, int]) -> Measurement:
        """The median time of the kernel alone at every length."""
        return timed(
            config, map(partial(self._launch, config), self.lengths), self.flops.values(), effort
        )

    def _launch(self, config: KernelConfig, length: int) -> Callable[[], Any]:
        """What launches the kernel, and nothing besides, as a pass over a length does."""
        self.run(config, length, self.saved[length])
        return self.launched.again()


class _Noted:
    """A kernel that can be launched again just as it was last, by the same thread."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._last = threading.local()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._last.launch = partial(self._kernel[grid], *args, **kwargs)
            self._last.launch()

        return launch

    def again(self) -> Callable[[], Any]:
        """Launches it with the same arguments."""
        found: Callable[[], Any] = self._last.launch
        return found


class _PutOut:
    """In the place of a kernel, one that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

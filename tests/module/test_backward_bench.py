"""The tuner's launches of backward kernels, compiled for Hopper; a GPU of notes stands in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, alibi, causal, t5_bias
from flashgen.config import BACKWARD_KERNELS, BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.kernel import FUNCTIONS as BACKWARD_FUNCTIONS
from flashgen.kernels.backward_triton.kernel import KEYS
from flashgen.kernels.registry import kernels_of
from flashgen.plan import lower
from flashgen.tuning import forward_bench
from flashgen.tuning.backward_bench import BackwardBench
from support.fake_gpu import fake_gpu, module_on
from support.variants import HOPPER_BACKWARD_FUNCTIONS

SPEC = AttentionSpec(64, mask=causal(), score=alibi(Tensor("slopes", ("num_q_heads",))))
FORWARD = KernelConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
CONFIGS = [KernelConfig(BLOCK_M=64, BLOCK_N=n, num_warps=4, num_stages=2) for n in (32, 64)]
LENGTH = 96
FUNCTIONS = ("_backward_rows", *BACKWARD_FUNCTIONS.values(), *HOPPER_BACKWARD_FUNCTIONS)


def random_inputs(plan: Any, length: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 2, length, 64).bfloat16() for _ in range(3))


def measured(gpu: Any, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that a bench of the spec will load, at one length."""
    module = module_on(gpu, spec, monkeypatch)
    monkeypatch.setattr(forward_bench, "load_rendered", lambda *given: module)
    monkeypatch.setattr(forward_bench, "random_inputs", random_inputs)
    monkeypatch.setattr(forward_bench, "usual_lengths", lambda plan: (LENGTH,))
    return module


def bench_of(spec: AttentionSpec, key: str) -> BackwardBench:
    plan = lower(spec, "x")
    kernels = kernels_of(plan)
    return BackwardBench(plan, "sm_90", kernels[key], (kernels["portable"], FORWARD))


@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_what_a_row_compiled_is_what_is_timed(
    monkeypatch: pytest.MonkeyPatch, kernel: BackwardKernel
) -> None:
    """One kernel for each candidate, before the first is timed; the other kernel never."""
    gpu = fake_gpu(monkeypatch)
    module = measured(gpu, SPEC, monkeypatch)
    kernels = {name: getattr(module, BACKWARD_FUNCTIONS[name]) for name in BACKWARD_KERNELS}

    def compiled(name: str) -> int:
        return sum(len(caches[0]) for caches in kernels[name].device_caches.values())

    bench = bench_of(SPEC, KEYS[kernel])
    assert compiled(kernel) == 0
    bench.compile(CONFIGS)
    assert compiled(kernel) == len(CONFIGS)
    before = len(gpu.calls)
    for config in CONFIGS:
        bench._launch(config, LENGTH)()
    assert compiled(kernel) == len(CONFIGS)
    [other] = set(BACKWARD_KERNELS) - {kernel}
    assert compiled(other) == 0
    # Of each candidate: what the rows bring, the kernel, and the kernel again; between the two,
    # what adds sums to elements.
    launched = [call for call in gpu.calls[before:] if "_elements" not in repr(call)]
    assert len(launched) == 3 * len(CONFIGS)
    assert launched[-1] == launched[-2] == gpu.calls[-1] and launched[-2] != launched[-3]


def test_the_gluon_kernel_is_timed_with_what_clears_and_places_its_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = fake_gpu(monkeypatch)
    measured(gpu, SPEC, monkeypatch)
    bench = bench_of(SPEC, "hopper_backward")
    config = KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2)
    bench.compile([config])
    timed = bench._launch(config, LENGTH)
    sums = bench.launched[-1].first_argument
    assert sums.dtype == torch.float32 and sums.shape[-1] == 32
    sums.fill_(1.0)
    before = len(gpu.calls)
    timed()
    assert not sums.any()
    names = [name for call in gpu.calls[before:] for name in FUNCTIONS if name in repr(call)]
    assert names == ["_backward_hopper", "_place_sums"]
    # Five products of the size of the forward pass's two.
    (flops,) = bench.flops.values()
    assert flops == 2.5 * bench.forward.flops[LENGTH]


def test_two_gluon_kernels_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add nothing up that would have to be cleared."""
    spec = AttentionSpec(64, mask=causal(), deterministic=True)
    gpu = fake_gpu(monkeypatch)
    measured(gpu, spec, monkeypatch)
    bench = bench_of(spec, "hopper_backward")
    config = KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2)
    bench.compile([config])
    timed = bench._launch(config, LENGTH)
    before = len(gpu.calls)
    timed()
    names = [name for call in gpu.calls[before:] for name in FUNCTIONS if name in repr(call)]
    assert names == ["_backward_hopper", "_backward_queries_hopper"]


def test_beside_the_portable_kernel_over_queries_it_is_timed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the one over keys is, in whose place it runs: the other has a form of its own."""
    spec = AttentionSpec(256, mask=causal(), score=t5_bias(bidirectional=False))
    gpu = fake_gpu(monkeypatch)
    module = measured(gpu, spec, monkeypatch)
    kernel = module._backward_of_queries
    bench = bench_of(spec, "hopper_backward")
    config = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=2)
    bench.compile([config])
    assert not any(caches[0] for caches in kernel.device_caches.values())
    timed = bench._launch(config, LENGTH)
    before = len(gpu.calls)
    timed()
    names = [name for call in gpu.calls[before:] for name in FUNCTIONS if name in repr(call)]
    assert names == ["_backward_hopper"]
    # Four products, and what is checked are the gradients that they make.
    (flops,) = bench.flops.values()
    assert flops == 2 * bench.forward.flops[LENGTH]
    saved = bench.saved[LENGTH]
    assert set(bench._by_name(bench.run(config, LENGTH, saved))) == {"k", "v"}

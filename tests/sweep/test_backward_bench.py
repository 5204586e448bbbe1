"""What the tuner does with a backward kernel: it runs it alone, and finds what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    additive_bias,
    alibi,
    causal,
    document,
    relative_bias,
    softmax,
)
from flashgen.config import BACKWARD_KERNELS, BackwardKernel, KernelConfig
from flashgen.kernels import workload
from flashgen.kernels.backward_triton.kernel import KEYS
from flashgen.kernels.registry import kernels_of
from flashgen.plan import lower
from flashgen.plan.backward import ROWS
from flashgen.tuning import backward_bench, forward_bench
from flashgen.tuning.backward_bench import BackwardBench
from support.variants import rendered_module

CONFIG = KernelConfig(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=2)
LENGTHS = (20, 33)
SLOPES = Tensor("slopes", ("num_q_heads",))
SINKS = Tensor("sinks", ("num_q_heads",), "bfloat16")

BIAS = Tensor("bias", ("batch", 1, 1, "kv_len"))

SPECS = {
    "causal": AttentionSpec(16, mask=causal()),
    "documents": AttentionSpec((32, 16), mask=document() & causal()),
    "slopes": AttentionSpec(16, mask=causal(), score=alibi(SLOPES), normaliser=softmax(sink=SINKS)),
    "bias": AttentionSpec(16, mask=causal(), score=relative_bias(8)),
    "bias_of_keys": AttentionSpec(16, mask=causal(), score=additive_bias(BIAS)),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a few tokens, of the CPU."""

    def random_inputs(plan: Any, length: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        dims = (plan.qk_head_dim, plan.qk_head_dim, plan.v_head_dim)
        shapes = ((2, 2, length, dim) for dim in dims)
        return tuple(torch.randn(s, generator=generator).bfloat16() for s in shapes)

    monkeypatch.setattr(forward_bench, "random_inputs", random_inputs)
    # The interpreter reads a kernel's source when it runs it: the module's file has to stay.
    monkeypatch.setattr(
        forward_bench, "load_rendered", lambda plan, *given: rendered_module(plan.spec)
    )
    monkeypatch.setattr(forward_bench, "usual_lengths", lambda plan: LENGTHS)
    monkeypatch.setattr(workload, "DOCUMENT", 11)
    monkeypatch.setattr(workload, "TYPICAL", 9)


def bench_of(name: str, kernel: BackwardKernel) -> BackwardBench:
    plan = lower(SPECS[name], name)
    kernels = kernels_of(plan)
    return BackwardBench(plan, "sm_80", kernels[KEYS[kernel]], (kernels["portable"], CONFIG))


@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", SPECS)
def test_a_right_kernel_passes(small: None, name: str, kernel: BackwardKernel) -> None:
    bench = bench_of(name, kernel)
    bench.compile([CONFIG])
    bench.check(CONFIG)


@pytest.mark.parametrize(
    ("name", "kernel", "at", "wrong"),
    [
        ("causal", "keys", 1, "k"),
        ("causal", "keys", 2, "v"),
        ("causal", "queries", 0, "q"),
        ("slopes", "queries", 3, "slopes"),
        ("bias", "queries", 3, "relative_bias"),
        ("bias_of_keys", "keys", 3, "bias"),
    ],
)
def test_a_wrong_gradient_is_found(
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kernel: BackwardKernel,
    at: int,
    wrong: str,
) -> None:
    bench = bench_of(name, kernel)
    whole = bench.module._backward_kernels

    def changed(*given: Any) -> tuple[torch.Tensor, ...]:
        gradients = whole(*given)
        if given[0].dtype == torch.float32:  # as it calls itself in the interpreter
            gradients[at].mul_(1.2)
        return gradients

    monkeypatch.setattr(bench.module, "_backward_kernels", changed)
    with pytest.raises(ArithmeticError, match=f"wrong gradient of {wrong}: relative error 0.2"):
        bench.check(CONFIG)


def test_no_number_is_wrong(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("causal", "keys")
    monkeypatch.setattr(
        bench.module,
        "_backward_kernels",
        lambda *given: [torch.full((1, 1, 20, 16), torch.nan)] * 3,
    )
    with pytest.raises(ArithmeticError, match="wrong gradient of k: relative error nan"):
        bench.check(CONFIG)


@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_the_kernel_is_timed_alone(
    small: None, monkeypatch: pytest.MonkeyPatch, kernel: BackwardKernel
) -> None:
    """The launch that a pass over each length makes, again and again, and no other."""
    bench = bench_of("slopes", kernel)
    launches: list[tuple[str, int]] = []

    class Counted:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                launches.append((self.name, grid[0]))
                self.inner[grid](*args, **kwargs)

            return launch

    [noted] = bench.launched
    monkeypatch.setattr(noted, "_kernel", Counted(kernel, noted._kernel))
    monkeypatch.setattr(
        bench.module, "_backward_rows", Counted("rows", bench.module._backward_rows)
    )

    def do_bench(call: Callable[[], Any], return_mode: str, **effort: int) -> float:
        assert effort == {"warmup": 1, "rep": 2}
        before = len(launches)
        call()
        call()
        assert [name for name, _ in launches[before:]] == [kernel, kernel]
        return 2.0

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    measured = bench.time(CONFIG, {"warmup": 1, "rep": 2})
    tile = CONFIG.BLOCK_N if kernel == "keys" else CONFIG.BLOCK_M
    grids = [-(-length // tile) * 4 for length in LENGTHS]
    assert launches == [
        launch
        for length, grid in zip(LENGTHS, grids, strict=True)
        for launch in [("rows", -(-length // ROWS) * ROWS // 32 * 4), *[(kernel, grid)] * 3]
    ]
    # Four products of the forward pass's size, or three.
    products = 4 if kernel == "keys" else 3
    flops = [2 * 16 * products * 4 * n * (n + 1) // 2 for n in LENGTHS]
    assert measured.ms == (2.0, 2.0)
    assert measured.tflops == pytest.approx([work / 2.0 / 1e9 for work in flops])


def test_tolerances_are_of_bfloat16() -> None:
    assert backward_bench.WRONG < backward_bench.WRONG_SUM <= 0.1

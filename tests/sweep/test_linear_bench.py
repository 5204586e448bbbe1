"""What the tuner does with linear attention: it runs a pass, and finds what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    favor,
    full,
    identity,
    linear,
    sliding_window,
)
from flashgen.config import KernelConfig
from flashgen.kernels import workload
from flashgen.kernels.registry import kernels_of
from flashgen.tuning import forward_bench, linear_bench
from flashgen.tuning.backward_bench import BackwardBench
from flashgen.tuning.forward_bench import ForwardBench
from flashgen.tuning.linear_bench import LinearBackwardBench, LinearForwardBench
from support.variants import lowered, rendered_module

CONFIG = KernelConfig(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)
LENGTHS = (40, 33)
LAUNCHERS = ("_launch", "_launch_gradients")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
OF_FEATURES = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 16))
MATRIX = Tensor("matrix", ("num_q_heads", 16, 16))

SPECS = {
    "elu": AttentionSpec(16, mask=causal(), normaliser=linear(elu_plus_one())),
    "signed": AttentionSpec((16, 32), mask=full(), normaliser=linear(identity())),
    "token": AttentionSpec(
        16, mask=causal(), normaliser=linear(identity(), decay=DECAY, normalise=False)
    ),
    "features": AttentionSpec(
        16, mask=causal(), normaliser=linear(elu_plus_one(), decay=OF_FEATURES)
    ),
    "heads": AttentionSpec(
        16, mask=causal(), normaliser=linear(elu_plus_one(), decay=(-0.5, 0.0, -0.1))
    ),
    "documents": AttentionSpec(16, mask=document() & causal(), normaliser=linear(elu_plus_one())),
    "chunks": AttentionSpec(
        16, mask=causal() & chunked(Int("size", min=1)), normaliser=linear(elu_plus_one())
    ),
    "favor": AttentionSpec(16, mask=causal(), normaliser=linear(favor(16))),
    "matrix": AttentionSpec(16, mask=causal(), normaliser=linear(lambda x: x @ MATRIX)),
}

#: Rows that see no key, or are none.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WINDOW = sliding_window(9, 0)

#: Kernels over pairs, which are dense kernels, and one of projected keys.
DENSE = {
    "elu": AttentionSpec(16, mask=WINDOW, normaliser=linear(elu_plus_one())),
    "signed": AttentionSpec(16, mask=WINDOW, normaliser=linear(identity())),
    "decays": AttentionSpec(
        16, mask=WINDOW, normaliser=linear(identity(), decay=DECAY, normalise=False)
    ),
    "favor": AttentionSpec(16, mask=WINDOW, normaliser=linear(favor(32))),
    "documents": AttentionSpec(16, mask=document(), normaliser=linear(elu_plus_one())),
    "linformer": AttentionSpec(16, mask=full(), linformer=24),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a few tokens, of the CPU."""
    normal = torch.randn

    def randn(*given: Any, device: str = "cpu", **options: Any) -> torch.Tensor:
        return normal(*given, device="cpu", **options)

    monkeypatch.setattr(torch, "randn", randn)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(workload, "TOKENS", 80)
    monkeypatch.setattr(workload, "MODEL_WIDTH", 48)
    monkeypatch.setattr(workload, "DOCUMENT", 11)
    monkeypatch.setattr("flashgen.plan.typical.TYPICAL", 9)
    # The interpreter reads a kernel's source when it runs it: the module's file has to stay.
    for bench in (forward_bench, linear_bench):
        monkeypatch.setattr(bench, "load_rendered", lambda plan, *_: rendered_module(plan.spec))
        monkeypatch.setattr(bench, "usual_lengths", lambda plan: LENGTHS)


def benches(spec: AttentionSpec, name: str) -> tuple[LinearForwardBench, LinearBackwardBench]:
    plan = lowered(spec, name)
    forward, gradients = kernels_of(plan).values()
    return (
        LinearForwardBench(plan, "sm_80", [CONFIG], forward),
        LinearBackwardBench(plan, "sm_80", gradients, (forward, CONFIG)),
    )


@pytest.mark.parametrize("name", SPECS)
def test_right_passes_pass(name: str) -> None:
    for bench in benches(SPECS[name], name):
        bench.compile([CONFIG])
        bench.check(CONFIG)


def test_long_chunks_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 rows, which are measured alone: a kernel that forgets the state between is wrong."""
    monkeypatch.setattr(linear_bench, "usual_lengths", lambda plan: (300,))
    monkeypatch.setattr(workload, "TOKENS", 300)
    monkeypatch.setattr(workload, "MODEL_WIDTH", 16)
    bench, _ = benches(SPECS["elu"], "elu")
    bench.check(KernelConfig(128, 128, 4, 2))


@pytest.mark.parametrize(
    ("name", "at", "wrong"),
    [("token", None, "result"), ("elu", 0, "gradient of q"), ("token", 3, "gradient of decays")],
)
def test_what_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, at: int | None, wrong: str
) -> None:
    """A bench that compares nothing, or not this tensor, or no element of it, finds nothing."""
    bench = benches(SPECS[name], name)[at is not None]
    whole = bench.run

    def changed(config: KernelConfig, given: Any) -> tuple[torch.Tensor, ...]:
        found = list(whole(config, given))
        found[at or 0] *= 1.2
        return tuple(found)

    monkeypatch.setattr(bench, "run", changed)
    with pytest.raises(ArithmeticError, match=f"wrong {wrong}: relative error 0.2"):
        bench.check(CONFIG)


def test_a_pass_is_timed_with_all_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench that times one length, one kernel or the other pass has other numbers."""
    calls = list[tuple[str, int, KernelConfig]]()

    def do_bench(call: Callable[[], Any], return_mode: str, **effort: int) -> float:
        assert effort == {"warmup": 1, "rep": 2} and return_mode == "median"
        call()
        return 0.5

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    monkeypatch.setattr(linear_bench, "captured", lambda call: call)
    launch = LinearForwardBench.launch

    def noted(self: Any, launcher: str, config: KernelConfig, given: Any) -> Any:
        calls.append((launcher, given["q"].shape[2], config))
        return launch(self, launcher, config, given)

    pair = benches(SPECS["elu"], "elu")
    monkeypatch.setattr(LinearForwardBench, "launch", noted)
    for bench, launcher in zip(pair, LAUNCHERS, strict=True):
        measured = bench.time(CONFIG, {"warmup": 1, "rep": 2})
        assert measured.config == CONFIG and measured.ms == (0.5, 0.5)
        # Of each query: its product with the state, one with 64 keys twice, and its key's part.
        products = (4 * 16 * 16 + 2 * 64 * 32) * (1 if launcher == "_launch" else 3)
        tokens = [80 // length * 3 * length for length in LENGTHS]
        assert measured.tflops == pytest.approx([products * n / 0.5 / 1e9 for n in tokens])
    assert calls == [(launcher, length, CONFIG) for launcher in LAUNCHERS for length in LENGTHS]


@pytest.mark.parametrize("name", DENSE)
def test_kernels_over_pairs_get_features(name: str) -> None:
    """And projected keys: of vectors in their place the oracle says something else."""
    plan = lowered(DENSE[name], name)
    kernels = kernels_of(plan)
    config = KernelConfig(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)
    bench = ForwardBench(plan, "sm_80", [config], kernels["portable"])
    bench.check(config)
    for key in ("backward_keys", "backward_queries"):
        BackwardBench(plan, "sm_80", kernels[key], (kernels["portable"], config)).check(config)
    q, k, _ = bench.inputs[LENGTHS[0]]
    features = 32 if name == "favor" else 16
    assert q.shape[2:] == (40, features)
    assert k.shape[2:] == (24 if name == "linformer" else 40, features)

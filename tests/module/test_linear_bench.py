"""The tuner's launches of linear attention on a GPU of notes: what compiles them, and when."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, causal, elu_plus_one, linear
from flashgen.codegen.module import render_module
from flashgen.config import ChosenConfig, KernelChoice, KernelConfig
from flashgen.kernels import workload
from flashgen.kernels.registry import kernels_of
from flashgen.plan import lower
from flashgen.tuning import linear_bench
from flashgen.tuning.linear_bench import LinearBackwardBench, LinearForwardBench
from support.fake_gpu import fake_gpu, to_ir_alone
from support.variants import imported

CONFIG = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)

#: Of the shorter one all heads together fill an H200 with a segment each, of the longer one not.
LENGTHS, HEADS, SMS = (2048, 8192), 32, 132


def loaded(plan: Any, target: str, config: KernelConfig, *held: Any) -> ModuleType:
    """The module that a bench loads, which takes tensors of the CPU for those of a GPU."""
    choice = KernelChoice({target: ChosenConfig(config, source="model", shared=0)})
    text = render_module(plan, {kernel.key: choice for kernel in held})
    module = imported("linear_bench", re.sub(r"\b(q|x)\.is_cuda\b", "True", text))
    names = {"_is_elsewhere": False, "_target": target, "_multiprocessors": SMS}
    for name, answer in names.items():
        setattr(module, name, lambda x, answer=answer: answer)
    return module


def test_what_parts_of_calls_compile_is_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a row alone, calls of one segment would be compiled while they are timed."""
    fake_gpu(monkeypatch)
    translated = to_ir_alone(monkeypatch)
    normal, generator = torch.randn, torch.Generator
    monkeypatch.setattr(torch, "randn", lambda *sizes, device, **rest: normal(*sizes, **rest))
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(linear_bench, "load_rendered", loaded)
    monkeypatch.setattr(linear_bench, "usual_lengths", lambda plan: LENGTHS)
    monkeypatch.setattr(workload, "TOKENS", LENGTHS[1])
    monkeypatch.setattr(workload, "MODEL_WIDTH", HEADS * 16)
    plan = lower(AttentionSpec(16, mask=causal(), normaliser=linear(elu_plus_one())), "x")
    forward, gradients = kernels_of(plan).values()
    benches = [
        LinearForwardBench(plan, "sm_90", [CONFIG], forward),  # type: ignore[arg-type]
        LinearBackwardBench(plan, "sm_90", gradients, (forward, CONFIG)),  # type: ignore[arg-type]
    ]
    for bench in benches:
        translated.clear()
        bench.compile([CONFIG])
        assert translated
        translated.clear()
        for given in bench.given.values():
            bench.run(CONFIG, given)
        assert translated == []

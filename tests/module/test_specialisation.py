"""One compile serves every length, head count and parameter: Triton's own keys say so."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from flashgen import Float, Int
from flashgen.kernels.workload import typical_params
from flashgen.plan import KernelPlan, lower
from support.cases import Case
from support.contract import native_inputs
from support.specialised import watch
from support.variants import rendered_module, shipped_specs

SPECS = shipped_specs()

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 256, 300, 333, 400, 512, 513, 640)
INTS = (1, 2, 5, 16, 100, 1024, 2**30)
FLOATS = (1, 2.5, 16, 30.0, 31)  # numbers without a fraction are often written as int


@functools.cache
def _plan(name: str) -> KernelPlan:
    return lower(SPECS[name], name)


def _parameters(name: str, q: torch.Tensor, turn: int) -> dict[str, Any]:
    """Of which every call has others."""
    values = typical_params(_plan(name), q)
    for param in SPECS[name].params:
        if isinstance(param, Int):
            values[param.name] = max(param.min, INTS[turn % len(INTS)])
        if isinstance(param, Float):
            values[param.name] = FLOATS[turn % len(FLOATS)]
    return values


@pytest.mark.parametrize("name", SPECS)
def test_one_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    kernel = watch(module, monkeypatch)
    if hasattr(module, "_find_rows"):
        watch(module, monkeypatch, "_find_rows")
    monkeypatch.setattr(module.triton.knobs.runtime, "interpret", True)  # to launch without a GPU
    for tma in (False, True):
        config = {**module.CONFIGS["sm_90"], "USE_TMA": tma}
        monkeypatch.setattr(module, "_config", lambda device, config=config: config)
        for turn, length in enumerate(LENGTHS):
            heads = (1, 2, 4, 16)[turn % 4]
            case = Case(length, length, batch=turn % 3 + 1, q_heads=heads, kv_heads=heads)
            tensors = native_inputs(case, spec)
            scale = (None, 0.3, 1)[turn % 3]
            module.attention(*tensors, scale=scale, **_parameters(name, tensors[0], turn))
        assert len(kernel.keys) == 1 + tma, "\n".join(sorted(kernel.keys))


def test_a_second_compile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that Triton may specialise on a parameter."""

    def specialise(source: str) -> str:
        assert ', "left"]' in source, "the kernel no longer reads so: bring this test up to date"
        return source.replace(', "left"]', "]")

    spec = SPECS["window_d128"]
    module = rendered_module(spec, edit_source=specialise)
    kernel = watch(module, monkeypatch)
    tensors = native_inputs(Case(32, 32), spec)
    for left in INTS:
        module._launch(*tensors, 0.1, left, module.CONFIGS["sm_90"])
    assert len(kernel.keys) == 3  # for 1, for multiples of 16, and for the others

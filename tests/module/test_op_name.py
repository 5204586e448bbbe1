"""What the operator is called, and what becomes of modules that call theirs the same."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flashgen
from flashgen import AttentionSpec, Constant, Float, Mask, alibi, causal, full, softmax
from flashgen.codegen.module import render_module
from flashgen.config import ChosenConfig, KernelChoice, KernelConfig
from flashgen.plan import lower
from support.cases import Case
from support.contract import native_inputs
from support.oracle import check
from support.variants import (
    any_backward,
    any_hopper,
    any_hopper_backward,
    shipped_module,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

ONE, WIDE = KernelConfig(32, 16, 4, 2), KernelConfig(64, 16, 4, 2)
CASE = Case(10, 10, batch=2, q_heads=4, kv_heads=2)


def _source(
    spec: AttentionSpec, name: str, config: KernelConfig = ONE, tflops: float | None = None
) -> str:
    plan = lower(spec, name)
    one = ChosenConfig(config, "model" if tflops is None else "measured", 4096, tflops=tflops)
    chosen = dict.fromkeys(plan.targets, one)
    held = {"portable": KernelChoice(chosen)} | any_backward(plan)
    return render_module(plan, held | any_hopper(plan) | any_hopper_backward(plan))


def _op_of(spec: AttentionSpec, *how: Any) -> str:
    op, backward = re.findall(r'"flashgen::(\w+)"', _source(spec, "same", *how))
    assert re.fullmatch(r"same_[0-9a-f]{8}", op) and backward == f"{op}_backward"
    return op


def test_it_is_called_by_what_it_computes() -> None:
    def slopes(*elements: float) -> Any:
        return alibi(Constant("slopes", elements, dims=("num_q_heads",)))

    def biased(label: str = "bias", **how: Any) -> Any:
        return flashgen.Score(lambda score, b, h, q, k: score + Float(label, **how), "biased")

    specs = [
        AttentionSpec(64, mask=causal()),
        AttentionSpec((64, 32), mask=causal()),
        AttentionSpec(64, "float16", mask=causal()),
        AttentionSpec(64, "float32", mask=causal()),
        AttentionSpec(64, "float32", mask=causal(), input_precision="tf32"),
        AttentionSpec(64, mask=causal(), deterministic=True),
        AttentionSpec(64, mask=causal(), dropout=True),
        AttentionSpec(64, mask=causal(align="top_left")),
        AttentionSpec(64, mask=full()),
        AttentionSpec(64, mask=causal(), normaliser=softmax(sink=1.0)),
        AttentionSpec(64, mask=causal(), score=slopes(0.5, 1.0)),
        AttentionSpec(64, mask=causal(), score=slopes(0.25, 1.0)),
        AttentionSpec(64, mask=causal(), score=biased()),
        AttentionSpec(64, mask=causal(), score=biased("offset")),
    ]
    assert len({_op_of(spec) for spec in specs}) == len(specs)


def test_every_build_of_a_spec_has_it() -> None:
    """Whatever it is for, however it was tuned, and by whichever words it was written."""
    spec = AttentionSpec(64, mask=causal(align="top_left"))
    written = Mask(lambda b, h, q, k: q >= k, "other words")
    builds = [
        AttentionSpec(64, mask=causal(align="top_left"), targets=("sm_90",)),
        AttentionSpec(64, mask=causal(align="top_left"), targets=("sm_80", "gfx942")),
        AttentionSpec(64, mask=causal(), align="top_left"),
        AttentionSpec([64, 64], mask=causal(align="top_left"), scale=0.5, name="same"),
        AttentionSpec(64, mask=causal(align="top_left"), blocks=flashgen.Blocks(BLOCK_M=64)),
        AttentionSpec(64, mask=written),
    ]
    names = {_op_of(spec), _op_of(spec, WIDE), _op_of(spec, ONE, 500.0), *map(_op_of, builds)}
    assert len(names) == 1
    exact = AttentionSpec(64, "float32", mask=causal(), input_precision="ieee")
    assert _op_of(exact) == _op_of(AttentionSpec(64, "float32", mask=causal()))


def test_a_shipped_module_says_it() -> None:
    """Nobody who has exported a program wants these to change."""
    module = shipped_module("causal_d64")
    assert module.op is getattr(torch.ops.flashgen, module.op.name().split("::")[1]).default
    assert module.op.name().startswith("flashgen::causal_d64_")
    assert module.op_backward.name() == f"{module.op.name()}_backward"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules as they stand in folders, with operators of their own names."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def load(folder: str, spec: AttentionSpec, name: str, *how: Any) -> ModuleType:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(_source(spec, name, *how))
        importlib.invalidate_caches()
        return importlib.import_module(f"{folder}.{name}")

    yield load
    for name in set(sys.modules) - known:
        if name.endswith(("twins", "namesakes")):
            del sys.modules[name]


def _holds(module: ModuleType, attention: Any, spec: AttentionSpec) -> None:
    """Fails unless a call, and the gradients of the module's operator, are right."""
    q, k, v = native_inputs(CASE, spec)
    out, lse = attention(q, k, v)
    check(out, lse, (q, k, v), spec, CASE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attention(*leaves)[0].float().square().sum(), leaves)
    right = module.reference(*leaves).float().square().sum()
    for mine, exact in zip(grads, torch.autograd.grad(right, leaves), strict=True):
        torch.testing.assert_close(mine, exact)


def _ways(module: ModuleType) -> list[Any]:
    """By the module, by its operator, and compiled."""

    def attention(*tensors: torch.Tensor) -> Any:
        return module.attention(*tensors, return_lse=True)

    torch._dynamo.reset()
    return [
        attention,
        lambda *tensors: module.op(*tensors, 16**-0.5),
        torch.compile(attention, backend="aot_eager", fullgraph=True),
    ]


def test_copies_of_a_module_share_the_first_one_s(load: Any, monkeypatch: Any) -> None:
    """One was built for other GPUs, with other tiles: what the first is held by goes on."""
    spec = AttentionSpec(16, "float32", mask=causal())
    first = load("first_copy", spec, "twins")
    held, ways = first.op, _ways(first)
    for way in ways:
        _holds(first, way, spec)
    other = AttentionSpec(16, "float32", mask=causal(), targets=("sm_80",))
    second = load("second_copy", other, "twins", WIDE)
    assert second.op is first.op is held and second.op_backward is first.op_backward
    assert first.CONFIGS != second.CONFIGS
    for way in (*ways, *_ways(second), lambda *tensors: held(*tensors, 16**-0.5)):
        _holds(first, way, spec)
    tensors = native_inputs(CASE, spec)
    torch.library.opcheck(second.op, (*tensors, 0.25))

    # Its own kernels are what a copy's eager calls run, and the first's what the operator does.
    ran = []
    for module in (first, second):
        forward = module._forward
        monkeypatch.setattr(
            module, "_forward", lambda *x, of=module, run=forward: (ran.append(of), run(*x))[1]
        )
    second.attention(*tensors)
    second.op(*tensors, 0.25)
    assert ran == [second, first]


def test_variants_of_one_name_have_one_each(load: Any) -> None:
    specs = [AttentionSpec(16, "float32", mask=mask) for mask in (causal(), full())]
    modules = [load(f"namesake_{i}", spec, "namesakes") for i, spec in enumerate(specs)]
    assert modules[0].op is not modules[1].op
    for module, spec in zip(modules, specs, strict=True):
        for way in _ways(module):
            _holds(module, way, spec)


def test_a_module_that_is_loaded_anew_runs_its_new_code(tmp_path: Path, monkeypatch: Any) -> None:
    """As after a rebuild, in a notebook: the operator goes with the module that has it."""
    monkeypatch.syspath_prepend(tmp_path)
    source = _source(AttentionSpec(16, "float32", mask=causal()), "rebuilt_variant")
    file = tmp_path / "rebuilt_variant.py"
    file.write_text(source)
    module = importlib.import_module("rebuilt_variant")
    op, (q, k, v) = module.op, native_inputs(CASE, AttentionSpec(16, "float32"))
    before = op(q, k, v, 0.25)[0]
    file.write_text(
        f"{source}\n\n_old = _forward\n\n\ndef _forward(*x):\n"
        "    out, lse = _old(*x)\n    return 2 * out, lse\n"
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    assert importlib.reload(module).op is op
    torch.testing.assert_close(op(q, k, v, 0.25)[0], 2 * before)
    del sys.modules["rebuilt_variant"]

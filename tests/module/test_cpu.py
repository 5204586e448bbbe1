"""A module on a machine without a GPU, and what it leans on."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings

import pytest
import torch

from flashgen import AttentionSpec, causal
from support.cases import LAYOUTS, Case
from support.contract import check_gradients, native_inputs
from support.oracle import check
from support.variants import (
    GENERATED,
    rendered_module,
    shipped_module,
    shipped_module_anew,
    shipped_specs,
)

SPECS = shipped_specs()
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

CASES = [
    Case(1, 1),
    Case(33, 33, batch=2, q_heads=4, kv_heads=2, scale=0.3),
    *(Case(9, 9, batch=2, q_heads=2, kv_heads=2, layout=layout) for layout in LAYOUTS),
    Case(0, 0),
    Case(6, 6, batch=0),
    Case(7, 20),
    Case(20, 7),
    Case(5, 0, batch=2),
    Case(0, 5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_reference_answers_for_cpu_tensors(name: str, case: Case) -> None:
    module, spec = shipped_module(name), SPECS[name]
    tensors, params = native_inputs(case, spec), case.arguments(spec)
    if spec.equal_lengths and case.q_len != case.kv_len:
        with pytest.raises(ValueError, match="equal lengths only"):
            module.attention(*tensors, **params)
        return
    out, lse = module.attention(*tensors, return_lse=True, scale=case.scale, **params)
    check(out, lse, tensors, spec, case)
    assert torch.equal(module.attention(*tensors, scale=case.scale, **params), out)


@pytest.mark.parametrize("left", [0, 1, 5, 100])
def test_parameters_reach_the_mask(left: int) -> None:
    case = Case(30, 41, params={"left": left})
    tensors = native_inputs(case, SPECS["window_d128"])
    out, lse = shipped_module("window_d128").attention(*tensors, return_lse=True, left=left)
    check(out, lse, tensors, SPECS["window_d128"], case)


def test_gradients_of_scores_that_leave_the_products_out() -> None:
    spec = AttentionSpec(16, "float32", causal(), lambda s, b, h, q, kv: 0.1 * (kv - q))
    check_gradients(rendered_module(spec), spec, Case(21, 21, batch=2, q_heads=4, kv_heads=2))


def test_the_fallback_is_said_once() -> None:
    module = shipped_module_anew("causal_d64")  # one that has not said it yet
    tensors = native_inputs(Case(4, 4), SPECS["causal_d64"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            module.attention(*tensors)
    assert [str(warning.message) for warning in said] == [
        "causal_d64: tensors on cpu run the eager reference, by tiles of queries"
    ]
    assert said[0].filename == __file__


def test_the_reference_keeps_to_its_precision_under_autocast() -> None:
    module, spec = shipped_module("causal_fp32_d64"), SPECS["causal_fp32_d64"]
    tensors = native_inputs(Case(12, 12), spec)
    right = module.attention(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.attention(*tensors), right)
        assert torch.equal(module.reference(*tensors), right)


@pytest.mark.parametrize("name", SPECS)
def test_a_module_imports_torch_and_triton_only(name: str) -> None:
    tree = ast.parse((GENERATED / f"{name}.py").read_text())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"torch", "triton"}


def test_a_module_runs_where_flashgen_is_not() -> None:
    """Copied anywhere, it works on torch and triton alone."""
    script = (
        "import sys\n"
        "sys.modules['flashgen'] = None\n"  # importing it raises
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('module', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "import torch\n"
        "x = torch.ones(1, 1, 3, 64, dtype=torch.bfloat16)\n"
        "assert torch.equal(module.attention(x, x, x), x)\n"
    )
    command = [sys.executable, "-I", "-W", "ignore", "-c", script, str(GENERATED / "causal_d64.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

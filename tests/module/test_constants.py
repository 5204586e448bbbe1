"""Tensors that a module holds: no argument, made once for each device, and for some calls alone."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen import (
    AttentionSpec,
    Constant,
    Int,
    Tensor,
    alibi,
    bigbird,
    block_sparse,
    causal,
    random_blocks,
    softmax,
)
from support.cases import Case
from support.contract import check_compiled, check_gradients, native_inputs
from support.oracle import check
from support.turns import some
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

CPU = torch.device("cpu")
TABLES = [[[i * j % 3 < 2 - h % 2 for j in range(5)] for i in range(4)] for h in range(4)]
SLOPES = Constant("slopes", [0.5, 0.1, 0.02, 0.003], "bfloat16", dims=("num_q_heads",))

SPECS = {
    "layout": AttentionSpec(16, "float32", mask=block_sparse(TABLES[0], 64)),
    "layouts and slopes": AttentionSpec(
        16,
        "float32",
        mask=causal(align="top_left") & block_sparse(TABLES, 64),
        score=alibi(SLOPES, align="top_left"),
        normaliser=softmax(sink=SLOPES),
    ),
    "run-time step": AttentionSpec(16, "float16", mask=block_sparse(TABLES, Int("size", min=1))),
}
MODULES = {name: rendered_module(spec, name="tiny") for name, spec in SPECS.items()}


@pytest.mark.parametrize("name", ["layout", "layouts and slopes"])
def test_neither_the_call_nor_the_op_takes_it(name: str) -> None:
    module = MODULES[name]
    for function in (module.attention, module.reference):
        assert list(inspect.signature(function).parameters) == [
            "q",
            "k",
            "v",
            "scale",
            "return_lse",
        ]
    [schema] = (str(module.op._schema),)
    assert schema.endswith("(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")


@pytest.mark.parametrize("lengths", [(256, 256), (200, 320), (1, 1), (130, 64)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_values(name: str, lengths: tuple[int, int]) -> None:
    case = Case(*lengths, batch=2, q_heads=4, kv_heads=2, params={"size": 64})
    tensors = native_inputs(case, SPECS[name])
    given = case.arguments(SPECS[name])
    out, lse = MODULES[name].attention(*tensors, return_lse=True, **given)
    check(out, lse, tensors, SPECS[name], case)


def test_it_computes_what_the_layout_as_an_argument_does() -> None:
    passed = rendered_module(AttentionSpec(16, "float32", mask=block_sparse(block=64)))
    known = rendered_module(AttentionSpec(16, "float32", mask=block_sparse(TABLES, 64)))
    tensors = native_inputs(Case(200, 300, q_heads=4, kv_heads=2), SPECS["layout"])
    layout = torch.tensor(TABLES)
    assert torch.equal(known.attention(*tensors), passed.attention(*tensors, layout=layout))


def test_random_blocks_drawn_when_it_is_built() -> None:
    drawn = random_blocks(2, 96, 16, 2, generator=torch.Generator().manual_seed(0))
    spec = AttentionSpec(16, "float32", mask=bigbird(16, random=drawn))
    passed = rendered_module(AttentionSpec(16, "float32", mask=bigbird(16)))
    tensors = native_inputs(Case(90, 90, q_heads=2, kv_heads=2), spec)
    expected = passed.attention(*tensors, random_blocks=drawn)
    assert torch.equal(rendered_module(spec).attention(*tensors), expected)


HEADS_4 = {"batch": 1, "q_heads": 4, "kv_heads": 4}
REFUSED = [
    ("layout", Case(257, 100), "q: got q_len 257; layout of tiny is for at most 256"),
    ("layout", Case(100, 321), "k: got kv_len 321; layout of tiny is for at most 320"),
    ("layouts and slopes", Case(5, 5, 1, 2, 1), "q: got 2 heads; layout of tiny is for 4"),
    (
        "run-time step",
        Case(41, 41, **HEADS_4, params={"size": 10}),
        "q: got q_len 41; layout of tiny is for at most 40",
    ),
    (
        "run-time step",
        Case(40, 51, **HEADS_4, params={"size": 10}),
        "k: got kv_len 51; layout of tiny is for at most 50",
    ),
]


@pytest.mark.parametrize(("name", "case", "message"), REFUSED, ids=[case[2] for case in REFUSED])
def test_calls_that_it_is_not_for(name: str, case: Case, message: str) -> None:
    tensors = native_inputs(case, SPECS[name])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MODULES[name].attention(*tensors, **case.params)


def test_the_docstring_says_which_calls_it_is_for() -> None:
    doc = " ".join((MODULES["layouts and slopes"].__doc__ or "").split())
    assert (
        "layout is a constant of this module: (4, 4, 5) bool, for calls of 4 heads, q_len up to "
        "256, kv_len up to 320." in doc
    )
    doc = " ".join((MODULES["run-time step"].__doc__ or "").split())
    assert "q_len up to 4 * size, kv_len up to 5 * size." in doc


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3,), (1, 1), (2, 300), (2, 3, 4), (2, 1, 2, 2)], ids=str)
def test_the_module_holds_every_element(shape: tuple[int, ...], dtype: str) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1000
    values = values > 0 if dtype == "bool" else values.to(getattr(torch, dtype))
    table = Constant("table", values, dtype)
    first = (0,) * (len(shape) - 1)
    spec = AttentionSpec(16, mask=lambda b, h, q, kv: table[(*first, 0 * kv)] != kv)
    if dtype == "bool":
        spec = AttentionSpec(16, mask=lambda b, h, q, kv: table[(*first, 0 * kv)])
    found = rendered_module(spec)._made_constant("table", CPU)
    assert found.dtype == values.dtype and torch.equal(found, values)


def test_it_is_made_once() -> None:
    module = rendered_module(SPECS["layouts and slopes"])
    tensors = native_inputs(Case(9, 9, q_heads=4, kv_heads=2), SPECS["layouts and slopes"])
    for _ in range(3):
        module.attention(*tensors)
        module.attention(*(x.detach().requires_grad_() for x in tensors)).sum().backward()
    assert module._kept_constant.cache_info().misses == 2
    assert module._kept_constant("slopes", CPU) is module._constant("slopes", tensors[0])


def test_a_first_call_without_gradients_leaves_it_fit_for_them() -> None:
    """Of one element a view is taken, which autograd keeps."""
    heat = Constant("heat", [0.7])
    spec = AttentionSpec(16, "float32", score=lambda s, b, h, q, kv: s * heat[0])
    module = rendered_module(spec)
    case = Case(40, 40, batch=2, q_heads=4, kv_heads=2)
    with torch.inference_mode():
        module.attention(*native_inputs(case, spec))
    check_gradients(module, spec, case)


def test_tracing_keeps_nothing() -> None:
    """What is made while torch traces belongs to the trace: no later call may meet it."""
    spec = SPECS["layouts and slopes"]
    module, case = rendered_module(spec), Case(21, 21, batch=2, q_heads=4, kv_heads=2)
    tensors = native_inputs(case, spec)
    with FakeTensorMode() as mode:
        module.reference(*map(mode.from_tensor, tensors))
    torch._dynamo.reset()
    compiled = torch.compile(module.reference, fullgraph=True, backend="aot_eager")
    result = compiled(*tensors)
    assert module._kept_constant.cache_info().misses == 0
    torch.testing.assert_close(result, module.reference(*tensors))


#: Of both what is compiled and what torch checks; a fast run has each with one of them.
TRACED = ["layout", "layouts and slopes"]


@pytest.mark.parametrize("name", some(TRACED, every=2))
def test_compile_without_graph_breaks(name: str) -> None:
    check_compiled(MODULES[name], SPECS[name], backend="aot_eager")


@pytest.mark.parametrize("name", some(reversed(TRACED), every=2))
def test_opcheck(name: str) -> None:
    case = Case(70, 70, batch=2, q_heads=4, kv_heads=2)
    tensors = [x.detach().requires_grad_() for x in native_inputs(case, SPECS[name])]
    torch.library.opcheck(MODULES[name].op, (*tensors, 0.1))


def test_a_constant_beside_a_tensor() -> None:
    """As a learned bias of buckets that are known."""
    buckets = Constant("buckets", [0, 1, 2, 2, 3, 3, 3, 3], dims=("q_len",))
    bias = Tensor("bias", (4, "num_q_heads"))
    spec = AttentionSpec(
        16,
        "float32",
        mask=causal(),
        score=lambda s, b, h, q, kv: s + bias[buckets[abs(q - kv)], h],
    )
    module, case = rendered_module(spec), Case(8, 8, batch=2, q_heads=4, kv_heads=2)
    assert list(inspect.signature(module.attention).parameters)[-1] == "bias"
    tensors, given = native_inputs(case, spec), case.arguments(spec)
    check(*module.attention(*tensors, return_lse=True, **given), tensors, spec, case)
    check_gradients(module, spec, case)

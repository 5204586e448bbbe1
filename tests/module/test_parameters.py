"""Declared numbers and tensors: what `attention` refuses, and what the compiler makes of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from flashgen import (
    AttentionSpec,
    Constant,
    Float,
    Int,
    Tensor,
    additive_bias,
    alibi,
    causal,
    document,
    relative_bias,
    sliding_window,
    softcap,
    softmax,
    temperature,
)
from support.cases import Case
from support.contract import check_compiled, check_gradients, native_inputs
from support.oracle import check
from support.turns import in_turns, some
from support.variants import lowered, rendered_module
from support.vocabulary import VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

SPEC = AttentionSpec(
    16,
    "float16",
    mask=document(Tensor("ids", ("batch", "kv_len"), "int32", sorted=True)) & causal(),
    score=softcap(Float("cap", 3.0, above=0.0))
    .then(relative_bias(Int("reach", 2)))
    .then(temperature(Tensor("heat", ("batch", "num_q_heads"), "bfloat16"))),
    normaliser=softmax(sink=Float("sink")),
)
MODULE = rendered_module(SPEC, name="tiny")

Q, K = (torch.zeros(2, heads, 6, 16, dtype=torch.float16) for heads in (4, 2))
GOOD: dict[str, Any] = {
    "ids": torch.zeros(2, 6, dtype=torch.int32),
    "relative_bias": torch.zeros(4, 5),
    "heat": torch.ones(2, 4, dtype=torch.bfloat16),
    "sink": 0.0,
}

TYPE, VALUE = TypeError, ValueError
REFUSED = [
    ("cap", "3", TYPE, "cap: got str; pass an int or a float"),
    ("cap", True, TYPE, "cap: got bool; pass an int or a float"),
    ("cap", None, TYPE, "cap: got NoneType; pass an int or a float"),
    ("cap", torch.tensor(3.0), TYPE, "cap: got Tensor; pass an int or a float"),
    ("cap", 0.0, VALUE, "cap: got 0.0; pass a finite number of 32 bits above 0.0"),
    ("cap", -1, VALUE, "cap: got -1; pass a finite number of 32 bits above 0.0"),
    ("cap", float("inf"), VALUE, "cap: got inf; pass a finite number of 32 bits above 0.0"),
    ("cap", float("nan"), VALUE, "cap: got nan; pass a finite number of 32 bits above 0.0"),
    ("sink", float("-inf"), VALUE, "sink: got -inf; pass a finite number of 32 bits"),
    ("sink", "0", TYPE, "sink: got str; pass an int or a float"),
    ("ids", [0] * 6, TYPE, "ids: got list; pass a torch.Tensor"),
    ("ids", GOOD["ids"].long(), TYPE, "ids: got torch.int64; pass torch.int32"),
    ("ids", GOOD["ids"][0], VALUE, "ids: got shape (6,); pass (2, 6)"),
    ("ids", GOOD["ids"][:, :5], VALUE, "ids: got shape (2, 5); pass (2, 6)"),
    ("ids", GOOD["ids"].to("meta"), VALUE, "ids: is on meta, q on cpu; pass one device"),
    ("ids", GOOD["ids"].to_sparse(), TYPE, "ids: got a nested or sparse tensor; pass a dense one"),
    ("heat", None, TYPE, "heat: got NoneType; pass a torch.Tensor"),
    ("heat", GOOD["heat"].float(), TYPE, "heat: got torch.float32; pass torch.bfloat16"),
    ("heat", GOOD["heat"].mT, VALUE, "heat: got shape (4, 2); pass (2, 4)"),
    ("relative_bias", torch.zeros(4, 7), VALUE, "relative_bias: got shape (4, 7); pass (4, 5)"),
    ("reach", 3, VALUE, "relative_bias: got shape (4, 5); pass (4, 7)"),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"), REFUSED, ids=[case[3] for case in REFUSED]
)
def test_refused(argument: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        MODULE.attention(Q, K, K, **{**GOOD, argument: value})


@pytest.mark.parametrize("missing", GOOD)
def test_missing(missing: str) -> None:
    given = {name: value for name, value in GOOD.items() if name != missing}
    with pytest.raises(TypeError, match=f"required keyword-only argument: '{missing}'"):
        MODULE.attention(Q, K, K, **given)


def test_any_size_is_taken_where_none_is_declared() -> None:
    table = Tensor("table", ("num_q_heads", None))
    spec = AttentionSpec(16, "float16", score=lambda s, b, h, q_idx, kv_idx: s + table[h, q_idx])
    module = rendered_module(spec, name="tiny")
    for size in (6, 9):
        assert module.attention(Q, K, K, table=torch.zeros(4, size)).isfinite().all()
    message = "table: got shape (3, 6); pass (4, any)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module.attention(Q, K, K, table=torch.zeros(3, 6))


CASE = Case(21, 21, batch=2, q_heads=4, kv_heads=2)


def _positive(case: Case) -> Case:
    """With temperatures above zero."""
    heat = torch.rand(case.batch, case.q_heads, generator=torch.Generator().manual_seed(0))
    return Case(**{**vars(case), "params": {"heat": (heat + 0.5).bfloat16()}})


@pytest.mark.parametrize("layout", ["contiguous", "unaligned"])
def test_values(layout: str) -> None:
    """All of them at once, of any strides."""
    case = _positive(Case(21, 21, batch=2, q_heads=4, kv_heads=2, layout=layout))
    tensors = native_inputs(case, SPEC)
    out, lse = MODULE.attention(*tensors, return_lse=True, **case.arguments(SPEC))
    check(out, lse, tensors, SPEC, case)


@pytest.mark.parametrize("lse_only", [False, True], ids=["out and lse", "lse"])
def test_gradients_of_all_of_them(lse_only: bool) -> None:
    check_gradients(MODULE, SPEC, _positive(CASE), lse_only=lse_only)


LEARNED = [
    name
    for name, entry in VOCABULARY.items()
    if any(isinstance(param, Tensor) and param.is_float for param in entry.spec().params)
]


@pytest.mark.parametrize(("name", "dtype"), in_turns(LEARNED, ["bfloat16", "float32"], every=2))
def test_gradients_of_float_tensors(name: str, dtype: str) -> None:
    spec = VOCABULARY[name].spec(dtype)
    case = VOCABULARY[name].case(CASE)
    check_gradients(rendered_module(spec), spec, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_a_model_in_16_bits(dtype: torch.dtype) -> None:
    """Where float32 is declared: the same output as of the widened ones, gradients in 16 bits."""
    case = _positive(CASE)
    tensors, given = native_inputs(case, SPEC), case.arguments(SPEC)
    bias = torch.nn.Parameter(torch.randn(4, 5).to(dtype))
    out = MODULE.attention(*tensors, **given | {"relative_bias": bias})
    wide = bias.detach().float().requires_grad_()
    right = MODULE.attention(*tensors, **given | {"relative_bias": wide})
    assert torch.equal(out, right)
    (got,) = torch.autograd.grad(out.float().sum(), bias)
    (exact,) = torch.autograd.grad(right.float().sum(), wide)
    assert got.dtype == dtype and torch.equal(got, exact.to(dtype))
    wider = bias.detach().double()
    with pytest.raises(TypeError, match=r"relative_bias: got torch\.float64"):
        MODULE.attention(*tensors, **given | {"relative_bias": wider})


def test_a_bias_of_pairs_is_read_in_the_16_bits_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No float32 copy of it, nor of its gradient: they would be the largest tensors of the call."""
    module, tensors = (
        rendered_module(AttentionSpec(16, "float16", score=additive_bias())),
        (Q, K, K),
    )
    q, k, v = (torch.randn_like(x) for x in tensors)
    bias = torch.randn(2, 4, 6, 6).half().requires_grad_()
    forward, seen = module._forward, []
    monkeypatch.setattr(module, "_forward", lambda *a: seen.append(a[4].dtype) or forward(*a))
    out = module.attention(q, k, v, bias=bias)
    wide = bias.detach().float().requires_grad_()
    assert torch.equal(out, module.attention(q, k, v, bias=wide))
    assert seen == [torch.float16, torch.float32]
    (got,) = torch.autograd.grad(out.float().square().sum(), bias)
    (exact,) = torch.autograd.grad(
        module.attention(q, k, v, bias=wide).float().square().sum(), wide
    )
    assert got.dtype == torch.float16 and torch.equal(got, exact.half())
    shapes = module._op_backward_shapes(q, k, v, 1.0, bias, out, out[..., 0], out, None)
    assert (shapes[3].shape, shapes[3].dtype) == (bias.shape, torch.float16)
    with pytest.raises(TypeError, match=r"bias: got torch\.float64; pass torch\.float32"):
        module.attention(q, k, v, bias=bias.double())


def test_the_docstring_shows_a_call_that_works() -> None:
    call = "tiny.attention(q, k, v, ids=ids, relative_bias=relative_bias, heat=heat, sink=sink)"
    assert f"    out = {call}\n" in str(MODULE.__doc__)
    assert eval(call, {"tiny": MODULE, "q": Q, "k": K, "v": K, **GOOD}).shape == Q.shape


def test_a_gradient_of_a_parameter_alone() -> None:
    """As of a bias that is learned while the rest is frozen."""
    case = _positive(CASE)
    tensors, given = native_inputs(case, SPEC), case.arguments(SPEC)
    bias = given["relative_bias"].requires_grad_()
    out = MODULE.attention(*tensors, **given)
    assert out.requires_grad
    (got,) = torch.autograd.grad(out.float().sum(), bias)
    out = MODULE.reference(*tensors, **given)
    (right,) = torch.autograd.grad(out.float().sum(), bias)
    assert (got.shape, got.dtype) == (bias.shape, bias.dtype)
    assert got.abs().max() > 0
    torch.testing.assert_close(got, right)


def test_forward_mode_of_a_parameter() -> None:
    """A tangent of a bias is carried through, not dropped."""
    spec = AttentionSpec(16, "float32", score=relative_bias(3, align="top_left"))
    module = rendered_module(spec)
    tensors, given = native_inputs(CASE, spec), CASE.arguments(spec)["relative_bias"]
    tangent = torch.randn(given.shape, generator=torch.Generator().manual_seed(1))
    with forward_ad.dual_level():
        out = module.attention(*tensors, relative_bias=forward_ad.make_dual(given, tangent))
        derivative = forward_ad.unpack_dual(out).tangent
    doubles = [x.double() for x in tensors]
    ends = [
        module.reference(*doubles, relative_bias=given.double() + sign * 1e-6 * tangent.double())
        for sign in (1, -1)
    ]
    torch.testing.assert_close(
        derivative.double(), (ends[0] - ends[1]) / 2e-6, rtol=1e-3, atol=1e-4
    )


#: One entry for each kind of parameter, and all kinds at once.
COMPILED = {
    name: VOCABULARY[name].spec("float32")
    for name in ("document_causal", "tree", "alibi_table", "sink_by_head", "additive_bias")
} | {"softcap_run_time": VOCABULARY["softcap_run_time"].spec("float32")}


@pytest.mark.parametrize("name", some(COMPILED, every=3))
def test_compile_without_graph_breaks(name: str) -> None:
    check_compiled(rendered_module(COMPILED[name]), COMPILED[name], backend="aot_eager")


@pytest.mark.parametrize("name", some(reversed(COMPILED), every=3))
def test_opcheck(name: str) -> None:
    spec = COMPILED[name]
    case = VOCABULARY[name].case(Case(10, 10, batch=2, q_heads=4, kv_heads=2))
    tensors = [x.detach().requires_grad_() for x in native_inputs(case, spec)]
    params = case.arguments(spec)
    for declared in spec.params:
        if isinstance(declared, Tensor) and declared.is_float:
            params[declared.name].requires_grad_()
    # Of decided tiles: none are there yet, and so no tensors that they are of.
    tiles = (None, []) if lowered(spec).classifies else ()
    torch.library.opcheck(rendered_module(spec).op, (*tensors, 0.1, *params.values(), *tiles))


def test_compiled_code_keeps_to_the_numbers_of_each_call() -> None:
    """To dynamo a float that an operator takes is a constant: it compiles for each, rightly."""
    torch._dynamo.reset()
    compiled = torch.compile(MODULE.attention, fullgraph=True, backend="eager")
    case = _positive(CASE)
    tensors, given = native_inputs(case, SPEC), case.arguments(SPEC)
    for cap, sink in ((1.5, 0.0), (2.5, 0.0), (2.5, -1.0), (7, 2)):
        numbers = {"cap": cap, "sink": sink}
        got, right = (f(*tensors, **{**given, **numbers}) for f in (compiled, MODULE.attention))
        torch.testing.assert_close(got, right, rtol=0, atol=0)


def _to_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def test_fake_and_meta_tensors() -> None:
    with FakeTensorMode() as mode:

        def to_fake(x: Any) -> Any:
            return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

        results = [_run(to_fake)]
    results.append(_run(_to_meta))
    for out, lse in results:
        assert (out.shape, out.dtype) == ((2, 4, 6, 16), torch.float16)
        assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)


def _run(convert: Callable[[Any], Any]) -> Any:
    given = {name: convert(value) for name, value in GOOD.items()}
    return MODULE.attention(*map(convert, (Q, K, K)), return_lse=True, **given)


def test_whole_numbers_that_32_bits_may_not_hold_are_refused() -> None:
    """Kernels would compute other remainders than torch, of a product that has wrapped around."""
    stride = Int("stride", min=1)
    spec = AttentionSpec(
        head_dim=16, dtype="float32", mask=lambda b, h, q, k: (q * stride + 7919 * k) % 13 < 4
    )
    module = rendered_module(spec)
    q, k = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 300, 16)
    most = (2**31 - 1 - 7919 * 300) // 8
    module.attention(q, k, k, stride=most)
    message = (
        f"stride: got kv_len 300, q_len 8, stride {most + 1}, with which 32 bits may not hold"
        " `q_idx * stride + 7919 * kv_idx`; pass less, or take remainders of its parts in the spec"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module.attention(q, k, k, stride=most + 1)
    with pytest.raises(ValueError, match="kv_len 300000, q_len 8, stride 1,"):
        module.attention(q, *(torch.zeros(1, 1, 300_000, 16) for _ in "kv"), stride=1)


@pytest.mark.parametrize(
    "doc", ['ends """ here', '"""', '""""', "C:\\new\\", r"\N{DASH} \x \d", '"', "an é, a 窓"]
)
def test_a_doc_stands_in_the_docstring_as_it_was_written(doc: str) -> None:
    spec = AttentionSpec(
        16,
        mask=sliding_window(Int("left", doc=doc), 0),
        score=softcap(Float("cap", above=0, doc=doc)).then(
            alibi(Constant("slopes", [0.5, 0.25], dims=("num_q_heads",), doc=doc))
        ),
        normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",), doc=doc)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntaxWarning)
        module = rendered_module(spec, name="documented")
    assert module.attention.__doc__.count(f": {doc}.") == 3

"""The registered op: what torch.compile, export, fake tensors and opcheck make of it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from support.cases import Case
from support.contract import check_compiled, native_inputs
from support.turns import some
from support.variants import shipped_module, shipped_specs

SPECS = shipped_specs()
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

CASE = Case(10, 10, batch=2, q_heads=4, kv_heads=2)


# Those whose modules differ in more than numbers: equal lengths, two head dims, a parameter,
# dropout.
DIFFERENT = ("causal_d128", "causal_d192_v128", "window_d128", "dropout_causal_d64")


@pytest.mark.parametrize("name", some(DIFFERENT, every=2))
def test_opcheck(name: str) -> None:
    spec = SPECS[name]
    tensors = [x.detach().requires_grad_() for x in native_inputs(CASE, spec)]
    params = CASE.arguments(spec).values()
    torch.library.opcheck(shipped_module(name).op, (*tensors, 0.1, *params))


@pytest.mark.parametrize("name", some(DIFFERENT, every=4))
def test_compile_without_graph_breaks(name: str) -> None:
    check_compiled(shipped_module(name), SPECS[name], backend="aot_eager")


def test_compiled_parameters_are_dynamic() -> None:
    module, spec = shipped_module("window_d128"), SPECS["window_d128"]
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(module.attention, fullgraph=True, backend=counter)
    tensors = native_inputs(CASE, spec)
    for left in (2, 3, 5, 8, 100):
        torch.testing.assert_close(
            compiled(*tensors, left=left), module.attention(*tensors, left=left), rtol=0, atol=0
        )
    assert counter.frame_count <= 2  # as a constant, then as a number


def test_compiled_code_refuses_as_eager_code_does() -> None:
    module = shipped_module("causal_d128")
    q, k, v = native_inputs(CASE, SPECS["causal_d128"])
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, backend="eager")
    with pytest.raises(TypeError, match=r"^q: got torch.float16; causal_d128 was built for"):
        compiled(q.half(), k, v)


def test_fake_and_meta_tensors_have_the_shapes_and_say_nothing(recwarn) -> None:
    module, spec = shipped_module("causal_d192_v128"), SPECS["causal_d192_v128"]
    q, k, v = native_inputs(Case(6, 9, batch=2, q_heads=4, kv_heads=2), spec)
    recwarn.clear()
    with FakeTensorMode() as mode:
        fake = module.attention(*map(mode.from_tensor, (q, k, v)), return_lse=True)
    meta = module.attention(q.to("meta"), k.to("meta"), v.to("meta"), return_lse=True)
    for out, lse in (fake, meta):
        assert (out.shape, out.dtype) == ((2, 4, 6, 128), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
    assert not recwarn.list


def test_export() -> None:
    module, spec = shipped_module("causal_d64"), SPECS["causal_d64"]

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return module.attention(q, k, v)

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({2: length}, {2: length}, {2: length})
    program = torch.export.export(Layer(), native_inputs(CASE, spec), dynamic_shapes=shapes)
    tensors = native_inputs(Case(37, 37, q_heads=4, kv_heads=2, batch=2), spec)
    assert torch.equal(program.module()(*tensors), module.attention(*tensors))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_number_that_depends_on_a_length(strict: bool) -> None:
    module, spec = shipped_module("window_d128"), SPECS["window_d128"]

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return module.attention(q, k, v, left=q.shape[2] // 2)

    shapes = ({2: torch.export.Dim("length", min=2, max=4096)},) * 3
    inputs = native_inputs(CASE, spec)
    program = torch.export.export(Layer(), inputs, dynamic_shapes=shapes, strict=strict)
    tensors = native_inputs(Case(37, 37, q_heads=4, kv_heads=2, batch=2), spec)
    assert torch.equal(program.module()(*tensors), module.attention(*tensors, left=18))


class _Seen(TorchDispatchMode):
    """Notes the operators that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_watches_or_traces_sees_the_op() -> None:
    """Not what it is made of: a launch of a kernel leaves nothing to see."""
    module, spec = shipped_module("causal_d64"), SPECS["causal_d64"]
    tensors = native_inputs(CASE, spec)
    name = module.op.name()
    with _Seen() as seen:
        module.attention(*tensors)
    assert seen.names[0] == name
    graph = make_fx(lambda q, k, v: module.attention(q, k, v))(*tensors).graph
    assert name.split("::")[1] in str(graph)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of checks of shapes
        traced = torch.jit.trace(lambda q, k, v: module.attention(q, k, v), tensors)
    assert name in str(traced.graph)

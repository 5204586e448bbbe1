"""The operator of the backward pass: its schema, its fake, and what torch.compile makes of it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs

from support.cases import Case
from support.contract import native_inputs
from support.variants import shipped_module, shipped_specs

SPECS = shipped_specs()
CASE = Case(20, 20, batch=2, q_heads=4, kv_heads=2)


#: One of each kind of arguments; the others are for a full run.
KINDS = ("causal_d64", "window_d128", "documents_d128", "sinks_softmax_d64", "dropout_causal_d64")
EACH = [pytest.param(x, marks=() if x in KINDS else pytest.mark.full) for x in SPECS]


@pytest.mark.parametrize("name", EACH)
def test_opcheck(name: str) -> None:
    spec, module = SPECS[name], shipped_module(name)
    q, k, v = native_inputs(CASE, spec)
    params = CASE.arguments(spec)
    out, lse = module.reference(q, k, v, return_lse=True, **params)
    given = (q, k, v, 0.1, *params.values(), out, lse, torch.ones_like(out))
    for grad_lse in (torch.ones_like(lse), None):
        torch.library.opcheck(module.op_backward, (*given, grad_lse))


@pytest.mark.parametrize("name", EACH)
def test_the_fake_has_the_shapes_and_types(name: str) -> None:
    spec, module = SPECS[name], shipped_module(name)
    case = CASE if spec.equal_lengths else Case(20, 33, batch=2, q_heads=4, kv_heads=2)
    q, k, v = native_inputs(case, spec)
    params = case.arguments(spec)
    out, lse = module.reference(q, k, v, return_lse=True, **params)
    given = (q, k, v, 0.1, *params.values(), out, lse, torch.ones_like(out), torch.ones_like(lse))
    real = module.op_backward(*given)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
    fake = module.op_backward(*meta)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


@pytest.mark.filterwarnings("ignore:.*boxed arguments")
@pytest.mark.parametrize("of_lse", [False, True])
def test_a_compiled_pass_makes_no_zeros_for_the_lse(of_lse: bool) -> None:
    module, spec = shipped_module("causal_fp32_d64"), SPECS["causal_fp32_d64"]
    leaves = [x.requires_grad_() for x in native_inputs(CASE, spec)]
    backend = AotEagerAndRecordGraphs()
    torch._dynamo.reset()

    def loss() -> torch.Tensor:
        out, lse = module.attention(*leaves, return_lse=True)
        return out.square().sum() + (lse.sum() if of_lse else 0.0)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)()
    pairs = zip(
        torch.autograd.grad(compiled, leaves), torch.autograd.grad(loss(), leaves), strict=True
    )
    assert all(torch.equal(mine, eager) for mine, eager in pairs)
    (graph,) = backend.bw_graphs
    assert module.op_backward.name().split("::")[1] in graph.code
    assert "zeros" not in graph.code and "full" not in graph.code

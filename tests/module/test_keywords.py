"""Parameters with names that modules use themselves: another name inside, the same outside."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Constant, Float, Int, Tensor, softmax
from flashgen.kernels.workload import typical_params, visible
from flashgen.plan import lower
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


def spec(end: str) -> AttentionSpec:
    top, shift = Int("top" + end, min=1), Int("shift" + end, 3)
    total_q = Float("total_q" + end, 0.5)
    p, key = (Tensor(name + end, ("num_q_heads",)) for name in ("p", "key"))
    x = Tensor("x" + end, ("batch", top + 1))
    free = Tensor("free", ("num_q_heads",))
    tile = Constant("tile" + end, [0.5, 1.0, 2.0, 1.5], dims=("num_q_heads",))

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx <= top) & (kv_idx <= q_idx + shift)

    def bent(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * total_q + p[h] * (q_idx - kv_idx) + x[b, top] * free[h] + tile[h]

    return AttentionSpec(
        16,
        "float32",
        mask=near,
        score=bent,
        normaliser=softmax(sink=key),
        align="bottom_right",
        forms=("dense", "varlen", "cache"),
    )


#: With names that are taken, and with the names that are then inside, as keywords.
MODULE = rendered_module(spec(""), name="named")
OTHER = rendered_module(spec("_"), name="named")


def arguments(end: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4, generator=generator) * 0.3 for name in ("p", "key", "free")}
    tensors["x"] = torch.randn(2, 6, generator=generator)
    values = {"top": 5, "total_q": 0.7, **{n: x.requires_grad_() for n, x in tensors.items()}}
    return {name if name == "free" else name + end: value for name, value in values.items()}


def text_of(module: ModuleType) -> dict[str, str]:
    """What is at the top of a module, by names."""
    source = inspect.getsource(module)
    found = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = ast.unparse(statement)
    return found


def test_kernels_and_launchers_are_those_of_the_other_names() -> None:
    mine, others = text_of(MODULE), text_of(OTHER)
    assert mine.keys() == others.keys()
    public = {"attention", "reference", "varlen_attention", "varlen_reference"}
    public |= {"cache_attention", "cache_reference"}
    for name in mine.keys() - public:  # some pass keywords on, or name them in messages
        shown = re.sub(r"\b(top|shift|p|key|x|total_q)_(=|: got)", r"\1\2", others[name])
        shown = re.sub(r"(_check_tensor\('\w+)_'", r"\1'", shown)
        assert shown == mine[name], name


def calls(module: ModuleType, end: str) -> dict[str, Any]:
    """Each function's results, and gradients."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 20, 16, generator=generator) for h in (4, 2, 2))
    given = arguments(end)
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    found = {}
    for name in ("attention", "reference"):
        out, lse = getattr(module, name)(q, k, v, return_lse=True, **given)
        grads = torch.autograd.grad(out.sum() + (lse * out[..., 0]).sum(), tensors)
        found[name] = [out, lse, *grads]
    with torch.autocast("cpu", torch.bfloat16):
        found["reference in autocast"] = [module.reference(q, k, v, **given)]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 20, 40], dtype=torch.int32)
    for name in ("varlen_attention", "varlen_reference"):
        found[name] = [getattr(module, name)(*rows, ends, ends, 20, 20, **given)]
    cached = [x.transpose(1, 2) for x in (q[:, :, -2:], k, v)]
    detached = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    lens = torch.tensor([20, 13], dtype=torch.int32)
    for name in ("cache_attention", "cache_reference"):
        found[name] = [getattr(module, name)(*cached, lens, **detached)]
    return found


def test_calls_give_what_those_of_the_other_names_give() -> None:
    mine, others = calls(MODULE, ""), calls(OTHER, "_")
    for name, results in mine.items():
        for result, other in zip(results, others[name], strict=True):
            assert torch.equal(result, other), name
    for one, other in (("attention", "reference"), ("cache_attention", "cache_reference")):
        torch.testing.assert_close(mine[one][0], mine[other][0], rtol=1e-4, atol=1e-5)


def test_messages_have_the_keyword() -> None:
    q = torch.zeros(2, 4, 8, 16)
    given = arguments("")
    with pytest.raises(ValueError, match=r"^top: got 0; pass an int from 1"):
        MODULE.attention(q, q, q, **{**given, "top": 0})
    with pytest.raises(TypeError, match=r"^p: got torch\.int64"):
        MODULE.attention(q, q, q, **{**given, "p": torch.zeros(4).long()})
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_'"):
        MODULE.attention(q, q, q, **given, top_=3)
    assert "named.attention(q, k, v, top=top, p=p, x=x, free=free, key=key)" in MODULE.__doc__
    assert "top is called top_ here." in MODULE.__doc__


def test_a_plan_evaluates_masks_by_either_name() -> None:
    """Tuning draws values by names inside, and looks at the mask with them."""
    q = torch.zeros(2, 4, 8, 16)
    plan, other = lower(spec(""), "named"), lower(spec("_"), "named")
    params = typical_params(plan, q)
    shown = visible(plan, q, params)
    assert torch.equal(shown, visible(other, q, typical_params(other, q)))
    MODULE.attention(q, q, q, **plan.by_keyword(params))

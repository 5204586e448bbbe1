"""Modules whose feature maps begin with a product: calls on the CPU, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, exp, linear
from support.matrices import CASES
from support.recurrence import MAPS
from support.slip import with_slip
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

SPEC = CASES["shared"].spec


def drawn(length: int = 20) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, length, 24), "k": (2, 2, length, 24), "v": (2, 2, length, 16)}
    found = {x: torch.randn(y, generator=generator) for x, y in shapes.items()}
    return found | {"M": 0.2 * torch.randn(24, 16, generator=generator)}


def by_weights(q: Any, k: Any, v: Any, M: Any) -> torch.Tensor:
    phi_q, phi_k = (MAPS["hedgehog"](x @ M) for x in (q, k))
    weights = (phi_q @ phi_k.repeat_interleave(2, 1).mT).tril()
    return weights @ v.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True)


def test_the_reference_is_the_definition() -> None:
    """In float64, also of a matrix in 16 bits, whose gradient has 16."""
    given = {x: y.double() for x, y in drawn().items()}
    matrix = given["M"].bfloat16().requires_grad_()
    out = rendered_module(SPEC).reference(**(given | {"M": matrix}))
    torch.testing.assert_close(out, by_weights(**(given | {"M": matrix.double()})))
    out.sum().backward()
    assert matrix.grad is not None and matrix.grad.dtype == torch.bfloat16


def test_steps_go_on_from_calls() -> None:
    module, given = rendered_module(SPEC), drawn()
    matrix = given.pop("M")
    whole, last = module.attention(**given, M=matrix, return_state=True)
    first, state = module.attention(
        **{x: y[:, :, :19] for x, y in given.items()}, M=matrix, return_state=True
    )
    row = {x: y[:, :, 19:] for x, y in given.items()}
    stepped, state = module.step(**row, state=state, M=matrix)
    torch.testing.assert_close((torch.cat((first, stepped), 2), state), (whole, last))
    with pytest.raises(ValueError, match=r"^M: has a gradient, and step none; call"):
        module.step(**row, state=state, M=matrix.requires_grad_())


def test_compiled_calls_have_the_gradient() -> None:
    module, given = rendered_module(SPEC), drawn()
    leaves = [x.requires_grad_() for x in given.values()]
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    outs = [f(**given) for f in (compiled, module.attention)]
    grads = [torch.autograd.grad(x.sum(), leaves) for x in outs]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("slip", [("", ""), ("enabled=False)", "enabled=True)")])
def test_autocast_does_not_choose_the_dtype(slip: tuple[str, str]) -> None:
    """The kernels are of one; without care, q and k would be of another one than v."""
    source = with_slip(*slip) if slip[0] else str
    module, given = rendered_module(SPEC, edit_source=source), drawn()
    right = rendered_module(SPEC).attention(**given)
    with torch.autocast("cpu", torch.bfloat16):
        if slip[0]:
            with pytest.raises(RecursionError):
                module.attention(**given)
        else:
            torch.testing.assert_close(module.attention(**given), right, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(16, 24), r"^M: got shape \(16, 24\); pass \(24, 16\)"),
        (torch.zeros(24, 16).double(), "^M: got torch.float64; pass torch.float32"),
        (torch.zeros(24, 16, device="meta"), "^M: is on meta, q on cpu; pass one device"),
        (None, "^M: got NoneType; pass a torch.Tensor"),
    ],
)
def test_what_a_call_refuses(matrix: Any, message: str) -> None:
    given = drawn() | {"M": matrix}
    for run in (rendered_module(SPEC).attention, rendered_module(SPEC).step):
        more = {"state": None} if run.__name__ == "step" else {}
        with pytest.raises((TypeError, ValueError), match=message):
            run(**given, **more)


def test_a_matrix_of_any_name_beside_a_decay() -> None:
    """Inside, names that variables have are others."""
    found = []
    for name in ("M", "chunk", "log_decay"):
        tensor = Tensor(name, (24, 16))
        decay = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
        made = linear(lambda x, tensor=tensor: [exp(x @ tensor), exp(-(x @ tensor))], decay=decay)
        spec = AttentionSpec((24, 16), "float32", mask=causal(), normaliser=made)
        given = drawn()
        given[name] = given.pop("M").requires_grad_()
        out = rendered_module(spec).attention(**given, decay=-torch.ones(2, 2, 20))
        found.append((out, *torch.autograd.grad(out.sum(), given[name])))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)

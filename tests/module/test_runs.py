"""A module of linear attention within runs of positions: calls, states, derivatives."""

from __future__ import annotations

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    identity,
    linear,
)
from support.recurrence import recurrence
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
DOCUMENTS = AttentionSpec(
    16, "float32", mask=document() & causal(), normaliser=linear(elu_plus_one(), decay=DECAY)
)
UNDIVIDED = AttentionSpec(
    16, "float32", mask=document() & causal(), normaliser=linear(identity(), normalise=False)
)
CHUNKS = AttentionSpec(
    16,
    "float32",
    mask=chunked(Int("chunk", 4, min=1)) & causal(),
    normaliser=linear(identity(), normalise=False),
)
RETURNING = [[0, 0, 1, 1, 0, -1], [2, 3, 3, -1, 3, 3]]


def drawn(length: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and decays."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 16) for heads in (2, 1, 1)]
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    decay = torch.log(torch.rand(2, 1, length, generator=generator, dtype=torch.float64))
    return [x.to(dtype) for x in (*tensors, decay)]


@pytest.mark.parametrize("spec", [DOCUMENTS, CHUNKS])
def test_the_reference_is_the_recurrence(spec: AttentionSpec) -> None:
    q, k, v, decay = drawn(70, torch.float64)
    generator = torch.Generator().manual_seed(1)
    kv, z = torch.randn(2, 1, 16, 16, generator=generator), torch.rand(2, 1, 16)
    if spec is DOCUMENTS:
        ids = torch.tensor(RETURNING).repeat(1, 12)[:, :70]
        given = {"decay": decay, "document_ids": ids.int(), "initial_state": (kv, z)}
    else:
        ids, decay = (torch.arange(70) // 17).expand(2, -1), None
        given = {"chunk": 17, "initial_state": kv}
    out, state = rendered_module(spec).reference(q, k, v, return_state=True, **given)
    right, _, *last = recurrence(spec, q, k, v, decay, kv.double(), z.double(), ids)
    torch.testing.assert_close(out, right)
    for x, y in zip(state if spec is DOCUMENTS else [state], last, strict=False):
        torch.testing.assert_close(x, y)


def test_a_query_of_padding_sees_nothing() -> None:
    q, k, v, decay = drawn()
    ids = torch.tensor(RETURNING, dtype=torch.int32)
    module = rendered_module(DOCUMENTS)
    out, lse = module.attention(q, k, v, decay=decay, document_ids=ids, return_lse=True)
    hidden = (ids == -1)[:, None].expand(2, 2, 6)
    assert not out[hidden].any() and lse[hidden].isneginf().all()
    assert lse[~hidden].isfinite().all()


@pytest.mark.parametrize("spec", [DOCUMENTS, UNDIVIDED])
def test_the_reference_does_not_look_at_padding(spec: AttentionSpec) -> None:
    *tensors, decay = drawn()
    ids = torch.tensor(RETURNING, dtype=torch.int32)
    given = {"document_ids": ids} | ({"decay": decay} if spec is DOCUMENTS else {})
    hidden, found = (ids == -1)[:, None, :, None], []
    for value in (1.0, torch.nan):
        leaves = [x.masked_fill(hidden, value).requires_grad_() for x in tensors]
        out = rendered_module(spec).reference(*leaves, **given)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out).masked_fill(hidden, value))
        found.append((out.detach(), *grads))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_documents_go_on_from_call_to_call_and_step_to_step() -> None:
    """A state is of the last document, and goes by padding; None begins one."""
    q, k, v, decay = drawn(9)
    ids = torch.tensor([[0, 0, 0, 1, -1, 1, 1, 1, 1], [4, -1, 4, 4, 4, 4, 4, 4, 4]]).int()
    module = rendered_module(DOCUMENTS)

    def run(rows: slice, state: object) -> tuple[torch.Tensor, object]:
        part = [x[:, :, rows] for x in (q, k, v)]
        given = {"decay": decay[:, :, rows], "document_ids": ids[:, rows]}
        return module.attention(*part, **given, initial_state=state, return_state=True)

    whole, last = run(slice(0, 9), None)
    first, state = run(slice(0, 5), None)
    second, state = run(slice(5, 7), state)
    outs = [first, second]
    for n in (7, 8):
        part = [x[:, :, n : n + 1] for x in (q, k, v)]
        out, state = module.step(*part, state, decay=decay[:, :, n : n + 1])
        outs.append(out)
    torch.testing.assert_close((torch.cat(outs, 2), state), (whole, last))
    alone, _ = module.step(*(x[:, :, 3:4] for x in (q, k, v)), None, decay=decay[:, :, 3:4])
    torch.testing.assert_close(alone[0], whole[0, :, 3:4])


def test_states_of_no_keys() -> None:
    """Of calls without positions, or with padding alone."""
    q, k, v, decay = drawn()
    state = torch.ones(2, 1, 16, 16), torch.ones(2, 1, 16)
    module = rendered_module(DOCUMENTS)
    ids = torch.full((2, 6), -1, dtype=torch.int32)
    given = {"initial_state": state, "return_state": True}
    out, (kv, z) = module.attention(q, k, v, decay=decay, document_ids=ids, **given)
    whole = decay.sum(2).exp()[..., None]
    assert not out.any()
    torch.testing.assert_close((kv, z), (state[0] * whole[..., None], state[1] * whole))
    none = [x[:, :, :0] for x in (q, k, v)]
    out, last = module.attention(*none, decay=decay[:, :, :0], document_ids=ids[:, :0], **given)
    assert out.shape == (2, 2, 0, 16)
    torch.testing.assert_close(last, state, rtol=0, atol=0)


def arguments(name: str) -> tuple[AttentionSpec, dict, tuple]:
    """A spec, the keywords of a call, and what its operator takes behind q, k and v."""
    if name == "chunks":
        return CHUNKS, {"chunk": 4}, (0.5, 4)
    ids = torch.tensor(RETURNING, dtype=torch.int32)
    decay = drawn()[3].requires_grad_()
    return DOCUMENTS, {"decay": decay, "document_ids": ids}, (decay, ids)


@pytest.mark.parametrize("name", ["documents", "chunks"])
def test_the_operator(name: str) -> None:
    spec, given, others = arguments(name)
    module = rendered_module(spec)
    tensors = [x.requires_grad_() for x in drawn()[:3]]
    kv, z = torch.randn(2, 1, 16, 16).requires_grad_(), torch.rand(2, 1, 16).requires_grad_()
    states = (kv,) if name == "chunks" else (kv, z)
    for state in ((*(None for _ in states), False), (*states, True)):
        torch.library.opcheck(module.op, (*tensors, *others, *state))
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    out, right = compiled(*tensors, **given), module.attention(*tensors, **given)
    torch.testing.assert_close(out, right, rtol=0, atol=0)
    grads = (torch.autograd.grad(x.sum(), tensors) for x in (out, right))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["documents", "chunks"])
def test_derivatives_of_derivatives(name: str) -> None:
    spec, given, _ = arguments(name)
    module = rendered_module(spec)
    tensors = [x.requires_grad_() for x in drawn()[:3]]
    decay = given.get("decay")
    leaves = [*tensors] + [decay] * (decay is not None)
    [dq] = torch.autograd.grad(
        module.attention(*tensors, **given).sum(), tensors[0], create_graph=True
    )
    mine = torch.autograd.grad((dq * dq).sum(), leaves, materialize_grads=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ids = torch.tensor(RETURNING) if name == "documents" else (torch.arange(6) // 4).expand(2, -1)
    of_decay = {"decay": exact[3]} if decay is not None else {}
    out = recurrence(spec, *exact[:3], **of_decay, ids=ids)[0]
    [dq] = torch.autograd.grad(out.sum(), exact[0], create_graph=True)
    right = torch.autograd.grad((dq * dq).sum(), exact, materialize_grads=True)
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_what_a_call_refuses() -> None:
    q, k, v, decay = drawn()
    module = rendered_module(DOCUMENTS)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'document_ids'"):
        module.attention(q, k, v, decay=decay)
    with pytest.raises(ValueError, match=r"^document_ids: got shape \(2, 5\); pass \(2, 6\)"):
        module.attention(q, k, v, decay=decay, document_ids=torch.zeros(2, 5).int())
    with pytest.raises(TypeError, match=r"^document_ids: got torch.float32; pass torch.int32"):
        module.attention(q, k, v, decay=decay, document_ids=torch.zeros(2, 6))
    module = rendered_module(CHUNKS)
    with pytest.raises(ValueError, match=r"^chunk: got 0; pass an int from 1 to 2\*\*30"):
        module.attention(q, k, v, chunk=0)
    assert not hasattr(module, "step")  # it would need a position


@pytest.mark.parametrize("name", ["ids", "run_ids", "marks", "found", "runs"])
def test_ids_may_have_any_name(name: str) -> None:
    tensor = Tensor(name, ("batch", "kv_len"), "int32")
    spec = AttentionSpec(
        16, "float32", mask=document(tensor) & causal(), normaliser=linear(elu_plus_one())
    )
    q, k, v, _ = drawn()
    ids = torch.tensor(RETURNING, dtype=torch.int32)
    module = rendered_module(spec)
    out = module.attention(q, k, v, **{name: ids})
    torch.testing.assert_close(out, module.reference(q, k, v, **{name: ids}))
    torch.testing.assert_close(out, recurrence(spec, q, k, v, ids=ids)[0])

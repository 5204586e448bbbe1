"""A module of linear attention besides its kernels' values: calls, derivatives, the operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    elu_plus_one,
    exp2,
    feature_sum,
    full,
    identity,
    linear,
    log,
    relu,
    softmax_features,
)
from support.recurrence import recurrence
from support.variants import rendered_module, shipped_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
OF_FEATURES = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 16))
#: What a call passes a tensor of decays to, and the features that each have one.
LEARNED = {"decays": (), "features": (16,)}
SPECS = {
    "features": AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=OF_FEATURES)
    ),
    "decays": AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY)
    ),
    "retention": AttentionSpec(
        16,
        "float32",
        mask=causal(),
        normaliser=linear(identity(), decay=lambda h: log(1.0 - exp2(-2.0 - h)), normalise=False),
    ),
    "elu": AttentionSpec(16, "float32", mask=causal(), normaliser=linear(elu_plus_one())),
    "plain": AttentionSpec(
        (16, 24), "float32", mask=full(), normaliser=linear(identity(), normalise=False)
    ),
}
#: Of vectors, whose states have other sizes than heads.
OF_VECTORS = {
    "vectors": AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(softmax_features(), decay=(-0.1, -0.5))
    ),
    "tiles": AttentionSpec(
        16,
        "float32",
        mask=causal(),
        normaliser=linear(
            lambda x: [x / (feature_sum(x * x) + 1.0 + i) for i in range(24)], normalise=False
        ),
    ),
}


def drawn(
    heads: int = 2, kv_heads: int = 1, length: int = 70, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, 16), (2, kv_heads, length, 16), (2, kv_heads, length, 16))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def test_the_reference_is_the_recurrence() -> None:
    for spec in (SPECS["elu"], AttentionSpec(16, "float32", normaliser=linear(relu()))):
        module = rendered_module(spec)
        tensors = drawn()
        out, lse = module.reference(*tensors, scale=0.3, return_lse=True)
        exact, sums, _, _ = recurrence(spec, *tensors)
        torch.testing.assert_close(out, exact)
        torch.testing.assert_close(lse, torch.log(0.3 * sums))


def drawn_states(
    tensors: list[torch.Tensor], features: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(decays, kv, z) for q, k and v, in their dtype."""
    _, k, v = tensors
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (*k.shape[:3], *features),
        (*k.shape[:2], k.shape[3], v.shape[3]),
        (*k.shape[:2], k.shape[3]),
    )
    decay, kv, z = (torch.rand(x, generator=generator, dtype=torch.float64) for x in shapes)
    return tuple(x.to(k.dtype) for x in (torch.log(decay), kv, z))


@pytest.mark.parametrize("name", LEARNED)
def test_the_reference_of_decays_and_states_is_the_recurrence(name: str) -> None:
    tensors = drawn()
    decay, kv, z = drawn_states(tensors, LEARNED[name])
    decay[0, 0, ::7] = -math.inf
    module, spec = rendered_module(SPECS[name]), SPECS[name]
    out, state = module.reference(
        *tensors, decay=decay, initial_state=(kv, z), return_state=True, scale=0.3
    )
    exact, _, *last = recurrence(spec, *tensors, decay, kv, z)
    torch.testing.assert_close((out, *state), (exact, *last))


def test_the_reference_of_decays_of_heads_is_the_recurrence() -> None:
    tensors = drawn()
    kv = drawn_states(tensors)[1]
    of_heads = torch.full((1, 1, 1), math.log(0.75), dtype=torch.float64)
    module, spec = rendered_module(SPECS["retention"]), SPECS["retention"]
    out, last_kv = module.reference(*tensors, initial_state=kv, return_state=True)
    exact, _, right, _ = recurrence(spec, *tensors, of_heads.expand(2, 1, 70), kv)
    torch.testing.assert_close((out, last_kv), (exact, right))


def test_decays_of_features_expand_and_have_any_strides() -> None:
    """Those of each key expanded are a decay of the key; others need not be contiguous."""
    tensors = [x.float() for x in drawn()]
    decay = drawn_states(tensors)[0]
    out = rendered_module(SPECS["decays"]).attention(*tensors, decay=decay)
    module = rendered_module(SPECS["features"])
    expanded = decay[..., None].expand(*decay.shape, 16)
    torch.testing.assert_close(module.attention(*tensors, decay=expanded), out)
    _, state = module.attention(*(x[:, :, :1] for x in tensors), decay=decay[:, :, :1, None].expand(
        2, 1, 1, 16), return_state=True)  # fmt: skip
    row = [x[:, :, 1:2] for x in tensors]
    stepped, _ = module.step(*row, state, decay=expanded[:, :, 1:2])
    torch.testing.assert_close(stepped, out[:, :, 1:2])
    apart = drawn_states(tensors, (16,))[0]
    strided = apart.mT.contiguous().mT
    grads = []
    for x in (apart, strided):
        x.requires_grad_()
        out = module.attention(*tensors, decay=x)
        grads.append((out, *torch.autograd.grad(out.sum(), x)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_long_decays() -> None:
    """A geometric sum to which what is over 100,000 keys away adds nothing."""
    module, ones = rendered_module(SPECS["retention"]), torch.ones(1, 8, 2**17, 16)
    with torch.no_grad():
        _, kv = module.attention(ones, ones, ones, return_state=True)
    right = torch.exp2(2.0 + torch.arange(8))
    torch.testing.assert_close(kv[0, :, 0, 0], right, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", SPECS)
def test_derivatives_of_derivatives(name: str) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    shapes = [(1, 2, 3, 16), (1, 1, 3, 16), (1, 1, 3, spec.v_head_dim)]
    tensors = [torch.randn(x, requires_grad=True) for x in shapes]
    decay = torch.log(torch.rand(1, 1, 3, *LEARNED.get(name, ()))).requires_grad_()
    given = {"decay": decay} if name in LEARNED else {}
    tensors = [*tensors, *given.values()]
    out = module.attention(*tensors[:3], **given)
    [dq] = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    mine = torch.autograd.grad((dq * dq).sum(), tensors, materialize_grads=True)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    of_heads = torch.log(torch.tensor(0.75)).double().expand(1, 1, 3)
    of_spec = [of_heads] * (name == "retention")
    [dq] = torch.autograd.grad(
        recurrence(spec, *leaves, *of_spec)[0].sum(), leaves[0], create_graph=True
    )
    right = torch.autograd.grad((dq * dq).sum(), leaves, materialize_grads=True)
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_the_transforms_of_torch_func() -> None:
    module, spec = rendered_module(SPECS["elu"]), SPECS["elu"]
    q, k, v = (x.float() for x in drawn(length=5))
    tangent = torch.ones_like(q)
    _, mine = torch.func.jvp(lambda x: module.attention(x, k, v), (q,), (tangent,))
    exact = tuple(x.double() for x in (q, k, v))
    _, right = torch.func.jvp(
        lambda x: recurrence(spec, x, *exact[1:])[0], exact[:1], (tangent.double(),)
    )
    torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_the_operator(name: str) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    shapes = [(1, 2, 5, 16), (1, 1, 5, 16), (1, 1, 5, spec.v_head_dim)]
    tensors = [torch.randn(x, requires_grad=True) for x in shapes]
    scale = [] if spec.normaliser.normalise else [0.5]
    decay = torch.log(torch.rand(1, 1, 5, *LEARNED.get(name, ()))).requires_grad_()
    given = {"decay": decay} if name in LEARNED else {}
    states = [[]]
    if name != "plain":
        kv, z = torch.randn(1, 1, 16, 16).requires_grad_(), torch.rand(1, 1, 16).requires_grad_()
        states = [[None] * (2 - len(scale)) + [False], [*[kv, z][: 2 - len(scale)], True]]
    for state in states:
        torch.library.opcheck(module.op, (*tensors, *scale, *given.values(), *state))
    if name != "plain":
        given["initial_state"] = kv if scale else (kv, z)
        stepped = [x.detach()[:, :, :1] for x in (*tensors, decay)]
        more = [kv] if scale else [kv, z]
        args = (*stepped[:3], *scale, *stepped[3:][: name in LEARNED], *(x.detach() for x in more))
        torch.library.opcheck(module.op_step, args, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    out, right = compiled(*tensors, **given), module.attention(*tensors, **given)
    torch.testing.assert_close(out, right, rtol=0, atol=0)
    grads = (torch.autograd.grad(x.sum(), tensors) for x in (out, right))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["chunk", "sums", "k_len", "log_decay"])
def test_a_decay_may_have_any_name(name: str) -> None:
    """Inside it has another one, so that no variable takes its place."""
    tensors = [x.float().requires_grad_() for x in drawn(length=20)]
    decay = drawn_states(tensors)[0].detach().requires_grad_()
    found = []
    for called in ("decay", name):
        tensor = Tensor(called, ("batch", "num_kv_heads", "kv_len"))
        spec = AttentionSpec(
            16, "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=tensor)
        )
        module = rendered_module(spec)
        out, lse, state = module.attention(
            *tensors, **{called: decay}, return_lse=True, return_state=True
        )
        grads = torch.autograd.grad(out.sum() + lse.sum(), (*tensors, decay))
        stepped = module.step(*(x.detach()[:, :, :1] for x in tensors), None, **{
            called: decay.detach()[:, :, :1]
        })  # fmt: skip
        found.append(
            (out, lse, state, grads, stepped, module.reference(*tensors, **{called: decay}))
        )
        with pytest.raises((TypeError, ValueError), match=f"^{called}: got shape"):
            module.attention(*tensors, **{called: decay[:, :, :3]})
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["elu", *LEARNED, "retention", "vectors", "tiles"])
def test_states_go_on_from_call_to_call_and_step_to_step(name: str) -> None:
    module = rendered_module((SPECS | OF_VECTORS)[name])
    tensors = [x.float() for x in drawn(heads=4, kv_heads=2, length=20)]
    decays = [drawn_states(tensors, LEARNED[name])[0]] if name in LEARNED else []

    def part(begin: int, end: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        rows = slice(begin, end)
        given = {"decay": decays[0][:, :, rows]} if decays else {}
        return [x[:, :, rows] for x in tensors], given

    q, given = part(0, 20)
    whole, last = module.attention(*q, **given, return_state=True)
    q, given = part(0, 13)
    out, state = module.attention(*q, **given, return_state=True)
    outs = [out]
    q, given = part(13, 17)
    out, state = module.attention(*q, **given, initial_state=state, return_state=True)
    outs.append(out)
    for n in range(17, 20):
        q, given = part(n, n + 1)
        out, state = module.step(*q, state, **given)
        outs.append(out)
    torch.testing.assert_close((torch.cat(outs, 2), state), (whole, last))
    q, given = part(0, 1)
    first, state = module.step(*q, None, **given)
    torch.testing.assert_close(first, whole[:, :, :1])
    q, given = part(0, 0)
    out, same = module.attention(*q, **given, initial_state=state, return_state=True)
    assert out.shape == (2, 4, 0, 16)
    torch.testing.assert_close(same, state, rtol=0, atol=0)


def test_fake_tensors_have_the_shapes() -> None:
    module = shipped_module("linear_elu_d128")
    q, k = (torch.zeros(2, heads, 6, 128, dtype=torch.bfloat16) for heads in (4, 2))
    with FakeTensorMode() as mode:
        out, lse = module.attention(*map(mode.from_tensor, (q, k, k)), return_lse=True)
    assert (out.shape, out.dtype) == ((2, 4, 6, 128), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)


def test_a_query_whose_weights_are_zero_is_zero() -> None:
    module = rendered_module(AttentionSpec(16, "float32", mask=causal(), normaliser=linear(relu())))
    q, k, v = (x.float().requires_grad_() for x in drawn(length=20))
    with torch.no_grad():
        q[:, :, 3] = -1.0
    out, lse = module.attention(q, k, v, return_lse=True)
    assert not out[:, :, 3].any() and (lse[:, :, 3] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads) and not grads[0][:, :, 3].any()


def test_empty_calls() -> None:
    module = rendered_module(SPECS["plain"])
    q, k, v = (torch.ones(1, 1, n, d) for n, d in ((3, 16), (0, 16), (0, 24)))
    assert not module.attention(q, k, v).any()
    assert module.attention(q[:, :, :0], q, v.new_ones(1, 1, 3, 24)).shape == (1, 1, 0, 24)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("elu", {"k": (2, 1, 8, 16), "v": (2, 1, 8, 16)}, "is for equal lengths only; pass as many "
         "keys as queries"),
        ("elu", {"q": (2, 2, 7, 8)}, "^q: "),
        ("elu", {"scale": 0.0}, "^scale: "),
        ("plain", {"return_lse": True}, "^return_lse: got True; weights are not divided by"),
        ("elu", {"initial_state": (2, 1, 16, 16)}, "^initial_state: got Tensor; pass a pair"),
        ("elu", {"initial_state": (torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 8))},
         r"^initial_state\[1\]: got shape \(2, 1, 8\); pass \(2, 1, 16\)"),
        ("retention", {"initial_state": (2, 2, 16, 16)}, r"^initial_state: got shape"),
        ("decays", {}, "missing 1 required keyword-only argument: 'decay'"),
        ("features", {"decay": (2, 1, 7, 8)},
         r"^decay: got shape \(2, 1, 7, 8\); pass \(2, 1, 7, 16\)"),
        ("decays", {"decay": (2, 2, 7)}, r"^decay: got shape \(2, 2, 7\); pass \(2, 1, 7\)"),
    ],
)  # fmt: skip
def test_what_a_call_refuses(name: str, change: dict, message: str) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    shapes = {"q": (2, 2, 7, 16), "k": (2, 1, 7, 16), "v": (2, 1, 7, spec.v_head_dim)}
    given = {
        x: torch.zeros(y) if isinstance(y, tuple) and isinstance(y[0], int) else y
        for x, y in (shapes | change).items()
    }
    with pytest.raises((TypeError, ValueError), match=message):
        module.attention(**given)


def test_what_a_step_refuses() -> None:
    module = rendered_module(SPECS["retention"])
    x = torch.zeros(1, 1, 2, 16)
    with pytest.raises(ValueError, match=r"^q: got q_len 2; step takes one query and one key"):
        module.step(x, x, x, None)
    x = x[:, :, :1].requires_grad_()
    with pytest.raises(ValueError, match=r"^q: has a gradient, and step none; call attention"):
        module.step(x, x, x, None)


def test_decays_above_0_are_found_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a state grows, as the recurrence says."""
    module, x = rendered_module(SPECS["decays"]), torch.ones(1, 1, 3, 16)
    decay = torch.tensor([[[0.0, 1.0, 0.0]]])
    _, (kv, _) = module.attention(x, x, x, decay=decay, return_state=True)
    torch.testing.assert_close(kv, torch.full_like(kv, 4.0 + 2.0 * math.e))
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    for run in (module.attention, lambda *q, decay: module.step(*q, None, decay=decay)):
        with pytest.raises(ValueError, match=r"^decay: holds numbers above 0, or NaN; pass"):
            run(*([x[:, :, 1:2]] * 3), decay=decay[:, :, 1:2])


def test_numbers_of_heads_are_for_as_many_heads() -> None:
    decay = (-0.1, -math.inf)
    module = rendered_module(
        AttentionSpec(16, "float32", mask=causal(), normaliser=linear(relu(), decay=decay))
    )
    x = torch.ones(1, 3, 4, 16)
    with pytest.raises(ValueError, match=r"^k: got 3 heads; decay of rendered has 2 numbers"):
        module.attention(x, x, x)
    _, (kv, _) = module.attention(*([x[:, :2]] * 3), return_state=True)
    right = sum(math.exp(-0.1 * n) for n in range(4))
    torch.testing.assert_close(kv[0, :, 0, 0], torch.tensor([right, 1.0]))


def test_a_function_of_heads_is_checked_for_these_heads() -> None:
    spec = AttentionSpec(16, mask=causal(), normaliser=linear(relu(), decay=lambda h: h - 1.5))
    module, x = rendered_module(spec), torch.ones(1, 3, 4, 16, dtype=torch.bfloat16)
    module.attention(*([x[:, :2]] * 3))
    with pytest.raises(ValueError, match=r"^k: got 3 heads, for which decay of rendered is"):
        module.attention(x, x, x)

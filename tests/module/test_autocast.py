"""`AttentionSpec(autocast=True)`: torch.autocast casts q, k and v, as it does for torch's SDPA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashgen import AttentionSpec, Tensor, causal, elu_plus_one, linear, sliding_window
from flashgen.codegen.operator import operator_digest
from flashgen.plan.backward import backward_plan
from support.slip import with_slip
from support.variants import lowered, rendered_module

CASTS = rendered_module(AttentionSpec(64, mask=causal(), autocast=True), name="casts")
PLAIN = rendered_module(AttentionSpec(64, mask=causal()), name="plain")
BF16 = torch.bfloat16

#: Linear attention, by states and over pairs; decays stay in float32.
LINEAR = [
    AttentionSpec(
        64,
        mask=mask,
        normaliser=linear(
            elu_plus_one(), decay=Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
        ),
        autocast=True,
    )
    for mask in (causal(), sliding_window(9, 0))
]


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, heads, 50, 64, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_it_computes_what_casting_by_hand_does(compiled: bool) -> None:
    given = inputs()
    attend = torch.compile(CASTS.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=BF16):
        assert F.scaled_dot_product_attention(*inputs(), enable_gqa=True).dtype == BF16
        out = (attend if compiled else CASTS.attention)(*given)
    out.float().sum().backward()
    by_hand = inputs()
    expected = PLAIN.attention(*(x.to(BF16) for x in by_hand))
    expected.float().sum().backward()
    assert out.dtype == BF16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for x, y in zip(given, by_hand, strict=True):
        assert x.grad is not None and x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_of_three_tensors_some_may_be_cast_already() -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=BF16):
        out = CASTS.attention(q, k.to(BF16), v)
    torch.testing.assert_close(out, CASTS.attention(*(x.to(BF16) for x in (q, k, v))))


def test_without_autocast_nothing_is_cast() -> None:
    with pytest.raises(TypeError, match=r"q: got torch.float32; casts was built for torch.bfloat"):
        CASTS.attention(*inputs())
    with (
        torch.autocast("cpu", dtype=BF16),
        torch.autocast("cpu", enabled=False),
        pytest.raises(TypeError, match=r"q: got torch.float32"),
    ):
        CASTS.attention(*inputs())


def test_a_module_that_does_not_ask_for_it_refuses_float32() -> None:
    with torch.autocast("cpu", dtype=BF16), pytest.raises(TypeError, match=r"q: got torch.float32"):
        PLAIN.attention(*inputs())


def test_autocast_to_another_dtype_is_refused() -> None:
    refused = pytest.raises(TypeError, match=r"q: got torch.float16; casts was built for torch.bfl")
    with torch.autocast("cpu", dtype=torch.float16), refused:
        CASTS.attention(*inputs(BF16))


def test_float64_and_what_is_no_tensor_are_refused_by_name() -> None:
    with torch.autocast("cpu", dtype=BF16):
        with pytest.raises(TypeError, match=r"q: got torch.float64"):
            CASTS.attention(*inputs(torch.float64))
        with pytest.raises(TypeError, match=r"k: got list"):
            CASTS.attention(inputs(BF16)[0], [1], inputs(BF16)[2])


def test_the_operator_is_the_same_with_and_without() -> None:
    plans = [lowered(AttentionSpec(64, mask=causal(), autocast=asked)) for asked in (True, False)]
    assert len({operator_digest(plan, backward_plan(plan)) for plan in plans}) == 1


def test_a_spec_without_it_has_its_old_digest() -> None:
    one, other = AttentionSpec(64), AttentionSpec(64, autocast=True)
    assert one.digest != other.digest
    assert one.digest == "ed4ebd09ca3e8ac46e95282a4751813b2068ebfa09ac8ec29d3ecdb6612da0b5"


@pytest.mark.parametrize("spec", LINEAR, ids=["states", "pairs"])
def test_linear_attention_casts_too(spec: AttentionSpec) -> None:
    """A module without the cast refuses float32; one that casts decays has other numbers."""
    module, given = rendered_module(spec, name="casts"), inputs()
    decay = torch.linspace(-0.3, -0.1, 100).view(1, 2, 50).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        out = module.attention(*given, decay=decay)
    by_hand = inputs()
    expected = module.attention(*(x.to(BF16) for x in by_hand), decay=decay)
    assert out.dtype == BF16 and torch.equal(out, expected)
    grads = torch.autograd.grad(out.float().sum(), [*given, decay])
    right = torch.autograd.grad(expected.float().sum(), [*by_hand, decay])
    assert all(map(torch.equal, grads, right))
    slipped = with_slip("q, k, v = _autocast(q, k, v)", "pass")
    slip = rendered_module(spec, name="casts", edit_source=slipped)
    with (
        torch.autocast("cpu", dtype=BF16),
        pytest.raises(TypeError, match=r"q: got torch.float32"),
    ):
        slip.attention(*given, decay=decay)


def test_a_step_of_linear_attention_casts() -> None:
    """As attention does; a step without the cast refuses float32."""
    module, given = rendered_module(LINEAR[0], name="casts"), inputs()
    rows, decay = [x.detach()[:, :, :1] for x in given], torch.zeros(1, 2, 1)
    with torch.autocast("cpu", dtype=BF16):
        out, _ = module.step(*rows, None, decay=decay)
    right, _ = module.step(*(x.to(BF16) for x in rows), None, decay=decay)
    assert out.dtype == BF16 and torch.equal(out, right)

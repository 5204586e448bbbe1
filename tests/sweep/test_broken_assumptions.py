"""Values and layouts that nobody promises not to pass: sinks of -inf, gradients far apart."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Constant, Mask, Tensor, causal, softmax
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import lower
from support.bits import with_bits
from support.cases import Case, inputs
from support.gluon import interpreted
from support.variants import rendered_module
from sweep.launch import check_kernel

SINKS = Tensor("sinks", ("num_q_heads",))

#: Of every query before the 20th all keys are hidden.
_LATE = causal() & Mask(lambda b, h, q_idx, kv_idx: q_idx >= 20, "late")
SPECS = {
    dtype: AttentionSpec(64, dtype, mask=_LATE, normaliser=softmax(sink=SINKS))
    for dtype in ("float16", "float32")
}

#: A head without a sink, one with a low one, and an ordinary one.
VALUES = torch.tensor([-torch.inf, -1e30, 0.5])


@functools.cache
def _module(dtype: str, *, gluon: bool = False) -> ModuleType:
    return rendered_module(SPECS[dtype], hopper=gluon, edit_source=interpreted if gluon else str)


def _case() -> Case:
    return Case(50, 50, q_heads=3, kv_heads=3, params={"sinks": VALUES})


def _held(out: torch.Tensor, lse: torch.Tensor, spec: AttentionSpec) -> None:
    """Rows without a key are 0, with the LSE of their sink; others are those of float64."""
    q, k, v = (x.double() for x in inputs(_case(), spec, getattr(torch, spec.dtype)))
    scores = (q @ k.mT * 64**-0.5).masked_fill(~torch.ones(50, 50).tril().bool(), -torch.inf)
    scores[:, :, :20] = -torch.inf
    sinks = VALUES.double()[:, None, None].expand(1, 3, 50, 1)
    weights = torch.cat([scores, sinks], -1)
    expected = torch.logsumexp(weights, -1)
    share = torch.exp(scores - expected[..., None]).nan_to_num(0.0)
    assert torch.allclose(out.double(), share @ v, atol=4e-3)
    assert torch.equal(out[:, :, :20], torch.zeros_like(out[:, :, :20]))
    assert torch.allclose(lse.double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(lse[0, 0, :20], torch.full((20,), -torch.inf, dtype=lse.dtype))


@pytest.mark.parametrize("dtype", SPECS)
def test_a_sink_of_minus_infinity_and_rows_without_keys(dtype: str) -> None:
    module, spec = _module(dtype), SPECS[dtype]
    tensors = inputs(_case(), spec, getattr(torch, dtype))
    config = module.CONFIGS["sm_90"]
    _held(*module._launch(*tensors, 64**-0.5, VALUES, config), spec)
    _held(*module.reference(*tensors, sinks=VALUES, return_lse=True), spec)
    check_kernel(module, spec, Case(50, 50, q_heads=3, kv_heads=3))


def test_the_same_in_gluon() -> None:
    spec = SPECS["float16"]
    module, plan = _module("float16", gluon=True), lower(spec, "late")
    config = rank_hopper(plan, hopper_space(plan).candidates)[0].as_dict()
    tensors = inputs(_case(), spec, torch.float16)
    _held(*module._launch_hopper(*tensors, 64**-0.5, VALUES, config), spec)


@pytest.mark.parametrize("gluon", [False, True])
def test_gradients_of_such_sinks(gluon: bool) -> None:
    """They are those of the reference, and 0 for a sink without a weight."""
    dtype = "float16" if gluon else "float32"
    module, spec = _module(dtype, gluon=gluon), SPECS[dtype]
    tensors = [x.detach().requires_grad_() for x in inputs(_case(), spec, getattr(torch, dtype))]
    found = []
    for function in (module.attention, module.reference):
        sinks = VALUES.clone().requires_grad_()
        out, lse = function(*tensors, sinks=sinks, return_lse=True)
        loss = out.float().square().sum() + lse[:, :, 20:].sum()
        found.append(torch.autograd.grad(loss, (*tensors, sinks)))
    for got, expected in zip(*found, strict=True):
        assert torch.isfinite(got).all() and torch.isfinite(expected).all()
        assert torch.allclose(got.float(), expected.float(), atol=2e-2 if gluon else 1e-4)
    assert found[0][3][0] == found[1][3][0] == 0.0


def test_a_gradient_of_the_output_whose_rows_are_far_apart() -> None:
    """63 rows, which a tile has whether they are there or not, times its step exceed 32 bits."""
    spec = SPECS["float32"]
    module, sinks = _module("float32"), torch.zeros(1)
    q, k, v = (torch.randn(1, 1, 2, 64) for _ in range(3))
    q[:, :, 0] = 0.0
    memory = torch.zeros(40_000_000 + 64)
    far = memory.as_strided((1, 1, 2, 64), (0, 0, 40_000_000, 1)).copy_(torch.randn(1, 1, 2, 64))
    out, lse = module.reference(q, k, v, sinks=sinks, return_lse=True)
    out = torch.randn_like(out)
    lse = torch.zeros_like(lse)
    config = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1, "USE_TMA": False}
    grads = [
        module._backward_kernels(
            q, k, v, 0.125, sinks, out, lse, grad_out, torch.zeros_like(lse), config, config
        )
        for grad_out in (far, far.contiguous())
    ]
    assert spec.head_dim == 64
    for of_far, of_near in zip(*grads, strict=True):
        assert torch.equal(of_far, of_near)


_SHOWN = Tensor("seen_keys", (None,), "bool")
_BIAS = Tensor("bias", ("num_q_heads", None))
_KNOWN = Constant("by_distance", [0.5, -0.5, 1.0])


def _outside(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + _BIAS[h, kv_idx - 3] + _KNOWN[q_idx - kv_idx]


#: Of 40 keys 30 have an element of the mask's table, and 24 one of the bias.
OUTSIDE = AttentionSpec(
    64, "float16", Mask(lambda b, h, q_idx, kv_idx: ~_SHOWN[kv_idx], "hidden"), score=_outside
)


@pytest.mark.parametrize("kernel", ["portable", "gluon", "reference"])
def test_elements_outside_of_a_table_are_0(kernel: str) -> None:
    module = rendered_module(OUTSIDE, hopper=True, edit_source=interpreted)
    case = Case(40, 40, q_heads=2, kv_heads=2)
    q, k, v = inputs(case, OUTSIDE, torch.float16)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(2, 24, generator=generator)
    shown = torch.rand(30, generator=generator) < 0.5
    of_key, of_pair = torch.zeros(2, 1, 40), torch.zeros(40, 40)
    of_key[:, 0, 3:27] = bias
    for step, known in enumerate((0.5, -0.5, 1.0)):
        of_pair += known * torch.ones(40 - step).diag(-step)
    scores = q.double() @ k.double().mT * 64**-0.5 + of_key + of_pair
    scores[..., :30].masked_fill_(shown, -torch.inf)
    expected, expected_lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    given = {param.name: {"bias": bias, "seen_keys": shown}[param.name] for param in OUTSIDE.params}
    if kernel == "reference":
        out, lse = module.reference(q, k, v, **given, return_lse=True)
    elif kernel == "gluon":
        plan = lower(OUTSIDE, "outside")
        config = rank_hopper(plan, hopper_space(plan).candidates)[0].as_dict()
        values = with_bits(module, OUTSIDE, q, k, given)
        out, lse = module._launch_hopper(q, k, v, 64**-0.5, *values, config)
    else:
        config, portable = module.CONFIGS["sm_90"], rendered_module(OUTSIDE)
        values = with_bits(portable, OUTSIDE, q, k, given)
        out, lse = portable._launch(q, k, v, 64**-0.5, *values, config)
    assert torch.allclose(out.double(), expected, atol=4e-3)
    assert torch.allclose(lse.double(), expected_lse, atol=4e-3)


_LEAST = torch.finfo(torch.float32).min
_OF_PAIR = Tensor("of_pair", ("q_len", "kv_len"))
_OF_KEY = Tensor("of_key", ("kv_len",))
_OF_ROW = Tensor("of_row", ("q_len",))


def _low(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + _OF_PAIR[q_idx, kv_idx] + _OF_KEY[kv_idx] + _OF_ROW[q_idx]


LOW = AttentionSpec(64, "bfloat16", mask=causal(), score=_low)


@functools.cache
def _low_module(*, gluon: bool) -> ModuleType:
    return rendered_module(LOW, hopper=gluon, edit_source=interpreted if gluon else str)


def _biases() -> dict[str, torch.Tensor]:
    """Rows of the least float, of several low ones, of -1e9 and of -inf; hidden and low keys."""
    of_pair, of_key, of_row = torch.zeros(150, 150), torch.zeros(150), torch.zeros(150)
    of_pair[40] = _LEAST
    of_pair[50], of_pair[50, 30:] = -1e38, _LEAST
    of_pair[60], of_pair[60, ::2] = -1e38, -torch.inf
    of_pair[70], of_pair[90], of_pair[100] = -torch.inf, -1e31, -1e9
    of_pair[149, :149] = _LEAST
    of_key[3], of_key[7] = -torch.inf, _LEAST
    of_row[80], of_row[120] = _LEAST, -torch.inf
    return {"of_pair": of_pair, "of_key": of_key, "of_row": of_row}


@pytest.mark.parametrize("kernel", ["portable", "gluon", "reference"])
def test_low_scores_are_scores(kernel: str) -> None:
    """A row of them is what a softmax makes of it; one of -inf alone is empty."""
    module = _low_module(gluon=kernel == "gluon")
    case = Case(150, 150, q_heads=2, kv_heads=2)
    q, k, v = inputs(case, LOW, torch.bfloat16)
    biases = _biases()
    values = [biases[param.name] for param in LOW.params]
    # Beside such a bias nothing is left of q·k in float32, nor of a float32 as small as 1e9 is.
    scores = (q.float() @ k.float().mT * 64**-0.5 + biases["of_pair"]) + biases["of_row"][:, None]
    scores = (scores + biases["of_key"]).masked_fill(
        ~torch.ones(150, 150).tril().bool(), -torch.inf
    )
    lse = scores.double().logsumexp(-1)
    seen = lse > -torch.inf
    expected = scores.double().softmax(-1).nan_to_num(0.0) @ v.double()
    if kernel == "reference":
        out, got_lse = module.reference(q, k, v, **biases, return_lse=True)
    elif kernel == "gluon":
        plan = lower(LOW, "low")
        config = rank_hopper(plan, hopper_space(plan).candidates)[0].as_dict()
        out, got_lse = module._launch_hopper(q, k, v, 64**-0.5, *values, config)
    else:
        out, got_lse = module._launch(q, k, v, 64**-0.5, *values, module.CONFIGS["sm_90"])
    # Of 1e9 a row's scores differ by what float32 rounds.
    rows = torch.arange(150) != 100
    assert torch.equal(got_lse > -torch.inf, seen)
    assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))
    assert torch.allclose(out.double()[:, :, rows], expected[:, :, rows], atol=1e-2)
    assert torch.isfinite(out).all()
    held = seen & (lse > -1.7e38)
    assert torch.allclose(got_lse.double()[held], lse[held], rtol=1e-5, atol=4e-3)
    assert (got_lse[seen & ~held] < -1.7e38).all()


@pytest.mark.parametrize("kernel", ["portable", "gluon"])
def test_rows_of_low_scores_pass_no_gradient(kernel: str) -> None:
    """Their LSE has lost what their weights add up to; all other gradients are as they were."""
    module = _low_module(gluon=kernel == "gluon")
    q, k, v = inputs(Case(150, 150, q_heads=2, kv_heads=2), LOW, torch.bfloat16)
    biases = _biases()
    low = torch.tensor([40, 50, 60, 80, 90, 100])
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    without = grad_out.index_fill(2, low, 0.0)
    found = []
    for function, grad in ((module.attention, grad_out), (module.reference, without)):
        tensors = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*tensors, **biases)
        found.append(torch.autograd.grad(out, tensors, grad))
    for got, expected in zip(*found, strict=True):
        assert torch.isfinite(got).all()
        assert torch.allclose(got.float(), expected.float(), atol=4e-2, rtol=2e-2)
    assert torch.equal(found[0][0][:, :, low], torch.zeros_like(found[0][0][:, :, low]))

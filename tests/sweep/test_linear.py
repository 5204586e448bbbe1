"""The kernels of linear attention in Triton's interpreter, and defects that the calls find."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    document,
    elu_plus_one,
    full,
    identity,
    linear,
    relu,
)
from support.recurrence import LinearCall, check_linear, drawn_inputs, recurrence
from support.sixteen_bits import in_16_bits
from support.slip import with_slip
from support.small_sums import NONE, SUBNORMAL, results_with, unequal
from support.variants import linear_specs, rendered_module


def square(x):
    """A feature map of a user's own, which is 0 at 0 and has a slope that changes its sign."""
    return x * x


def shifted(x):
    """Another one, which is not 0 at 0 and may be negative."""
    return 0.5 * x + 1.0


ELU = AttentionSpec(32, "float32", mask=causal(), normaliser=linear(elu_plus_one()))
UNEQUAL = AttentionSpec((40, 24), "float32", mask=causal(), normaliser=linear(relu()))
PLAIN = AttentionSpec(16, mask=causal(), normaliser=linear(identity(), normalise=False))
BIDIRECTIONAL = AttentionSpec((24, 40), "float32", mask=full(), normaliser=linear(elu_plus_one()))
SHIFTED = AttentionSpec(24, "float32", mask=full(), normaliser=linear(shifted, normalise=False))
SQUARE = AttentionSpec(16, mask=causal(), normaliser=linear(square))

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def of_features(number: int) -> Tensor:
    """A decay for each of so many features."""
    return Tensor("decay", ("batch", "num_kv_heads", "kv_len", number))


TOKENS = AttentionSpec(
    (40, 24), "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY)
)
PLAIN_TOKENS = AttentionSpec(
    16, mask=causal(), normaliser=linear(identity(), decay=DECAY, normalise=False)
)
MAPPED_TOKENS = AttentionSpec(
    16, "float32", mask=causal(), normaliser=linear(shifted, decay=DECAY, normalise=False)
)
SIXTEEN_BITS = AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY))
FEATURES = AttentionSpec(
    (40, 24), "float32", mask=causal(), normaliser=linear(elu_plus_one(), decay=of_features(40))
)
PLAIN_FEATURES = AttentionSpec(
    16, mask=causal(), normaliser=linear(identity(), decay=of_features(16), normalise=False)
)
MAPPED_FEATURES = AttentionSpec(
    16, "float32", mask=causal(), normaliser=linear(
        shifted, decay=of_features(16), normalise=False
    )
)  # fmt: skip
RETENTION = AttentionSpec(
    24, "float32", mask=causal(), normaliser=linear(
        identity(), decay=lambda h: -(h + 1) / 16, normalise=False
    )
)  # fmt: skip
NUMBERS = AttentionSpec(
    16, "float32", mask=causal(), normaliser=linear(relu(), decay=(-0.05, -math.inf))
)

#: Chunks have 16 rows, and a GPU four programs: so 83 rows of one head are two segments or more.
CALLS = {
    "several segments": (ELU, LinearCall(83, 83, batch=2)),
    "one key": (ELU, LinearCall(1, 1)),
    "whole chunks": (ELU, LinearCall(64, 64, strided=True)),
    "heads that share keys": (UNEQUAL, LinearCall(75, 75, batch=1, q_heads=6, kv_heads=2)),
    "segments of shared keys": (UNEQUAL, LinearCall(83, 83, q_heads=3)),
    "neither features nor sums": (PLAIN, LinearCall(83, 83, q_heads=2, kv_heads=1)),
    "all keys": (BIDIRECTIONAL, LinearCall(50, 83, q_heads=2, kv_heads=1)),
    "fewer keys": (SHIFTED, LinearCall(83, 35, batch=2)),
    "a map of the user's": (SQUARE, LinearCall(49, 49)),
    "through pointers": (UNEQUAL, LinearCall(40, 40, strided=True, tma=False)),
    "states": (ELU, LinearCall(83, 83, q_heads=2, states=True)),
    "states of one segment": (PLAIN, LinearCall(20, 20, batch=2, states=True)),
    "decays": (TOKENS, LinearCall(83, 83, batch=2)),
    "decays and states": (TOKENS, LinearCall(83, 83, q_heads=4, kv_heads=2, states=True)),
    "steep decays": (TOKENS, LinearCall(83, 83, batch=2, steep=True, states=True)),
    "a decay of one key": (TOKENS, LinearCall(1, 1, states=True)),
    "decays without sums": (PLAIN_TOKENS, LinearCall(83, 83, q_heads=2, states=True, steep=True)),
    "decays of mapped keys": (MAPPED_TOKENS, LinearCall(83, 83, strided=True, tma=False)),
    "decays of features": (FEATURES, LinearCall(83, 83, batch=2)),
    "decays of features and states": (
        FEATURES,
        LinearCall(83, 83, q_heads=4, kv_heads=2, states=True),
    ),
    "steep decays of features": (FEATURES, LinearCall(83, 83, q_heads=2, steep=True, states=True)),
    "decays of features of one key": (FEATURES, LinearCall(1, 1, states=True)),
    "decays of features without sums": (PLAIN_FEATURES, LinearCall(83, 83, q_heads=2, states=True)),
    "steep decays without sums": (PLAIN_FEATURES, LinearCall(83, 83, batch=2, steep=True)),
    "decays of mapped features": (MAPPED_FEATURES, LinearCall(83, 83, strided=True, tma=False)),
    "decays of heads": (RETENTION, LinearCall(83, 83, q_heads=4, kv_heads=2, states=True)),
    "numbers of heads": (NUMBERS, LinearCall(40, 40, q_heads=2, kv_heads=2)),
}

#: Defects: the text, what stands in its place, and the call that finds it. A text that stands in
#: several places is one in each of them.
DEFECTS = {
    "a query does not see its own key": ("<= offs_n[None, :]", "< offs_n[None, :]",
                                         "several segments"),
    "a value does not get its own query": (">= offs_n[None, :]", "> offs_n[None, :]",
                                           "several segments"),
    "a segment less": ("* num_states + segment\n        offs", "* num_states + 0\n        offs",
                       "several segments"),
    "a segment of queries less": ("+ segment + 1 - first", "+ segment", "states"),
    "all segments of keys but one": ("for i in range(0, num_states)",
                                     "for i in range(1, num_states)", "all keys"),
    "a state that is not carried on": ("state = tl.dot(tl.trans(v), phi_k, state)",
                                       "tl.dot(tl.trans(v), phi_k, state)",
                                       "neither features nor sums"),
    "sums of the chunk alone": ("sums = tl.sum(phi_q.to(tl.float32) * total[None, :], 1)",
                                "sums = 0.0 * tl.sum(phi_q.to(tl.float32) * total[None, :], 1)",
                                "several segments"),
    "sums of earlier chunks alone": ("sums += tl.sum(weights, 0)", "sums += 0.0",
                                     "several segments"),
    "features beyond the end": ("phi = tl.where(inside, _features(x), 0.0)",
                                "phi = _features(x)", "all keys"),
    "no slope of q": ("acc *= _slopes(q)", "acc *= 1.0", "a map of the user's"),
    "no slope of k": ("grad *= _slopes(k)", "grad *= 1.0", "a map of the user's"),
    "a state of one head's queries": ("head = kv_head * group + step % group",
                                      "head = kv_head * group", "segments of shared keys"),
    "queries that are not divided": (" * _inverse(sums)[:, None]", "",
                                     "several segments"),
    "no gradient of sums": ("delta = sums * tl.load(", "delta = 0.0 * tl.load(",
                            "several segments"),
    "no gradient by the output": ("delta -= tl.sum(", "delta -= 0.0 * tl.sum(",
                                  "several segments"),
    "sums of chunks of another head": ("((batch * num_q_heads + head).to(tl.int64) * num_chunks",
                                       "((batch * num_q_heads).to(tl.int64) * num_chunks",
                                       "heads that share keys"),
    "keys of another head": ("kv_head = head // (num_q_heads // num_kv_heads)",
                             "kv_head = head % num_kv_heads", "heads that share keys"),
    "one head of those that share a key": ("for member in range(0, group)",
                                           "for member in range(0, 1)",
                                           "neither features nor sums"),
    "no scale of gradients": ("grad *= scale", "grad *= 1.0", "neither features nor sums"),
    "no scale": ("acc *= scale", "acc *= 1.0", "fewer keys"),
    "states of one segment too many": ("begin = (segment + first) * segment_chunks",
                                       "begin = segment * segment_chunks", "several segments"),
    "keys that do not decay": ("to_end = tl.math.exp2((", "to_end = tl.math.exp2(0.0 * (",
                               "decays"),
    "queries that do not decay": ("from_start = tl.math.exp2(", "from_start = tl.math.exp2(0.0 * ",
                                  "decays"),
    "states that do not decay": ("whole = tl.math.exp2(", "whole = tl.math.exp2(0.0 * ", "decays"),
    "weights that do not decay": ("tl.where(visible, logs,", "tl.where(visible, 0.0 * logs,",
                                  "decays"),
    "segments that do not decay": ("state *= tl.math.exp2(log)", "state *= 1.0",
                                   "decays and states"),
    "multiples alone": ("tl.cumsum(log - coarse, 1)", "0.0 * tl.cumsum(log - coarse, 1)", "decays"),
    "one part of steep sums": ("tl.floor(log * 64.0 + 0.5) * 0.015625", "log", "steep decays"),
    "infinite logarithms": ("log = tl.where(log < -160.0, -160.0, log)", "log = log",
                            "steep decays"),
    "gradients of what is forgotten": ("grad = tl.where(log < -160.0, 0.0, grad)", "grad = grad",
                                       "steep decays"),
    "decays of another head": ("logs_ptr, batch, kv_head,",
                               "logs_ptr, batch, 0 * kv_head,", "decays and states"),
    "decays of each head of queries": ("tl.where(step % group == 0,", "tl.where(step >= 0,",
                                       "decays and states"),
    "nothing beyond a segment": ("beyond += tl.sum(parts, 0)", "beyond += 0.0", "decays"),
    "another state beyond a segment": ("segment + 1 - first", "segment + first",
                                       "decays and states"),
    "no products of sums": ("of_keys = num_states - 1 - i + first", "of_keys = num_states - 1 - i",
                            "decays"),
    "no rows of queries": ("rows = tl.sum(acc * ", "rows = tl.sum(0.0 * acc * ",
                           "decays of mapped keys"),
    "no rows of keys": ("rows = tl.sum(grad * ", "rows = tl.sum(0.0 * grad * ", "decays"),
    "no rows of divided queries": ("rows = tl.sum(acc * phi_q", "rows = tl.sum(0.0 * acc * phi_q",
                                   "decays"),
    "no first state": ("state += tl.load(given_ptr", "state += 0.0 * tl.load(given_ptr", "states"),
    "the gradient of another state": ("_slots(states, 0)", "_slots(states, -1)", "states"),
    "the state before the last segment": ("_slots(states, -1)", "_slots(states, -2)", "states"),
    "a last state's gradient times the scale": ("grad_kv / scale", "grad_kv",
                                                "states of one segment"),
    "a first state's gradient without the scale": ("scale * x for x in of_first",
                                                   "x for x in of_first", "states of one segment"),
    "features that do not decay from the start": (
        "decayed_q *= tl.math.exp2(log_of_first)", "decayed_q *= tl.math.exp2(0.0 * log_of_first)",
        "decays of features"),
    "features that do not decay to the end": (
        "decayed_k *= tl.math.exp2(log_of_second)",
        "decayed_k *= 1.0 + 0.0 * log_of_second", "decays of features"),
    "weights from the middle the wrong way": (
        "tl.where(second, middle, -middle)", "tl.where(second, -middle, middle)",
        "decays of features"),
    "one product of steep decays": ("(least_ptr + program) < -16.0", "(least_ptr + program) < -1e9",
                                    "steep decays of features"),
    "one product of steep gradients": ("tl.load(least) < -16.0", "tl.load(least) < -1e9",
                                       "steep decays of features"),
    "one product of steep decays in 16 bits": ("(least_ptr + program) < -64.0",
                                               "(least_ptr + program) < -1e9",
                                               "steep decays without sums"),
    "gradients of queries of no own keys": ("grad_q += of_own * phi_k", "grad_q += 0.0 * phi_k",
                                            "decays of features"),
    "gradients of keys of no own queries": ("grad_k += of_own * right", "grad_k += 0.0 * right",
                                            "decays of features"),
    "the largest of steep decays": ("tl.minimum(least, tl.min(middle))", "tl.max(middle)",
                                    "steep decays of features"),
    "steep decays of no smaller blocks": ("for shift in range(0, SHIFTS)",
                                          "for shift in range(1, SHIFTS)",
                                          "steep decays of features"),
    "steep decays of no own keys": ("tl.where(rows == others, products, 0.0)",
                                    "tl.where(rows > others, products, 0.0)",
                                    "steep decays of features"),
    "steep gradients of no own keys": ("tl.where(rows == others, of_weights, 0.0)",
                                       "tl.where(rows > others, of_weights, 0.0)",
                                       "steep decays of features"),
    "steep gradients of no smaller blocks": (
        "across = tl.where(_across_middle(rows, others, shift), of_weights, 0.0)",
        "across = tl.where(_across_middle(rows, others, SHIFTS - 1), of_weights, 0.0)",
        "steep decays of features"),
    "steep features that do not decay to the end": (
        "_sums_of_rows(others > rows, log", "_sums_of_rows(others >= rows, log",
        "steep decays of features"),
    "steep features that do not decay from the start": (
        "_sums_of_rows(others <= rows, log", "_sums_of_rows(others < rows, log",
        "steep decays of features"),
    "infinite logarithms of features": (
        "log = tl.where(log < -160.0, -160.0, log)", "log = log", "steep decays of features"),
    "decays of features of another head": (
        "+ kv_head * stride_dh", "+ 0 * kv_head * stride_dh", "decays of features and states"),
    "states whose features do not decay": (
        "state *= whole[None, :]", "state *= 1.0 + 0.0 * whole[None, :]", "decays of features"),
    "segments whose features do not decay": (
        "state *= tl.math.exp2(log)[:, None]", "state *= 1.0", "decays of features and states"),
    "sums that do not decay": ("total *= whole", "total *= 1.0", "decays of features"),
    "no gradients of a chunk's weights": (
        "grad_weights = tl.dot(g, tl.trans(v)", "grad_weights = 0.0 * tl.dot(g, tl.trans(v)",
        "decays of features"),
    "no sums of queries by their deltas": (
        "decayed_q.to(tl.float32) * delta[:, None]", "decayed_q.to(tl.float32)",
        "decays of features"),
    "nothing beyond a chunk": ("beyond[None, :] + later", "later", "decays of features"),
    "nothing beyond a segment of features": ("beyond += product", "beyond += 0.0 * product",
                                             "decays of features"),
    "a decay that counts for no own query": (
        "_sums_of_rows(others >= rows, change", "_sums_of_rows(others > rows, change",
        "decays of features"),
    "gradients of decays of queries alone": (
        "change -= grad_k", "change -= 0.0 * grad_k", "decays of features"),
    "gradients of what features forget": (
        "tl.where(forgotten, 0.0, grad_log)", "grad_log", "steep decays of features"),
    "no slope of decayed features": ("grad_q *= _slopes(q)", "grad_q *= 1.0",
                                     "decays of mapped features"),
    "no slope of decayed keys": ("grad_k *= _slopes(k)", "grad_k *= 1.0",
                                 "decays of mapped features"),
    "a scale less": ("grad_weights * scale", "grad_weights * 1.0",
                     "decays of features without sums"),
    "a product of segments without the scale": ("scale * product", "product",
                                                "decays of features without sums"),
    "one head of those that share decays": (
        "q_head = kv_head * group + member", "q_head = kv_head * group",
        "decays of features without sums"),
    "decayed keys of one head alone": ("if kv_head * group == q_head:", "if q_head == 0:",
                                       "decays of features and states"),
}  # fmt: skip


def _shorter(call: LinearCall) -> LinearCall:
    """Of three chunks, which find most defects in half the time."""
    return replace(call, q_len=min(call.q_len, 40), kv_len=min(call.kv_len, 40))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    spec, call = CALLS[name]
    module = rendered_module(spec)
    check_linear(module, spec, call)
    if any(name == found_by for _, _, found_by in DEFECTS.values()):
        check_linear(module, spec, _shorter(call))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]

    spec, found_by = CALLS[call]
    module = rendered_module(spec, edit_source=with_slip(old, new))
    with pytest.raises(AssertionError, match="error"):
        for tried in (_shorter(found_by), found_by):
            check_linear(module, spec, tried)


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("spec", [ELU, TOKENS, FEATURES])
def test_any_chunk_gives_the_same(spec: AttentionSpec, chunk: int) -> None:
    module = rendered_module(spec)
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["CHUNK"] = chunk
    check_linear(module, spec, LinearCall(150, 150, steep=True, states=True))


#: Of the launches for steep chunks: a program looks at none but its first, or ends before its last.
SELDOM = {
    "": ("", ""),
    "looks at one": ("tl.num_programs(0) * tl.arange(0, 8)", "0 * tl.arange(0, 8)"),
    "computes one": ("tl.cdiv(num_programs - tl.program_id(0), tl.num_programs(0))", "1"),
}


@pytest.mark.parametrize("name", SELDOM)
def test_steep_chunks_are_found_wherever_they_are(name: str) -> None:
    """Programs look at three chunks each; a decay is steep in the last chunk of the last head."""
    edit = with_slip(*SELDOM[name]) if name else str
    module, spec = rendered_module(MAPPED_FEATURES, edit_source=edit), MAPPED_FEATURES
    tensors = drawn_inputs(spec, LinearCall(83, 83, q_heads=4, kv_heads=4))
    tensors["decay"][:, 3, 82:, ::3] = -1e3
    grad = torch.randn(1, 4, 83, 16, generator=torch.Generator().manual_seed(1))

    def found(run: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v, decay = (x.to(dtype).detach().requires_grad_() for x in tensors.values())
        out = run(q, k, v, decay)
        return (out, *torch.autograd.grad(out, (q, k, v, decay), grad.to(dtype)))

    mine = found(lambda *x: module.attention(*x[:3], decay=x[3]), torch.float32)
    right = found(lambda *x: recurrence(spec, *x)[0], torch.float64)
    near = all(torch.allclose(x.double(), y, atol=1e-4) for x, y in zip(mine, right, strict=True))
    assert near == (not name)


def test_rounding_does_not_add_up_in_gradients_of_decays() -> None:
    """A query's products are summed up as rounded, not taken as the gradient of its sum."""
    module = rendered_module(SIXTEEN_BITS, edit_source=in_16_bits)
    check_linear(module, SIXTEEN_BITS, LinearCall(400, 400, batch=4))


#: The sums that gradients of decays carry on from step to step, and how short steps are made.
CARRIED = {
    "decays": (TOKENS, '"BLOCK": 1024}', '"BLOCK": 16}'),
    "decays of features": (FEATURES, "BLOCK=16", "BLOCK=2"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_steps_through_a_segment_carry_on(name: str) -> None:
    spec, long, short = CARRIED[name]

    def carries(source: str) -> str:
        assert long in source
        return source.replace(long, short)

    def lost(source: str) -> str:
        return carries(source).replace("beyond += tl.sum(change, 0)", "beyond += 0.0")

    call = LinearCall(150, 150, q_heads=2)
    check_linear(rendered_module(spec, edit_source=carries), spec, call)
    with pytest.raises(AssertionError, match="gradient of decay: error"):
        check_linear(rendered_module(spec, edit_source=lost), spec, call)


@pytest.mark.parametrize("dim", [2, 3])
def test_decays_of_features_far_apart(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have any strides, and a chunk's offsets have 32 bits; such reads ended processes."""
    module, shape, strides = rendered_module(PLAIN_FEATURES), (1, 1, 3, 16), []
    near, (q, k, v) = module._near, (torch.randn(shape).bfloat16().requires_grad_() for _ in "qkv")
    for step in (2**23 - 1, 2**23):
        far = torch.empty_strided(shape, [step if i == dim else 1 for i in range(4)], device="meta")
        assert (near(far) is far) == (step < 2**23)
        assert near(far[:, :, :1, :1]).stride(dim) == step  # nothing is beyond it

    def noted(decay: torch.Tensor) -> torch.Tensor:
        strides.append(decay.stride())
        return near(decay)

    monkeypatch.setattr(module, "_near", noted)
    decay = torch.zeros(16, 1, 1, 3).permute(1, 2, 3, 0)
    out = module.attention(q, k, v, decay=decay)
    torch.autograd.grad(out.sum(), (q, k, v))
    with torch.no_grad():
        module.step(*(x[:, :, :1] for x in (q, k, v)), None, decay=decay[:, :, :1])
    assert strides == [decay.stride()] * 3


#: Of causal and of full attention, and of the kernels for ids that return.
DIVIDED = {
    "causal": (ELU, {}),
    "full": (BIDIRECTIONAL, {}),
    "decays": (TOKENS, {"decay": torch.zeros(1, 2, 40)}),
    "decays of features": (FEATURES, {"decay": torch.zeros(1, 2, 40, 40)}),
    "ids that return": (
        AttentionSpec(16, "float32", mask=causal() & document(), normaliser=linear(elu_plus_one())),
        {"document_ids": torch.tensor([[1] * 13 + [2] * 6 + [1] * 21], dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("run", ["attention", "reference"])
@pytest.mark.parametrize("name", DIVIDED)
def test_a_subnormal_sum_counts_as_none(name: str, run: str) -> None:
    """Its inverse is infinite, and made results and gradients of a whole head NaN."""
    spec, given = DIVIDED[name]
    module = rendered_module(spec)
    found = (results_with(module, spec, x, run=run, **given) for x in (SUBNORMAL, NONE))
    assert not unequal(*found)


def test_a_subnormal_sum_is_found_to_be_divided_by() -> None:
    edit = with_slip("tl.abs(sums) < 1.1754943508222875e-38", "sums == 0.0")
    module = rendered_module(ELU, edit_source=edit)
    found = (results_with(module, ELU, x) for x in (SUBNORMAL, NONE))
    assert unequal(*found) == ["out", "q", "k", "v"]


def test_a_step_with_a_subnormal_sum() -> None:
    module = rendered_module(ELU)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 1, 1, 32, generator=generator) for _ in "kv")
    for of_query in (SUBNORMAL, NONE):
        out, _ = module.step(torch.full_like(k, of_query), k - 10.0, v, None)
        assert not out.any()


@pytest.mark.parametrize("name", linear_specs())
def test_shipped(name: str) -> None:
    spec = linear_specs()[name]
    check_linear(rendered_module(spec, name=name), spec, LinearCall(37, 37, q_heads=2, kv_heads=2))

"""The gradients of tensors that scores read, by each way in which a kernel sums them up."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from flashgen import (
    AttentionSpec,
    Constant,
    Float,
    Int,
    Mask,
    Tensor,
    causal,
    full,
    kv_len,
    log,
    q_len,
    sigmoid_attention,
    sink_tokens,
    sliding_window,
    softmax,
    tanh,
    truncate,
    where,
)
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.cases import Case, inputs
from support.contract import check_gradients
from support.turns import in_turns, some
from support.variants import rendered_module
from sweep.backward import check_backward

_by_row = Tensor("by_row", ("num_q_heads", "q_len"), "float32")
_by_key = Tensor("by_key", ("batch", "kv_len"), "float32")
_by_block = Tensor("by_block", (20,), "float32")
_near = Tensor("near", ("num_q_heads", 240), "float32")
_pairs = Tensor("pairs", ("batch", "num_q_heads", "q_len", "kv_len"), "float32")
_common = Tensor("common", ("q_len", "kv_len"), "float32")
_ids = Tensor("ids", ("batch", "q_len"), "int32")

#: Score functions, and what sums of their gradients are told apart by.
LEARNING = {
    "rows": (("rows",), lambda s, b, h, q, kv: s * (1 + _by_row[h, q])),
    "rows_that_share": (("rows",), lambda s, b, h, q, kv: s + kv * 0.1 * _by_block[q // 9]),
    "rows_by_ids": (("rows",), lambda s, b, h, q, kv: s + kv * 0.1 * _by_block[_ids[b, q] % 20]),
    "columns": (("columns",), lambda s, b, h, q, kv: s * _by_key[b, kv] + _by_key[b, kv]),
    "columns_that_share": (("columns",), lambda s, b, h, q, kv: s + q * 0.1 * _by_block[kv // 9]),
    "diagonals": (("diagonals",), lambda s, b, h, q, kv: s + _near[h, kv - q + 120]),
    "diagonals_that_share": (
        ("diagonals",),
        lambda s, b, h, q, kv: s * (1 + _near[h, abs(q - kv) // 5]),
    ),
    "several": (
        ("diagonals", "diagonals", "rows", "columns"),
        lambda s, b, h, q, kv: (
            s + _near[h, kv - q + 120] * _by_key[b, kv] + _near[h, q - kv + 99] * _by_row[h, q]
        ),
    ),
    "pairs": (("elements",), lambda s, b, h, q, kv: s + _pairs[b, h, q, kv]),
    "common_pairs": (("elements",), lambda s, b, h, q, kv: s + _common[q, kv]),
}
MASKS = {
    "full": full(),
    "causal": causal(align="bottom_right"),
    "window": sliding_window(9, 3, align="top_left"),
    "two_runs": causal(align="bottom_right")
    & (sink_tokens(3) | sliding_window(12, 0, align="bottom_right")),
}

# With different numbers of turns, of tiles of queries and of keys.
CALLS = (
    (Case(1, 1, 1, 2, 2), 32, 16),
    (Case(17, 45, 2, 2, 1), 32, 16),
    (Case(45, 17, 2, 2, 1), 16, 32),
    (Case(65, 65, 1, 2, 2), 64, 16),
    (Case(33, 100, 1, 2, 1), 16, 16),
    (Case(100, 33, 1, 1, 1), 16, 64),
)


def _spec(name: str, mask: str = "causal", **fields: object) -> AttentionSpec:
    fields = {"dtype": "float32", "mask": MASKS[mask], "score": LEARNING[name][1], **fields}
    return AttentionSpec(16, **fields)  # type: ignore[arg-type]


@functools.cache
def _module(name: str, mask: str = "causal") -> ModuleType:
    return rendered_module(_spec(name, mask))


MASKED_CALLS = [(mask, i) for i in range(len(CALLS)) for mask in MASKS]


@pytest.mark.parametrize(("name", "mask", "i"), in_turns(LEARNING, MASKED_CALLS, every=13))
def test_every_sum_and_mask(name: str, mask: str, i: int) -> None:
    spec, (case, m, n) = _spec(name, mask), CALLS[i]
    backward = backward_plan(lower(spec, "learning"))
    assert sorted(item.over for item in backward.input_gradients) == sorted(LEARNING[name][0])
    check_backward(_module(name, mask), spec, case, BLOCK_M=m, BLOCK_N=n, USE_TMA=m == n)


@pytest.mark.parametrize(
    ("name", "kind"),
    in_turns(
        ["rows", "columns", "diagonals", "pairs"], ["half", "sigmoid", "sink", "capped"], every=2
    ),
)
def test_other_kernels(name: str, kind: str) -> None:
    score = LEARNING[name][1]
    sinks = Tensor("sinks", ("num_q_heads",), "float32")
    fields: dict[str, object] = {
        "half": {"dtype": "float16"},
        "sigmoid": {"normaliser": sigmoid_attention()},
        "sink": {"normaliser": softmax(sink=sinks)},
        "capped": {"score": lambda *at: 5.0 * tanh(score(*at) / 5.0)},
    }[kind]  # type: ignore[assignment]
    spec = _spec(name, "two_runs", **fields)
    module = rendered_module(spec)
    for case, m, n in CALLS[1:4]:
        check_backward(module, spec, case, BLOCK_M=m, BLOCK_N=n)


def test_distances_outside_of_the_table() -> None:
    """Behind the diagonal an index is below 0: torch counts from the end, but nobody looks."""
    spec = AttentionSpec(
        16, "float32", MASKS["causal"], score=lambda s, b, h, q, kv: s + _near[h, q - kv]
    )
    module = rendered_module(spec)
    for length in (5, 49, 70):
        check_backward(module, spec, Case(length, length, 2, 2, 1))


_levels = Tensor("levels", ("num_q_heads",), "float32")
_marks = Tensor("marks", ("batch", "kv_len"), "float16")
_BELOW = Mask(lambda b, h, q, kv: (_marks[b, kv] < 0.5) & (q >= kv), "below")

#: Variants with a tensor of floats that no weight changes with.
DECIDING = {
    "what_is_seen": (_marks, AttentionSpec(16, "float32", _BELOW)),
    "what_is_seen_beside_a_sink": (
        _marks,
        AttentionSpec(16, "float32", _BELOW, normaliser=softmax(sink=_levels)),
    ),
    "what_is_seen_beside_a_bias": (
        _marks,
        AttentionSpec(16, "float32", _BELOW, lambda s, b, h, q, kv: s + _by_row[h, q]),
    ),
    "which_score": (
        _marks,
        AttentionSpec(
            16, "float32", causal(), lambda s, b, h, q, kv: where(_marks[b, kv] < 0.5, s, 2 * s)
        ),
    ),
    "a_whole_bias": (
        _marks,
        AttentionSpec(
            16, "float32", causal(), lambda s, b, h, q, kv: s + truncate(3 * _marks[b, kv])
        ),
    ),
    "nothing": (
        _marks,
        AttentionSpec(16, "float32", causal(), lambda s, b, h, q, kv: s + 0 * _marks[b, kv]),
    ),
    "which_sink": (
        _levels,
        AttentionSpec(
            16,
            "float32",
            causal(),
            normaliser=softmax(sink=lambda b, h: where(_levels[h] > 0, 1.0, -1.0)),
        ),
    ),
}


@pytest.mark.parametrize("name", some(DECIDING, every=2))
def test_tensors_that_only_decide(name: str) -> None:
    tensor, spec = DECIDING[name]
    module = rendered_module(spec)
    for case in (Case(21, 21, 2, 2, 1), Case(70, 70, 1, 4, 2)):
        check_gradients(module, spec, case)
    params = case.arguments(spec)
    leaf = params[tensor.name].requires_grad_()
    q, k, v = (x.requires_grad_() for x in inputs(case, spec, torch.float32))
    out = module.attention(q, k, v, **params)
    of_q, nothing = torch.autograd.grad(out.sum(), (q, leaf), allow_unused=True)
    assert of_q is not None and nothing is None


_factor = Float("factor", 0.5)
_step = Int("step", 3)
_turns = Tensor("turns", ("batch",), "int32")
_gains = Constant("gains", [0.5, -1.0, 2.0, 0.25])

#: Logits of sinks that are made of more than learned tensors.
SINKS = {
    "a_float": lambda b, h: _levels[h] * _factor,
    "an_int": lambda b, h: _levels[h] + _step * 0.25 - b,
    "an_int_tensor": lambda b, h: _levels[h] * _turns[b] / 40,
    "a_constant": lambda b, h: _levels[h] * _gains[h],
    "kv_len": lambda b, h: _levels[h] - log(kv_len + 1.0),
    "q_len": lambda b, h: _levels[h] * q_len / 30,
    "all": lambda b, h: _levels[h] * _factor * _gains[h] + _turns[b] / (kv_len + q_len + _step),
}


@pytest.mark.parametrize("name", some(SINKS, every=2))
def test_sinks_of_more_than_learned_tensors(name: str) -> None:
    spec = AttentionSpec(16, "float32", MASKS["causal"], normaliser=softmax(sink=SINKS[name]))
    module = rendered_module(spec)
    for case in (Case(21, 37, 2, 4, 2), Case(40, 17, 1, 4, 4)):
        check_gradients(module, spec, case)


def _gradients(module: ModuleType, spec: AttentionSpec, case: Case) -> tuple[torch.Tensor, ...]:
    params = case.arguments(spec)
    floats = [name for name, x in params.items() if x.is_floating_point()]
    learned = {name: params[name].clone().requires_grad_() for name in floats}
    q, k, v = (x.requires_grad_() for x in inputs(case, spec, torch.float32))
    out = module.attention(q, k, v, **params | learned)
    return torch.autograd.grad((out * out.detach()).sum(), (q, k, v, *learned.values()))


def _run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs the programs of a grid one after the other: here the last one first."""
    set_grid_idx = InterpreterBuilder.set_grid_idx

    def reversed_idx(self: InterpreterBuilder, x: int, y: int, z: int) -> None:
        set_grid_idx(self, self.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reversed_idx)


@pytest.mark.parametrize("name", some(LEARNING, every=3))
def test_the_same_bits_in_whatever_order_programs_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, spec, case = _module(name), _spec(name), Case(83, 83, 2, 2, 1)
    forwards = _gradients(module, spec, case)
    _run_backwards(monkeypatch)
    backwards = _gradients(module, spec, case)
    same = [torch.equal(x, y) for x, y in zip(forwards, backwards, strict=True)]
    # The one whose elements several programs add to shows that the order counts.
    assert same == [True, True, True, *[name != "common_pairs"] * (len(same) - 3)]


@pytest.mark.parametrize("at_once", [1, 1500, 6000])
def test_diagonals_of_some_tiles_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec("several")
    module = rendered_module(spec)
    monkeypatch.setattr(module, "SUMS_AT_ONCE", at_once)
    for case in (Case(83, 83, 1, 2, 1), Case(31, 100, 2, 2, 2)):
        check_backward(module, spec, case, BLOCK_M=16, BLOCK_N=32)

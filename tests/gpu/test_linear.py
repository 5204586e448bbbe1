"""Linear attention on a GPU: both passes, against its recurrence in float64, which the CPU runs."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    favor,
    full,
    identity,
    linear,
    sliding_window,
    softmax_features,
)
from flashgen.codegen.module import render_module
from flashgen.tuning.choose import choices, search_spaces
from support.linear_packed import PackedCall, check_packed
from support.matrices import CASES, check_matrices
from support.over_pairs import PairCall, check_pairs
from support.recurrence import LinearCall, drawn_inputs
from support.variants import imported, lowered
from support.vector_maps import VectorCall, check_call

pytestmark = pytest.mark.gpu

#: The device under test; the interpreter's tensors are on "cpu".
DEVICE = "cuda"

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
OF_FEATURES = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 64))

SPECS = {
    "elu": AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one())),
    "heads": AttentionSpec(
        (64, 40),
        "float32",
        mask=causal(),
        normaliser=linear(identity(), decay=lambda h: -(h + 1) / 16, normalise=False),
    ),
    "documents": AttentionSpec(
        64, mask=document() & causal(), normaliser=linear(elu_plus_one(), decay=DECAY)
    ),
    "features": AttentionSpec(
        64, mask=causal(), normaliser=linear(elu_plus_one(), decay=OF_FEATURES)
    ),
    "favor": AttentionSpec(64, mask=causal(), normaliser=linear(favor(256))),
    "softmax": AttentionSpec(
        (40, 64), "float32", mask=full(), normaliser=linear(softmax_features())
    ),
    "chunks": AttentionSpec(
        64, mask=chunked(100) & causal(), normaliser=linear(identity(), normalise=False)
    ),
    "varlen": AttentionSpec(
        64,
        mask=causal(),
        normaliser=linear(elu_plus_one(), decay=DECAY),
        forms=("dense", "varlen"),
    ),
    "long": AttentionSpec(128, mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY)),
    **{name: CASES[name].spec for name in ("pair", "room")},
}

CALLS: dict[str, LinearCall] = {
    "elu": LinearCall(333, 333, batch=2, q_heads=4, kv_heads=2, states=True),
    "heads": LinearCall(333, 333, q_heads=6, kv_heads=2, strided=True, states=True),
    "documents": LinearCall(
        201, 201, batch=2, q_heads=4, kv_heads=2, ids="padding", states=True, nan=True
    ),
    "features": LinearCall(201, 201, q_heads=4, kv_heads=2, states=True, steep=True),
    "favor": VectorCall(333, 333, batch=2, q_heads=4, kv_heads=2),
    "softmax": VectorCall(150, 333, q_heads=4, kv_heads=2),
    "chunks": LinearCall(333, 333, batch=2, q_heads=4, kv_heads=2, states=True),
}

#: Other masks, which kernels over all pairs compute.
PAIRS = {
    "window": (
        AttentionSpec((64, 128), mask=sliding_window(100, 0), normaliser=linear(elu_plus_one())),
        PairCall(333, 333),
    ),
    "hidden": (
        AttentionSpec(128, mask=document(), normaliser=linear(elu_plus_one())),
        PairCall(201, 201, hidden=True),
    ),
    "decays": (
        AttentionSpec(
            64, mask=sliding_window(100, 0), normaliser=linear(elu_plus_one(), decay=DECAY)
        ),
        PairCall(201, 201, steep=True),
    ),
    "random": (
        AttentionSpec(64, mask=sliding_window(100, 0), normaliser=linear(favor(128))),
        PairCall(201, 201),
    ),
}

#: How many programs a module takes to run side by side, but for the long sequence: few, so that
#: segments have several chunks.
PROGRAMS = 16


@functools.cache
def _module(name: str) -> ModuleType:
    """A variant's module with the configurations that a build chooses."""
    plan = lowered(SPECS[name], name)
    chosen = choices(plan, {}, search_spaces(plan), ())
    module = imported(f"linear_{name}", render_module(plan, chosen))
    if name != "long":
        module.__dict__["_multiprocessors"] = lambda device: PROGRAMS
    return module


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str) -> None:
    check_call(_module(name), SPECS[name], CALLS[name], DEVICE)


def test_packed_sequences() -> None:
    """One is empty, one is of one token, one goes from segment to segment."""
    call = PackedCall((5, 0, 333, 64, 1, 130), q_heads=4, kv_heads=2, states=True, steep=True)
    check_packed(_module("varlen"), SPECS["varlen"], call, DEVICE)


@pytest.mark.parametrize("name", PAIRS)
def test_over_all_pairs(name: str) -> None:
    """By the dense kernels: a window, a mask of data with NaN in its padding, decays of keys."""
    spec, call = PAIRS[name]
    plan = lowered(spec, f"pairs_{name}")
    chosen = choices(plan, {}, search_spaces(plan), ())
    check_pairs(imported(f"pairs_{name}", render_module(plan, chosen)), spec, call, DEVICE)


@pytest.mark.parametrize("name", ["pair", "room"])
def test_products_with_matrices(name: str) -> None:
    """Of each head, for q and for k; and of packed sequences with NaN in their room."""
    check_matrices(_module(name), CASES[name], DEVICE)


def _call(
    name: str, leaves: dict[str, torch.Tensor], rows: slice, state: Any, *, step: bool = False
) -> Any:
    """(out, last state) of some of the rows, by `attention` or by `step`."""
    module = _module(name)
    part = {x: y[:, :, rows] for x, y in leaves.items()}
    drawn = (_matrix(),) if name == "favor" else ()
    decay = {"decay": part["decay"]} if "decay" in part else {}
    given = (part["q"], part["k"], part["v"], *drawn)
    if step:
        return module.step(*given, state, **decay)
    return module.attention(*given, **decay, initial_state=state, return_state=True)


@functools.cache
def _matrix() -> torch.Tensor:
    matrix: torch.Tensor = _module("favor").draw_features(1, device=DEVICE)
    return matrix


def _parts(state: Any) -> list[torch.Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


def _far(mine: torch.Tensor, right: torch.Tensor) -> float:
    """The error's part of what is right, by their norms."""
    mine, right = mine.detach().double(), right.detach().double()
    return float((mine - right).norm() / right.norm())


@pytest.mark.parametrize("name", ["elu", "heads", "features", "favor"])
def test_states_go_on_from_half_to_half_and_step_to_step(name: str) -> None:
    spec, call = SPECS[name], LinearCall(333, 333, batch=2, q_heads=4, kv_heads=2)
    near = 1e-5 if spec.dtype == "float32" else 2e-2
    leaves = {x: y.to(DEVICE).requires_grad_() for x, y in drawn_inputs(spec, call).items()}
    whole, last = _call(name, leaves, slice(0, 333), None)
    first, middle = _call(name, leaves, slice(0, 166), None)
    second, end = _call(name, leaves, slice(166, 333), middle)
    halves = torch.cat((first, second), 2)
    grad = torch.randn_like(whole)
    grads = [torch.autograd.grad(x, list(leaves.values()), grad) for x in (halves, whole)]
    errors = {"out": _far(halves, whole)}
    errors |= {f"state {n}": _far(x, y) for n, (x, y) in enumerate(_pairs(end, last, name))}
    errors |= {f"d{x}": _far(y, z) for x, y, z in zip(leaves, *grads, strict=True)}
    with torch.no_grad():
        _, state = _call(name, leaves, slice(0, 329), None)
        for n in range(329, 333):
            out, state = _call(name, leaves, slice(n, n + 1), state, step=True)
            errors[f"step {n}"] = _far(out, whole[:, :, n : n + 1])
    stepped = _pairs(state, last, name)
    errors |= {f"stepped {n}": _far(x, y) for n, (x, y) in enumerate(stepped)}
    assert all(x <= near for x in errors.values()), errors


def _pairs(state: Any, last: Any, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of two states; of random features with both multiplied by their exponents' powers."""
    both = []
    for x in (state, last):
        parts = _parts(x)
        if name == "favor":
            kv, z, exponent = (y.double() for y in parts)
            factor = torch.exp2(exponent)
            parts = [kv * factor[..., None, None], z * factor[..., None]]
        both.append([y.detach() for y in parts])
    return list(zip(*both, strict=True))


#: What both passes over the longest sequence take: nine tensors of 4.3 GB, and smaller ones.
LONG_BYTES = 42 * 10**9
ROWS, BEFORE = 2048, 2048


def test_more_than_2_to_31_elements() -> None:
    """The last tokens, held to float64 of them alone: decays make them forget all before."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < LONG_BYTES + 3 * 10**9:
        pytest.skip(f"needs {LONG_BYTES / 1e9:.0f} GB of GPU memory, and {free / 1e9:.0f} are free")
    torch.cuda.reset_peak_memory_stats()
    check_long(2**20 + 1, 16)
    peak = torch.cuda.max_memory_allocated()
    assert peak <= LONG_BYTES, f"{peak / 1e9:.1f} GB"


def check_long(length: int, heads: int) -> None:
    """Fails unless the last rows of all results are near to float64's.

    A state keeps less than 2^-128 of what is ROWS tokens away.
    """
    torch.manual_seed(0)
    on = {"dtype": torch.bfloat16, "device": DEVICE}
    q, k, v = (torch.randn(1, heads, length, 128, **on).requires_grad_() for _ in range(3))
    decay = torch.rand(1, heads, length, device=DEVICE).mul_(-0.1).sub_(0.05).requires_grad_()
    leaves = (q, k, v, decay)
    out = _module("long").attention(q, k, v, decay=decay)
    grad = v.detach()  # another tensor of this size is spared
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    window = [x.detach()[:, :, -(ROWS + BEFORE) :].double().requires_grad_() for x in leaves]
    exact = _module("long").reference(*window[:3], decay=window[3])
    right = (exact, *torch.autograd.grad(exact, window, window[2].detach()))
    for name, x, y in zip(("out", "dq", "dk", "dv", "ddecay"), found, right, strict=True):
        for rows in (ROWS, 16):  # the last 16 of the last head are beyond 2^31
            mine, expected = (z[0, :, -rows:].double().flatten(1) for z in (x, y))
            errors = (mine - expected).norm(dim=1) / expected.norm(dim=1)
            assert errors.max() <= 0.03, f"{name} of the last {rows}: {errors.max():.3g}"

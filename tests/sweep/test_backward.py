"""The backward kernels against float64 autograd: what other sweeps leave out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Mask,
    Tensor,
    causal,
    exp,
    full,
    sigmoid,
    sigmoid_attention,
    sliding_window,
    softmax,
)
from support.cases import LAYOUTS, Case, inputs
from support.contract import check_gradients
from support.trials import TILES
from support.turns import in_turns
from support.variants import rendered_module, shipped_module, shipped_specs
from support.vocabulary import VOCABULARY, Entry
from sweep import hopper
from sweep.backward import check_backward

SPECS = shipped_specs()

HEADS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 2), (2, 2, 2))  # batch, of q, of k and v
DTYPES = ("float16", "float32")


@functools.cache
def _module(name: str, dtype: str) -> ModuleType:
    return rendered_module(VOCABULARY[name].spec(dtype))


def _trials(entry: Entry) -> Iterator[tuple[Case, str, tuple[int, int], bool]]:
    """Every remainder of both lengths by a tile's short side; the rest takes turns."""
    layouts = list(LAYOUTS)
    for r in range(16):
        q_len = 16 + r + 32 * (r % 3 % 2)
        kv_len = q_len if entry.equal_lengths else (7 * r + 3) % 16 + 16 * (r // 2 % 3) or 16
        case = Case(q_len, kv_len, *HEADS[r % len(HEADS)], layouts[r % len(layouts)])
        yield entry.case(case), DTYPES[r % 3 % 2], TILES[r // 2 % 2], r % 2 == 0


@pytest.mark.full
@pytest.mark.parametrize("name", VOCABULARY)
def test_the_vocabulary(name: str) -> None:
    entry = VOCABULARY[name]
    for case, dtype, (m, n), tma in _trials(entry):
        try:
            spec = entry.spec(dtype)
            check_backward(_module(name, dtype), spec, case, BLOCK_M=m, BLOCK_N=n, USE_TMA=tma)
        except Exception as error:
            error.add_note(f"{case} {dtype} {m} x {n}")
            raise


#: One of each way to sum up what a row adds; the others are for a full run.
ROWS = ("causal_d64", "documents_d128", "sinks_softmax_d64")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ROWS else pytest.mark.full) for x in SPECS]
)
def test_the_lse_alone(name: str) -> None:
    case = Case(21, 21, batch=2, q_heads=4, kv_heads=2)
    check_backward(shipped_module(name), SPECS[name], case, lse_only=True)


@pytest.mark.parametrize("normaliser", [softmax(), sigmoid_attention()], ids=str)
def test_no_gradient_of_the_lse_is_one_of_zeros(normaliser: Any) -> None:
    spec = AttentionSpec(16, "float32", causal(), normaliser=normaliser)
    module = rendered_module(spec)
    tensors = inputs(Case(21, 21, 2, 2, 1), spec, torch.float32)
    out, lse = module.reference(*tensors, return_lse=True)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    given = (*tensors, 0.25, out, lse, grad_out)
    zeros = module._gradients(*given, torch.zeros_like(lse))
    assert all(map(torch.equal, module._gradients(*given, None), zeros))


@pytest.mark.parametrize("more", [0, 64, 4096])
def test_sums_are_cleared_along_with_the_rows(more: int) -> None:
    """All of them, though there be more than rows, and nothing behind them."""
    spec = SPECS["full_d64"]
    module = rendered_module(spec, hopper=True)
    out, grad_out = torch.ones(2, 2, 3, 150, 64)
    num_sums = 2 * 3 * 256 + more
    sums = torch.full(((num_sums + 32) * 2, 32), torch.nan)
    given = out, torch.zeros(2, 3, 150), grad_out, None
    rows = torch.empty(2, 2, 3, 256)
    assert module._rows(*given, rows=rows, sums=sums, num_sums=num_sums) is rows
    assert not sums[: num_sums * 2].any() and sums[num_sums * 2 :].isnan().all()
    assert torch.equal(rows, module._rows(*given))


@pytest.mark.parametrize("name", ["full_d64", "causal_d64"])
def test_sums_begin_at_zero_whatever_was_in_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of queries, and those of tiles of keys that all programs share."""
    made = torch.Tensor.new_empty

    def poisoned(*given: Any, **options: Any) -> torch.Tensor:
        return made(*given, **options).fill_(torch.nan)

    module, shared = hopper.shipped(name), []
    count = getattr(module, "_num_shared", lambda *_: 0)
    monkeypatch.setitem(
        module.__dict__, "_num_shared", lambda *given: (shared.append(count(*given)), shared[-1])[1]
    )
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    hopper.check_hopper_backward(module, SPECS[name], Case(150, 150, 1, 2, 1))
    assert shared == ([2] if name == "full_d64" else [])


@pytest.mark.parametrize("scale", [1e-3, 0.3, 6.0])
@pytest.mark.parametrize("name", ["causal_d64", "softcap_d128", "alibi_d128", "sinks_softmax_d64"])
def test_scales(name: str, scale: float) -> None:
    """Down to weights that are all alike, up to rows that see one key alone."""
    check_backward(shipped_module(name), SPECS[name], Case(45, 45, 1, 2, 1, scale=scale))


@pytest.mark.parametrize("way", ["past the operators", "through them"])
@pytest.mark.parametrize("name", ["causal_d64", "sinks_softmax_d64", "alibi_d128", "causal_d80"])
def test_through_the_public_call(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd: forward kernel, what is saved, backward kernels."""
    if way == "through them":
        monkeypatch.setattr(shipped_module(name), "_is_plain", lambda *tensors: False)
    case = Case(40, 40, batch=2, q_heads=4, kv_heads=2, layout="transposed")
    check_gradients(shipped_module(name), SPECS[name], case)


@pytest.mark.filterwarnings("ignore:.*not a double precision")
@pytest.mark.parametrize(
    "name",
    ["softcap", *(pytest.param(name, marks=pytest.mark.full) for name in ("causal", "sink"))],
)
def test_gradcheck(name: str) -> None:
    """By torch's own differences, of float32 kernels."""
    entry = VOCABULARY[name]
    spec, case = entry.spec("float32"), entry.case(Case(3, 3))
    module, params = _module(name, "float32"), case.arguments(spec)
    leaves = tuple(x.requires_grad_() for x in inputs(case, spec, torch.float32))

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        out, lse = module.attention(*qkv, return_lse=True, **params)
        return out.sum() + lse.sum()

    assert torch.autograd.gradcheck(attention, leaves, eps=1e-2, atol=2e-2, rtol=2e-2)


def _spec(mask: Mask, score: object = None) -> AttentionSpec:
    return AttentionSpec(head_dim=16, dtype="float32", mask=mask, score=score)  # type: ignore[arg-type]


def test_rows_and_keys_without_a_partner() -> None:
    """Rows that see nothing get no gradient, nor do keys that no row sees."""
    left = Int("left", default=3)
    spec = _spec(sliding_window(left, 0, align="top_left"))
    module = rendered_module(spec)
    for q_len, kv_len in ((70, 20), (20, 70)):
        check_backward(module, spec, Case(q_len, kv_len, 1, 2, 1))


_levels = Tensor("levels", ("num_q_heads",), "float32")
_lifts = Tensor("lifts", ("num_q_heads", "kv_len"), "float32")
_tilts = Tensor("tilts", ("num_q_heads", "q_len"), "float32")

WITHOUT_PRODUCTS = {
    "a number": lambda s, b, h, q, kv: 0 * s + 0.25,
    "of heads": lambda s, b, h, q, kv: _levels[h],
    "of queries": lambda s, b, h, q, kv: _tilts[h, q],
    "of keys": lambda s, b, h, q, kv: _lifts[h, kv],
    "of distances": lambda s, b, h, q, kv: 0.1 * (kv - q),
}


@pytest.mark.parametrize(("name", "dropout"), in_turns(WITHOUT_PRODUCTS, [False, True], every=2))
def test_scores_that_leave_the_products_out(name: str, dropout: bool) -> None:
    """Tiles that are no squares: their scores lie the other way round where keys are rows."""
    score = WITHOUT_PRODUCTS[name]
    for normaliser in (softmax(), sigmoid_attention()):
        spec = AttentionSpec(16, "float32", causal(), score, normaliser=normaliser, dropout=dropout)
        module = rendered_module(spec)
        for m, n in TILES:
            check_backward(module, spec, Case(45, 45, 1, 2, 1), BLOCK_M=m, BLOCK_N=n)


def test_scores_far_below_zero() -> None:
    """Log-sum-exps of -500: weights of queries and keys past the ends would be infinite."""
    low = Tensor("low", ("num_q_heads",), "float32")
    spec = _spec(full(), lambda score, b, h, q, kv: score - low[h])
    case = Case(21, 37, q_heads=2, kv_heads=1, params={"low": torch.tensor([500.0, 2.0])})
    check_backward(rendered_module(spec), spec, case)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_slopes_that_are_infinite_where_nothing_is_seen() -> None:
    """exp of what a hidden key scores is too large for float32, in which torch's are no numbers."""
    spec = _spec(causal(), lambda score, b, h, q, kv: score + exp((kv - q) * 8.0 - 8.0) * score)
    module = rendered_module(spec)
    for length in (17, 40):
        tensors = inputs(Case(length, length), spec, torch.float32)
        found = []
        for attention, dtype in (
            (module.attention, torch.float32),
            (module.reference, torch.float64),
        ):
            leaves = [x.to(dtype).requires_grad_() for x in tensors]
            out = attention(*leaves)
            found.append(torch.autograd.grad((out * out.detach()).sum(), leaves))
        for mine, right in zip(*found, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_sigmoids_of_what_lies_far_below_zero() -> None:
    """exp(150) is infinite in float32; the slope of the sigmoid there is 0, as torch has it."""
    spec = _spec(causal(), lambda s, b, h, q, kv: s + s * sigmoid(s - 150) + sigmoid(-s) ** 2)
    check_backward(rendered_module(spec), spec, Case(40, 40))


def test_a_tensor_read_twice() -> None:
    table = Tensor("table", ("num_q_heads", "kv_len"), "float32")
    spec = _spec(causal(), lambda score, b, h, q, kv: score * table[h, q] + table[h, kv])
    for length in (16, 45):
        check_backward(rendered_module(spec), spec, Case(length, length, 1, 2, 1))


def test_gradients_that_are_expanded_or_transposed() -> None:
    """As `out.sum()` and a projection after the attention give them."""
    module = shipped_module("causal_fp32_d64")
    tensors = inputs(Case(33, 33, 2, 2, 2), SPECS["causal_fp32_d64"], torch.float32)
    weight = torch.randn(2, 33, 2, 64, generator=torch.Generator().manual_seed(4))
    for objective in (lambda out: out.sum(), lambda out: (out.transpose(1, 2) * weight).sum()):
        found = []
        for attention, dtype in (
            (module.attention, torch.float32),
            (module.reference, torch.float64),
        ):
            leaves = [x.to(dtype).clone().requires_grad_() for x in tensors]
            found.append(torch.autograd.grad(objective(attention(*leaves)), leaves))
        for mine, right in zip(*found, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of_distances", [True, False])
def test_runs_of_queries_in_any_order(of_distances: bool) -> None:
    """Keys may see two runs of queries of which the call says which comes first."""
    one, other = Int("one", min=0), Int("other", min=0)

    def two(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = q - kv if of_distances else q
        return ((x >= one) & (x < one + 10)) | ((x >= other) & (x < other + 10))

    spec = _spec(Mask(two, "two"))
    module = rendered_module(spec)
    for first, second in ((30, 3), (3, 30), (5, 9)):
        case = Case(90, 90, 1, 2, 1, params={"one": first, "other": second})
        check_backward(module, spec, case)

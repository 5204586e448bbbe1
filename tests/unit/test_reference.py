"""The eager oracle, against plain loops and against torch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashgen import (
    Float,
    Int,
    Mask,
    Tensor,
    alibi,
    causal,
    document,
    full,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
    tree,
)
from flashgen.reference import attention_reference, final_scores, visibility

LEFT = Int("left", 2)


def tensors(
    heads: tuple[int, int] = (2, 2),
    lengths: tuple[int, int] = (5, 5),
    dims: tuple[int, int] = (8, 8),
    batch: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(h: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, h, length, dim, generator=generator)

    return (
        random(heads[0], lengths[0], dims[0]),
        random(heads[1], lengths[1], dims[0]),
        random(heads[1], lengths[1], dims[1]),
    )


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Any, scale: float
) -> tuple[list[list[float]], list[float]]:
    """One head in plain Python: the output rows and the LSE."""
    out, lses = [], []
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if seen(i, j)]
        scores = [scale * sum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in keys]
        total = sum(math.exp(s) for s in scores)
        weights = [math.exp(s) / total for s in scores]
        columns = range(v.shape[1])
        out.append(
            [float(sum(w * v[j, c] for w, j in zip(weights, keys, strict=True))) for c in columns]
        )
        lses.append(math.log(total) if total else -math.inf)
    return out, lses


@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4), (1, 6)])
def test_the_oracle_is_softmax_written_out(lengths: tuple[int, int]) -> None:
    q, k, v = tensors(heads=(4, 2), lengths=lengths, dims=(8, 3), batch=1)
    offset = lengths[1] - lengths[0]
    out, lse = attention_reference(
        q, k, v, causal(align="bottom_right"), scale=0.3, return_lse=True
    )
    assert out.dtype == lse.dtype == torch.float64
    for head in range(4):
        expected, expected_lse = by_hand(
            q[0, head].double(),
            k[0, head // 2].double(),
            v[0, head // 2].double(),
            lambda i, j: i + offset >= j,
            0.3,
        )
        torch.testing.assert_close(out[0, head], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(lse[0, head], torch.tensor(expected_lse, dtype=torch.float64))


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_agrees_with_torchs_own_attention(is_causal: bool) -> None:
    q, k, v = (x.double() for x in tensors(heads=(6, 3), lengths=(9, 9)))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    out = attention_reference(q, k, v, causal() if is_causal else full())
    torch.testing.assert_close(out, expected)


def test_a_row_that_sees_nothing_is_zero_with_an_lse_of_minus_infinity() -> None:
    q, k, v = tensors(lengths=(5, 3))
    out, lse = attention_reference(q, k, v, causal(align="bottom_right"), return_lse=True)
    assert not out[:, :, :2].any() and (lse[:, :, :2] == -math.inf).all()
    assert out.isfinite().all() and lse[:, :, 2:].isfinite().all()
    out, lse = attention_reference(q, k, v, ~full(), return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0)])
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    out, lse = attention_reference(*tensors(lengths=lengths), full(), return_lse=True)
    assert out.shape == (2, 2, lengths[0], 8) and lse.shape == (2, 2, lengths[0])
    assert not out.any() and (lse == -math.inf).all()


def test_float32_on_request() -> None:
    q, k, v = tensors()
    out = attention_reference(q, k, v, full(), dtype=torch.float32)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float32
    exact = attention_reference(q, k, v, full())
    assert isinstance(exact, torch.Tensor)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_scale_defaults_to_one_over_the_root_of_the_head_dim() -> None:
    q, k, v = tensors(dims=(16, 8))
    torch.testing.assert_close(
        attention_reference(q, k, v, full()), attention_reference(q, k, v, full(), scale=0.25)
    )


def test_gradients_flow_through_it() -> None:
    q, k, v = (x.double().requires_grad_() for x in tensors(lengths=(5, 3), batch=1))
    out = attention_reference(q, k, v, causal(align="bottom_right"))
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def shown(mask: Mask, q_len: int, kv_len: int, **params: int) -> list[str]:
    seen = visibility(mask, 1, 1, q_len, kv_len, params=params)
    return ["".join(".x"[int(cell)] for cell in row) for row in seen.reshape(q_len, kv_len)]


def test_the_masks_own_function_runs_on_tensors() -> None:
    assert shown(sliding_window(LEFT, 0), 4, 4) == ["x...", "xx..", "xxx.", ".xxx"]
    assert shown(sliding_window(LEFT, 0), 4, 4, left=0) == ["x...", ".x..", "..x.", "...x"]
    assert shown(~causal(align="bottom_right"), 2, 4) == ["...x", "...."]
    assert shown(full() & ~full() | causal(), 2, 2) == ["x.", "xx"]
    assert shown(full(), 1, 3) == ["xxx"]


def test_functions_of_torch_and_scalars_run_as_written() -> None:
    threshold = LEFT * 2  # made once, outside

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = torch.abs(q_idx - kv_idx) < threshold
        return torch.logical_and(near, ~(LEFT > 5)) & (threshold >= 0)

    assert shown(Mask(mask_mod, "near"), 3, 4, left=1) == ["xx..", "xxx.", ".xxx"]
    assert shown(Mask(mask_mod, "near"), 1, 2, left=6) == [".."]
    assert shown(Mask(lambda b, h, q, kv: LEFT > 1, "switch"), 1, 2, left=2) == ["xx"]


def test_batch_and_head_reach_the_mask() -> None:
    mask = Mask(lambda b, h, q, kv: (kv <= h) & (q >= b), "by head")
    seen = visibility(mask, 2, 3, 2, 3)
    assert seen.shape == (2, 3, 2, 3)
    assert seen[1, 1].tolist() == [[False] * 3, [True, True, False]]


def test_what_it_is_not_given_is_named() -> None:
    q, k, v = tensors()
    window = sliding_window(Int("before"), Int("after"))
    with pytest.raises(ValueError, match="needs a value for after, before"):
        attention_reference(q, k, v, window)
    with pytest.raises(ValueError, match=r"causal\(\) needs q_len == kv_len, got 4 and 5"):
        attention_reference(q[:, :, :4], k, v, causal())
    with pytest.raises(ValueError, match=r"softcap\(cap\) needs a value for cap"):
        attention_reference(q, k, v, full(), score=softcap(Float("cap", above=0)))
    with pytest.raises(ValueError, match=r"softmax\(sink=sinks\) needs a value for sinks"):
        attention_reference(
            q, k, v, full(), normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",)))
        )
    with pytest.raises(ValueError, match=r"alibi\(2\) needs q_len == kv_len, got 4 and 5"):
        attention_reference(q[:, :, :4], k, v, full(), score=alibi(2))


def test_a_score_function_comes_after_the_scale_and_before_the_mask() -> None:
    q, k, v = tensors(dims=(8, 3), batch=1)
    slopes = torch.tensor([0.5, 0.25])
    score = softcap(Float("cap", 2.0, above=0)).then(alibi(Tensor("slopes", ("num_q_heads",))))
    out, lse = attention_reference(
        q, k, v, causal(), score=score, scale=0.3, params={"slopes": slopes}, return_lse=True
    )
    for head in range(2):
        products = 0.3 * q[0, head].double() @ k[0, head].double().T
        distance = torch.arange(5) - torch.arange(5)[:, None]
        scores = 2 * torch.tanh(products / 2) + slopes[head].item() * distance
        weights = torch.exp(scores).tril()
        torch.testing.assert_close(lse[0, head], weights.sum(-1).log())
        expected = weights / weights.sum(-1, keepdim=True) @ v[0, head].double()
        torch.testing.assert_close(out[0, head], expected)


def test_what_integers_become_in_a_score_function_is_double_too() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + 2.0 ** (-(h + 1) / 3) * torch.sqrt(kv_idx + 2) + torch.tanh(q_idx / 7)

    got = final_scores(torch.zeros(1, 1, 6, 7, dtype=torch.float64), full(), score_mod)
    for i in range(6):
        for j in range(7):
            exact = 2 ** (-1 / 3) * math.sqrt(j + 2) + math.tanh(i / 7)
            assert abs(got[0, 0, i, j].item() - exact) < 1e-14
    assert torch.get_default_dtype() == torch.float32
    # In half precision the function itself computes in single.
    low = final_scores(torch.zeros(1, 1, 6, 7, dtype=torch.float16), full(), score_mod)
    assert torch.equal(low, got.half())


def test_the_default_dtype_survives_a_function_that_fails() -> None:
    def fails(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if isinstance(score, torch.Tensor):
            raise KeyError("missing")
        return score

    with pytest.raises(KeyError):
        attention_reference(*tensors(), full(), score=fails)
    assert torch.get_default_dtype() == torch.float32


def test_a_score_of_minus_infinity_hides_the_key() -> None:
    q, k, v = tensors()

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx > kv_idx, score, -math.inf)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx > kv_idx

    for normaliser in (softmax(), softmax(sink=1.0), sigmoid_attention()):
        given = {"normaliser": normaliser, "return_lse": True}
        hidden = attention_reference(q, k, v, full(), score=score_mod, **given)
        torch.testing.assert_close(hidden, attention_reference(q, k, v, mask_mod, **given))


def test_a_sink_is_one_more_key_without_a_value() -> None:
    q, k, v = tensors(lengths=(5, 3))
    sinks = torch.tensor([0.5, -2.0], requires_grad=True)
    mask = causal(align="bottom_right")
    normaliser = softmax(sink=Tensor("sinks", ("num_q_heads",)))
    out, lse = attention_reference(
        q, k, v, mask, normaliser=normaliser, params={"sinks": sinks}, return_lse=True
    )
    plain, plain_lse = attention_reference(q, k, v, mask, return_lse=True)
    share = torch.exp(plain_lse - lse)
    torch.testing.assert_close(out, plain * share[..., None])
    torch.testing.assert_close(1 - share, torch.exp(sinks.double()[:, None] - lse))
    assert not out[:, :, :2].any()
    assert torch.equal(lse[0, :, 0], sinks.double())
    (gradient,) = torch.autograd.grad(out.sum() + lse.sum(), sinks)
    assert gradient.isfinite().all() and gradient.all()


def test_sigmoid_adds_up_what_each_key_contributes() -> None:
    q, k, v = tensors(lengths=(4, 3))
    out, lse = attention_reference(
        q,
        k,
        v,
        causal(align="bottom_right"),
        normaliser=sigmoid_attention(),
        scale=1.0,
        return_lse=True,
    )
    weights = torch.sigmoid(q.double() @ k.double().mT).tril(-1)
    torch.testing.assert_close(out, weights @ v.double())
    torch.testing.assert_close(lse, weights.sum(-1).log())
    assert (lse[:, :, 0] == -math.inf).all()


def test_gradients_reach_tensors_and_pass_by_what_is_not_seen() -> None:
    q, k, v = (x.double().requires_grad_() for x in tensors(lengths=(5, 3), batch=1))
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    score = alibi(Tensor("slopes", ("num_q_heads",)), align="bottom_right")
    for normaliser in (softmax(), softmax(sink=0.0), sigmoid_attention()):
        out, lse = attention_reference(
            q,
            k,
            v,
            causal(align="bottom_right"),
            score=score,
            normaliser=normaliser,
            params={"slopes": slopes},
            return_lse=True,
        )
        objective = out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
        gradients = torch.autograd.grad(objective, (q, k, v, slopes))
        assert all(x.isfinite().all() and x.any() for x in gradients)
        assert gradients[-1].dtype == torch.float32


def test_tensors_reach_the_mask() -> None:
    ids = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]], dtype=torch.int32)
    seen = visibility(document(), 2, 3, 4, 4, params={"document_ids": ids})
    assert torch.equal(seen[:, 0], ids[:, :, None] == ids[:, None])
    table = torch.ones(2, 1, 1, dtype=torch.bool)
    assert visibility(tree(), 2, 1, 1, 3, params={"ancestors": table}).all()
    # Of nothing, nothing is looked up.
    none = document(align="bottom_right")
    assert not visibility(none, 2, 1, 3, 0, params={"document_ids": ids[:, :0]}).numel()

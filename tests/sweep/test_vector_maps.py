"""The kernels that map whole vectors to features, and defects that the calls find."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec, Tensor, causal, favor, full, linear, softmax_features
from support.recurrence import LinearCall
from support.sixteen_bits import in_16_bits
from support.slip import with_slip
from support.variants import rendered_module
from support.vector_maps import VectorCall, both_signs, check_call, results_of, standardised

SOFTMAX = AttentionSpec((24, 16), "float32", mask=causal(), normaliser=linear(softmax_features()))
STANDARD = AttentionSpec((24, 16), "float32", mask=full(), normaliser=linear(standardised))
SIGNS = AttentionSpec(16, mask=causal(), normaliser=linear(both_signs, normalise=False))
FAVOR = AttentionSpec((24, 16), "float32", mask=causal(), normaliser=linear(favor(40)))
FULL = AttentionSpec((24, 16), "float32", normaliser=linear(favor(32)))
WIDE = AttentionSpec((16, 128), "float32", mask=causal(), normaliser=linear(favor()))
WIDE_FULL = AttentionSpec((16, 40), mask=full(), normaliser=linear(favor(256)))
MANY_FULL = AttentionSpec(16, "float32", mask=full(), normaliser=linear(favor(384)))
MANY = AttentionSpec(16, mask=causal(), normaliser=linear(favor(384)))
WIDE_SIGNS = AttentionSpec(
    128, "float32", mask=causal(), normaliser=linear(both_signs, normalise=False)
)

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
FORGETFUL = AttentionSpec(
    (24, 16), "float32", mask=causal(), normaliser=linear(softmax_features(), decay=DECAY)
)
SIGNS_OF_TOKENS = AttentionSpec(
    128, "float32", mask=causal(), normaliser=linear(both_signs, decay=DECAY, normalise=False)
)
FORGETFUL_FAVOR = AttentionSpec(
    (16, 40), "float32", mask=causal(), normaliser=linear(favor(256), decay=DECAY)
)
SIXTEEN_BITS = AttentionSpec(64, mask=causal(), normaliser=linear(favor(256), decay=DECAY))
RETENTION = AttentionSpec(
    16, "float32", mask=causal(), normaliser=linear(favor(32), decay=lambda h: -(h + 1) / 8)
)

#: Chunks have 16 rows, and a GPU four programs.
CALLS = {
    "softmax": (SOFTMAX, VectorCall(83, 83, q_heads=2)),
    "steep softmax": (SOFTMAX, VectorCall(35, 35, factor=40.0)),
    "sums of sums": (STANDARD, VectorCall(35, 50, q_heads=2, kv_heads=2, strided=True)),
    "two pieces": (SIGNS, VectorCall(49, 49, q_heads=2)),
    "random features": (FAVOR, VectorCall(83, 83, batch=2, q_heads=4, kv_heads=2, strided=True)),
    "a scale": (FAVOR, VectorCall(40, 40, scale=0.5, tma=False)),
    "steep keys": (FAVOR, VectorCall(50, 50, batch=2, q_heads=2, kv_heads=2, factor=4.0)),
    "long keys": (FULL, VectorCall(20, 50, batch=4, q_heads=2, kv_heads=2, factor=16.0)),
    "tiles of a state": (WIDE, VectorCall(83, 83, batch=2, q_heads=2)),
    "tiles through pointers": (WIDE, VectorCall(40, 40, tma=False)),
    "tiles of a padded state": (WIDE_FULL, VectorCall(35, 50, q_heads=2)),
    "tiles of three": (MANY, VectorCall(40, 40, q_heads=2)),
    "long keys in tiles": (MANY_FULL, VectorCall(20, 50, factor=8.0)),
    "tiles of two pieces": (WIDE_SIGNS, VectorCall(40, 40)),
    "decays": (FORGETFUL, VectorCall(83, 83, q_heads=4, kv_heads=2)),
    "decays of tiles": (SIGNS_OF_TOKENS, VectorCall(83, 83, batch=2, q_heads=2)),
    "decays of random features": (FORGETFUL_FAVOR, VectorCall(83, 83, q_heads=2)),
    "decays of heads": (RETENTION, VectorCall(50, 50, q_heads=2, kv_heads=2)),
    "states": (FORGETFUL, LinearCall(83, 83, q_heads=4, kv_heads=2, states=True)),
    "states of tiles": (SIGNS_OF_TOKENS, LinearCall(83, 83, q_heads=2, states=True)),
}

#: Defects: the text, what stands in its place, and the call that finds it.
DEFECTS = {
    "elements that are not there": ("offs_x[None, :] < 24,", "offs_x[None, :] < 99,",
                                    "softmax"),
    "no largest element": ("largest_0 = tl.max(", "largest_0 = 0.0 * tl.max(", "steep softmax"),
    "no gradient of a sum": ("grad_sum_1 = tl.sum(", "grad_sum_1 = 0.0 * tl.sum(", "sums of sums"),
    "no gradient of an inner sum": ("grad_sum_0 = tl.sum(", "grad_sum_0 = 0.0 * tl.sum(",
                                    "sums of sums"),
    "pieces in one place": ("row * 32 + 16", "row * 32 + 0", "two pieces"),
    "the gradient of one piece": ("grad += grad_1 * (", "grad += 0.0 * (", "two pieces"),
    "each key by its largest": ("tl.load(peaks_ptr + of_batches) - 56.0",
                                "tl.load(peaks_ptr + of_batches) - 56.0 + offs_n[:, None]",
                                "random features"),
    "no peaks of keys": ("return tl.load(peaks_ptr + of_batches) - 56.0", "return -56.0",
                         "long keys"),
    "the peaks of one head": ("tl.load(peaks_ptr + of_batches)", "tl.load(peaks_ptr)", "long keys"),
    "queries by the first of them": ("peaks_ptr + row + offs_n, mask", "peaks_ptr + offs_n, mask",
                                     "long keys"),
    "peaks without lengths": ("- 0.5 * tl.sum(x * x, 1)) *", "- 0.0 * tl.sum(x * x, 1)) *",
                              "long keys in tiles"),
    "no length of vectors": ("(products - 0.5 *", "(products - 0.0 *", "random features"),
    "no scale inside": ("tl.trans(matrix), input_precision=\"ieee\") * root",
                        "tl.trans(matrix), input_precision=\"ieee\")", "a scale"),
    "no gradient by the length": ("(root * root * total)", "(0.0 * total)", "random features"),
    "the scale once in the gradient": ("grad = grad * root", "grad = grad * 1.0", "a scale"),
    "features of the first tile": ("column = tl.program_id(1) * 128",
                                   "column = tl.program_id(1) * 0", "tiles of a state"),
    "states of the first tile": ("states_ptr += column * 128", "states_ptr += 0",
                                 "tiles of a state"),
    "sums of the first tile": ("sums_of_chunks_ptr += column", "sums_of_chunks_ptr += 0",
                               "tiles of a state"),
    "totals of the first tile": ("totals_ptr += column", "totals_ptr += 0", "tiles of a state"),
    "a tile that is not added": ("acc += tl.load(partial)", "acc += 0.0", "tiles of a state"),
    "sums that are not added": ("sums += tl.load(sums_ptr", "sums += 0.0 * tl.load(sums_ptr",
                                "tiles of a state"),
    "gradients that are not added": ("grad += tl.load(partial)", "grad += 0.0", "tiles of a state"),
    "sums of chunks that do not decay": ("phi.to(tl.float32) * to_end[:, None]",
                                         "phi.to(tl.float32)", "decays"),
    "random features that do not decay": ("phi.to(tl.float32) * to_end[:, None]",
                                          "phi.to(tl.float32)", "decays of heads"),
    "decays by one tile": ("rows_of_keys.sum(0)", "rows_of_keys[0]", "decays of tiles"),
    "rows of queries by one tile": ("rows_of_queries.sum(0)", "rows_of_queries[0]",
                                    "decays of tiles"),
    "given states of the first tile": ("        states_ptr += column * 128",
                                       "        states_ptr += 0", "states of tiles"),
    "partial results of one chunk": ("+ chunk) * 128 * CHUNK", "+ chunk) * 0 * CHUNK",
                                     "tiles of a state"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    spec, call = CALLS[name]
    check_call(rendered_module(spec), spec, call)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]

    spec, found_by = CALLS[call]
    with pytest.raises(AssertionError, match="error"):
        check_call(rendered_module(spec, edit_source=with_slip(old, new)), spec, found_by)


#: What keeps rounding from adding up over a segment.
ROUNDING = {
    "no rows of queries": ("rows += tl.sum(acc * phi_q", "rows = tl.sum(0.0 * acc * phi_q"),
    "states in one part": ("low = (state - ", "low = 0.0 * (state - "),
    "features as they are in no state": ("rows = tl.sum(acc * rounded, 1)",
                                         "rows = tl.sum(0.0 * acc * rounded, 1)"),
    "keys as they are in no state": ("rows = tl.sum(grad * rounded, 1)",
                                     "rows = tl.sum(0.0 * grad * rounded, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["", *ROUNDING])
def test_gradients_of_decays_in_16_bits(name: str) -> None:
    """Some features are much larger than others, and their rounding does not average out."""
    edit = with_slip(*ROUNDING[name]) if name else str
    module = rendered_module(SIXTEEN_BITS, edit_source=lambda x: in_16_bits(edit(x)))
    *_, (_, x, right, low, _) = results_of(module, SIXTEEN_BITS, VectorCall(400, 400, batch=4))
    error, of_torch = ((y - right).norm() / right.norm() for y in (x, low))
    assert (error <= 1.5 * of_torch) == (not name), f"error {error:.3g}, of torch {of_torch:.3g}"

"""Linear attention within runs of positions in Triton's interpreter, and defects that it finds."""

from __future__ import annotations

from typing import Any

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
    favor,
    identity,
    linear,
    relu,
    softmax_features,
)
from support.recurrence import LinearCall, marks_of, shown_of
from support.slip import with_slip
from support.variants import rendered_module
from support.vector_maps import VectorCall, both_signs, check_call, unit_length

IDS = Tensor("ids", ("batch", "kv_len"), "int32")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
PACKED = document() & causal()


def of_own(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask of a user's own, for which -1 is an id like others."""
    return (IDS[b, q_idx] == IDS[b, kv_idx]) & (q_idx >= kv_idx)


def shifted(x: Any) -> Any:
    """A feature map that is not 0 at 0 and may be negative."""
    return 0.5 * x + 1.0


DOCUMENTS = AttentionSpec((24, 16), "float32", mask=PACKED, normaliser=linear(elu_plus_one()))
TOKENS = AttentionSpec(
    (40, 24), "float32", mask=PACKED, normaliser=linear(elu_plus_one(), decay=DECAY)
)
OWN = AttentionSpec(
    16, "float32", mask=of_own, normaliser=linear(identity(), decay=DECAY, normalise=False)
)
MAPPED = AttentionSpec(
    16, "float32", mask=PACKED, normaliser=linear(shifted, decay=DECAY, normalise=False)
)
RAW = AttentionSpec(
    16, "float32", mask=PACKED, normaliser=linear(identity(), decay=DECAY, normalise=False)
)
SUMMED = AttentionSpec(16, "float32", mask=PACKED, normaliser=linear(identity()))
PLAIN = AttentionSpec(
    16,
    mask=document(Tensor("ids", ("kv_len",), "int32")) & causal(),
    normaliser=linear(identity(), normalise=False),
)
CHUNKS = AttentionSpec(
    16,
    "float32",
    mask=chunked(Int("chunk", 8, min=1)) & causal(),
    normaliser=linear(identity(), normalise=False),
)
CHUNKS_OF_TOKENS = AttentionSpec(
    24, "float32", mask=chunked(16) & causal(), normaliser=linear(relu(), decay=DECAY)
)
SIGNS = AttentionSpec((128, 16), "float32", mask=PACKED, normaliser=linear(both_signs, decay=DECAY))
SOFTMAX = AttentionSpec(
    16,
    "float32",
    mask=PACKED,
    normaliser=linear(softmax_features(), decay=lambda h: -(h + 1) / 16, normalise=False),
)
DIRECTIONS = AttentionSpec(
    16, "float32", mask=PACKED, normaliser=linear(unit_length, normalise=False)
)
FAVOR = AttentionSpec((16, 24), "float32", mask=PACKED, normaliser=linear(favor(256)))

#: Chunks have 16 rows, and a GPU four programs. Every other sequence has ids that return.
CALLS = {
    "rising": (DOCUMENTS, LinearCall(83, 83, ids="rising")),
    "falling": (DOCUMENTS, LinearCall(50, 50, q_heads=2, ids="falling", states=True)),
    "padding": (
        DOCUMENTS, LinearCall(40, 40, batch=2, q_heads=2, ids="padding", states=True, nan=True)
    ),
    "shared ids": (PLAIN, LinearCall(50, 50, batch=2, q_heads=2, ids="falling", states=True)),
    "returning": (OWN, LinearCall(50, 50, batch=2, q_heads=2, ids="returning", states=True)),
    "steep": (OWN, LinearCall(40, 40, batch=2, ids="returning", states=True, steep=True)),
    "tokens": (TOKENS, LinearCall(50, 50, batch=2, ids="padding", steep=True, tma=False)),
    "tokens and states": (
        TOKENS, LinearCall(40, 40, batch=2, ids="padding", states=True, nan=True)
    ),
    "features": (
        MAPPED, LinearCall(40, 40, batch=2, q_heads=2, ids="padding", strided=True, nan=True)
    ),
    "no map": (RAW, LinearCall(40, 40, batch=2, ids="padding", states=True, nan=True)),
    "ends": (RAW, LinearCall(83, 83, batch=2, ids="ends", states=True, nan=True)),
    "ends of documents": (
        DOCUMENTS, LinearCall(83, 83, batch=2, q_heads=2, ids="ends", states=True, nan=True)
    ),
    "chunks": (CHUNKS, LinearCall(40, 40, q_heads=2, run_length=20, states=True)),
    "chunks of one": (CHUNKS, LinearCall(35, 35, run_length=1)),
    "chunks of tokens": (CHUNKS_OF_TOKENS, LinearCall(83, 83, q_heads=2, states=True)),
    "tiles": (SIGNS, LinearCall(20, 20, batch=2, ids="padding", states=True, nan=True)),
    "vectors": (SOFTMAX, LinearCall(20, 20, batch=2, ids="padding", states=True, nan=True)),
    "random features": (FAVOR, VectorCall(20, 20, batch=2, ids="padding", nan=True)),
    "sums without a map": (SUMMED, LinearCall(20, 20, ids="padding", nan=True)),
    "no value for 0": (DIRECTIONS, LinearCall(20, 20, ids="padding", nan=True)),
    "long keys": (FAVOR, VectorCall(20, 20, ids="padding", factor=16.0, nan=True)),
}  # fmt: skip

#: Defects: the text, what stands in its place, and the call that finds it.
DEFECTS = {
    "no run starts": ("tl.where((mark == 1) &", "tl.where((mark == 7) &", "rising"),
    "a run is longer": ("offs_n % run_length == 0", "offs_n % run_length == 1", "chunks"),
    "a run starts behind the end": (" & (offs_n < length), -160", ", -160", "chunks"),
    "a run starts with the state": ("== 0) & (offs_n > 0) &", "== 0) &", "chunks"),
    "padding is a document": ("hidden = mark == 2", "hidden = mark == 7", "padding"),
    "padding sees": ("tl.where(log < float(\"inf\"), from_start, 0.0)", "from_start", "padding"),
    "a sum of padding": ("tl.where(log < float(\"inf\"), tl.math.exp2(log), 0.0)",
                         "tl.math.exp2(log)", "padding"),
    "chunks that end with padding": ("tl.load(shown_ptr + batch) // CHUNK",
                                     "tl.cdiv(tl.load(shown_ptr + batch), CHUNK)", "ends"),
    "padding behind is shown": ("shown = min(shown, tl.min(hidden, 0))", "shown = 1000", "ends"),
    "the other loop in reverse": ("end - begin if SHOWN else end - shown",
                                  "end - begin if SHOWN else shown - begin", "ends"),
    "padding sees itself": ("visible &= there[None, :] if KEYS_FIRST else there[:, None]",
                            "visible &= there[None, :] | (visible == visible)", "padding"),
    "the end of a chunk is hidden": ("tl.load(logs + CHUNK)", "tl.load(logs + CHUNK - 1)",
                                     "padding"),
    "ids never return": ("tl.store(found_ptr + batch * 3, 1)", "tl.store(found_ptr + batch * 3, 0)",
                         "returning"),
    "runs start where ids return": ("& (tl.load(found_ptr + batch * 3) == 0), -160",
                                    "& (tl.load(found_ptr + batch * 3) >= 0), -160", "returning"),
    "chunks between two do not decay": ("between *= whole", "between *= 1.0", "returning"),
    "the first state is of the last id": ("* 3 + 1)", "* 3 + 2)", "returning"),
    "the last state is of the first id": ("* 3 + 2)", "* 3 + 1)", "returning"),
    "a state is of all ids": ("tl.where(tl.load(found + 1) == tl.load(found + 2), between, 0.0)",
                              "between", "tokens and states"),
    "keys of other ids": ("(of_q[:, None] == of_k[None, :])",
                          "(of_q[:, None] == of_q[:, None])", "tokens"),
    "keys of later positions": (" & (of_q_at[:, None] >= of_k_at[None, :])", "", "returning"),
    "one head of those that share a key": ("for member in range(0, group)",
                                           "for member in range(0, 1)", "returning"),
    "no sum of pairs": ("sums += tl.sum(weights, 1)", "sums += 0.0", "tokens"),
    "a gradient where a run starts": ("grad = tl.where((mark == 1)", "grad = tl.where((mark == 7)",
                                      "tokens"),
    "pairs up to a decay": ("tl.cumsum(change, 0) - change", "tl.cumsum(change, 0)", "returning"),
    "no pairs with the first state": ("            before += tl.sum(\n",
                                      "            before += 0.0 * tl.sum(\n", "returning"),
    "no rows of pairs": ("rows += tl.sum(grad_weights *", "rows += 0.0 * tl.sum(grad_weights *",
                         "returning"),
    "no rows of the first state": ("rows += tl.sum(of_first *", "rows += 0.0 * tl.sum(of_first *",
                                   "returning"),
    "no rows of the last state": ("rows += tl.sum(of_last *", "rows += 0.0 * tl.sum(of_last *",
                                  "returning"),
    "no rows of the last sum": ("rows += tl.sum(of_total *", "rows += 0.0 * tl.sum(of_total *",
                                "tokens and states"),
    "pairs without the scale": ("    acc *= scale\n    tl.store(rows_ptr", "    tl.store(rows_ptr",
                                "returning"),
    "no slope of pairs": ("acc *= tl.where((of_q != -1)[:, None], _slopes(q), 0.0)", "acc *= 1.0",
                          "features"),
    "NaN of values": ("v = tl.where(known[:, None], v, 0.0)", "v = v", "padding"),
    "NaN of gradients": ("g = tl.where(known[:, None], g, 0.0)", "g = g", "no map"),
    "NaN of gradients of padding": ("acc = tl.where(known[:, None], acc, 0.0)", "acc = acc",
                                    "no map"),
    "NaN of gradients by outputs": ("    g = tl.where(known[:, None], g, 0.0)\n    sums",
                                    "    sums", "padding"),
    "NaN of outputs": ("acc = tl.where(known[None, :], acc, 0.0)", "acc = acc", "no map"),
    "NaN of weights": ("weights = tl.where(factors > 0.0, weights, 0.0)", "weights = weights",
                       "no map"),
    "NaN of keys in states": ("weighted_k = tl.where(known[:, None], weighted_k, 0.0)",
                              "weighted_k = weighted_k", "no map"),
    "NaN of queries in states": ("weighted_q = tl.where(known[:, None], weighted_q, 0.0)",
                                 "weighted_q = weighted_q", "no map"),
    "NaN of gradients of keys": ("grad = tl.where(known[:, None], grad, 0.0)", "grad = grad",
                                 "padding"),
    "NaN of gradients of values": ("grad = tl.where(known[None, :], grad, 0.0)", "grad = grad",
                                   "no map"),
    "NaN of outputs' sums": ("sums = tl.where(known, sums, 0.0)", "sums = sums",
                             "sums without a map"),
    "NaN of queries": ("phi_q = tl.where(known[:, None], phi_q, 0.0)", "phi_q = phi_q", "no map"),
    "NaN of keys": ("phi_k = tl.where(known[:, None], phi_k, 0.0)", "phi_k = phi_k", "no map"),
    "NaN of features of queries": ("    q = tl.where(known[:, None], q, 0.0)", "    q = q",
                                   "padding"),
    "NaN of features": ("tl.where(inside & known[:, None], _features(x)",
                        "tl.where(inside, _features(x)", "padding"),
    "NaN of sums": ("x = tl.load(rows + tile, mask=inside & known[:, None]",
                    "x = tl.load(rows + tile, mask=inside", "sums without a map"),
    "NaN of mapped features": ("tl.where(inside & known[:, None], phi", "tl.where(inside, phi",
                               "no value for 0"),
    "NaN of vectors": ("grad = tl.where(known[:, None], grad, 0.0)", "grad = grad",
                       "no value for 0"),
    "NaN of slopes": ("tl.where((known)[:, None], _slopes(q), 0.0)", "_slopes(q)", "padding"),
    "NaN of slopes of keys": ("tl.where((known)[:, None], _slopes(k), 0.0)", "_slopes(k)",
                              "padding"),
    "NaN of slopes of pairs": ("tl.where((of_q != -1)[:, None], _slopes(q), 0.0)", "_slopes(q)",
                               "padding"),
    "NaN of slopes of keys of pairs": ("tl.where((of_k != -1)[:, None], _slopes(k), 0.0)",
                                       "_slopes(k)", "padding"),
    "NaN of rows": ("rows = tl.where(known, rows, 0.0)", "rows = rows", "features"),
    "NaN of values of pairs": ("v = tl.where((of_k != -1)[:, None], v, 0.0)", "v = v",
                               "tokens and states"),
    "NaN of gradients of pairs": ("g = tl.where((of_q != -1)[:, None], g, 0.0)", "g = g",
                                  "tokens and states"),
    "NaN of queries of pairs": ("phi_q = tl.where((of_q != -1)[:, None], phi_q, 0.0)",
                                "phi_q = phi_q", "no map"),
    "NaN of keys of pairs": ("phi_k = tl.where((of_k != -1)[:, None], phi_k, 0.0)",
                             "phi_k = phi_k", "no map"),
    "NaN of the last state of pairs": ("v = tl.where((of_x != -1)[:, None], v, 0.0)", "v = v",
                                       "tokens and states"),
    "NaN of the first state of pairs": ("g = tl.where((of_x != -1)[:, None], g, 0.0)", "g = g",
                                        "tokens and states"),
    "NaN of random features": ("mask=known[:, None]", "mask=offs_n[:, None] < length - start",
                               "random features"),
    "infinite features": ("tl.where(there & known[:, None], phi", "tl.where(there, phi",
                          "long keys"),
    "infinite features in gradients": ("phi = tl.where(known[:, None], phi, 0.0)", "phi = phi",
                                       "long keys"),
    "weights by one tile": ("for column in range(0, 256,", "for column in range(0, 128,",
                            "tiles"),
}  # fmt: skip


def check(spec: AttentionSpec, call: LinearCall, edit: Any = str) -> None:
    """Fails unless results and gradients are near to float64's."""
    check_call(rendered_module(spec, edit_source=edit), spec, call)


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    check(*CALLS[name])


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, call = DEFECTS[name]

    with pytest.raises(AssertionError, match="error"):
        check(*CALLS[call], with_slip(old, new))


def test_padding_has_no_part_in_the_largest_feature() -> None:
    """Exponents of long keys are near -2900; that of a vector of zeros is 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, x, generator=generator) for x in (16, 16, 24))
    k = 32.0 + 0.1 * k
    ids = torch.tensor([[-1] * 2 + [0] * 18], dtype=torch.int32)

    def outputs(edit: Any) -> list[torch.Tensor]:
        module = rendered_module(FAVOR, edit_source=edit)
        found = []
        for value in (32.0, 0.0, torch.nan):
            k[:, :, :2] = value
            found.append(module.attention(q, k, v, module.draw_features(0), document_ids=ids))
        return found

    first, *others = outputs(str)
    assert first[:, :, 2:].all() and all(torch.equal(x, first) for x in others)
    first, *_ = outputs(with_slip("tl.where(known, largest, -1e30)", "largest"))
    assert not first.any()


@pytest.mark.parametrize("tile", [8, 32, 128])
@pytest.mark.parametrize("spec", [DOCUMENTS, OWN])
def test_where_runs_start_and_whether_ids_return(spec: AttentionSpec, tile: int) -> None:
    module = rendered_module(spec)
    module._TILE_OF_IDS, module._SIDE = tile, 8
    rows = [
        [i // 7 for i in range(70)],
        [*(9 - i // 7 for i in range(69)), 5],  # the sixth one's id returns at the end
        [*(99 - i for i in range(70))],
        [*(i // 2 for i in range(69)), 3],
        [*(-1 for _ in range(40)), *(3 for _ in range(5)), *(-1 for _ in range(25))],
        [3, *(-1 for _ in range(60)), 3, *(2 for _ in range(8))],
        [*(-1 for _ in range(9)), *(3 for _ in range(50)), *(-1 for _ in range(11))],
        [-1] * 70,
        [0] * 70,
        [1, 0] * 35,
    ]
    ids = torch.tensor(rows, dtype=torch.int32)
    marks, found, *shown = module._runs_of(ids, torch.empty(len(rows), 1, 70, 16))
    for row, of_row, mark in zip(rows, found.tolist(), marks.tolist(), strict=True):
        assert (mark, of_row) == marks_of(row, padded=spec is DOCUMENTS)
    assert [x.tolist() for x in shown] == [list(map(shown_of, rows))] * (spec is DOCUMENTS)

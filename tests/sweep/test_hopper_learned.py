"""The Gluon kernel over keys beside the portable one over queries: what each of them learns.

The vocabulary has the usual ones; here two kernels share a score function, or nothing is learned.
"""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from flashgen import (
    AttentionSpec,
    Float,
    Mask,
    Tensor,
    alibi,
    block_sparse,
    causal,
    kv_len,
    log,
    relative_bias,
    sigmoid_attention,
    softcap,
    softmax,
    tanh,
)
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.cases import Case
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import rendered_module
from sweep.hopper import check_hopper_backward

NEAR = Tensor("near", ("num_q_heads", 999))
TILTS = Tensor("tilts", ("batch", "q_len"))
LIFTS = Tensor("lifts", ("batch", "kv_len"), "bfloat16")
CELLS = Tensor("cells", (7, 5))
SLOPES = Tensor("slopes", ("num_q_heads",))
SINKS = Tensor("sinks", ("num_q_heads",))
ANSWERS = Tensor("answers", ("batch", "q_len"), "bool")
FACTOR = Float("factor", 0.5)
ENDS = Tensor("ends", ("batch", "q_len"), "int32")

BOTTOM = causal(align="bottom_right")
EACH_ROW = Mask(lambda b, h, q, kv: kv < ENDS[b, q], "each row has its end")
CHOSEN = Mask(lambda b, h, q, kv: ANSWERS[b, q], "some rows see nothing")

SPECS = {
    # Heads, rows and distances over queries, keys over keys.
    "of_all_kinds": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: (
            s * SLOPES[h] + TILTS[b, q] + LIFTS[b, kv] + NEAR[h, kv - q + 499]
        ),
    ),
    "keys_with_slopes": AttentionSpec(
        128,
        mask=BOTTOM,
        score=softcap(8.0).then(lambda s, b, h, q, kv: s + LIFTS[b, kv] * (1 + h) + TILTS[b, q]),
    ),
    # Of 64 columns a slope for each element asks for shorter tiles of queries.
    "narrow_slopes": AttentionSpec(
        64, mask=BOTTOM, score=softcap(8.0).then(lambda s, b, h, q, kv: s * SLOPES[h] + TILTS[b, q])
    ),
    # Sums that several programs add to.
    "shared_elements": AttentionSpec(
        72, "float16", score=lambda s, b, h, q, kv: s + CELLS[q % 7, kv % 5]
    ),
    "with_a_sink": AttentionSpec(
        128,
        mask=BOTTOM,
        score=relative_bias(40, align="bottom_right"),
        normaliser=softmax(sink=lambda b, h: SINKS[h]),
    ),
    "sigmoid": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + TILTS[b, q],
        normaliser=sigmoid_attention(),
    ),
    "roles": AttentionSpec((192, 128), mask=BOTTOM, score=alibi(SLOPES, align="bottom_right")),
    # Both kernels go by lists of tiles.
    "listed": AttentionSpec(
        64, mask=block_sparse(block=16), score=relative_bias(40, align="bottom_right")
    ),
    # What keys learn depends on what queries read.
    "products_of_both": AttentionSpec(
        64, mask=BOTTOM, score=lambda s, b, h, q, kv: s + TILTS[b, q] * LIFTS[b, kv]
    ),
    "positions_beside_both": AttentionSpec(
        128,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + (1 + q) / 100 * tanh(TILTS[b, q]) * LIFTS[b, kv],
    ),
    "chosen_rows": AttentionSpec(
        64, mask=BOTTOM & CHOSEN, score=lambda s, b, h, q, kv: s + TILTS[b, q]
    ),
    "sinks_of_more_than_tensors": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + TILTS[b, q],
        normaliser=softmax(sink=lambda b, h: SINKS[h] * FACTOR - log(kv_len + 1.0)),
    ),
    "nothing_is_learned": AttentionSpec(64, mask=EACH_ROW, deterministic=True),
}

CASES = (Case(256, 256, 2, 4, 2), Case(130, 300, 1, 3, 1), Case(200, 70, 2, 2, 2))


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], hopper=True, edit_source=interpreted)


@pytest.mark.parametrize(("name", "case"), in_turns(SPECS, CASES, every=6), ids=str)
def test_backward(name: str, case: Case) -> None:
    names = HopperBackward(backward_plan(lower(SPECS[name], name)))
    assert names.of_keys_alone and not names.why_not
    check_hopper_backward(_module(name), SPECS[name], case)


def test_which_have_shorter_tiles() -> None:
    tiles = {name: HopperBackward(backward_plan(lower(spec, name))) for name, spec in SPECS.items()}
    assert {name for name, of in tiles.items() if (of.width, of.block_m) == (64, 64)} == {
        "narrow_slopes"
    }


def test_of_all_kinds_has_each_in_its_place() -> None:
    names = HopperBackward(backward_plan(lower(SPECS["of_all_kinds"], "x")))
    assert [item.over for item in names.text.input_gradients] == ["columns"]
    found = {item.over for item in names.backward.of_queries.input_gradients}
    assert found == {"heads", "rows", "diagonals"}

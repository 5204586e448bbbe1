"""The queries that visit the longest tile of keys, by which launchers divide tiles."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec, Int, Mask, causal, chunked, document, sliding_window
from flashgen.kernels.backward_hopper.work import longest_visit
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan

WINDOW = sliding_window(left=Int("left", min=0), right=0)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal(), 1000),
        (WINDOW, 428),
        (chunked(512) & causal(), None),  # each chunk begins with a long one
        (sliding_window(left=100, right=50), None),  # tiles in the middle have the most
        (causal() & document(), None),  # ends are read from a tensor
        (Mask(lambda b, h, q, kv: kv >= q, "what comes after"), None),
    ],
    ids=["causal", "window", "chunks", "both sides", "documents", "anticausal"],
)
def test_the_queries_of_a_heads_first_tile(mask: Mask, expected: int | None) -> None:
    code = longest_visit(backward_plan(lower(AttentionSpec(64, mask=mask), "variant")))
    sizes = {"q_len": 1000, "kv_len": 1000, "left": 300, "block_n": 128}
    assert (eval(code, {}, sizes) if code else None) == expected

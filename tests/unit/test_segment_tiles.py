"""Which masks have tiles of queries start where segments begin."""

from __future__ import annotations

import pytest

from flashgen import (
    AttentionSpec,
    Constant,
    Mask,
    Tensor,
    block_sparse,
    causal,
    document,
    sink_tokens,
    sliding_window,
)
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.plan import KernelPlan, lower

IDS = Tensor("ids", ("kv_len",), "int32", sorted=True)
OTHER = Tensor("other", ("batch", "kv_len"), "int32", sorted=True)
BY_HEAD = Tensor("by_head", ("num_q_heads", "kv_len"), "int32", sorted=True)
ANY = Tensor("any", (None, "kv_len"), "int32", sorted=True)
AT_LEAST = Mask(lambda b, h, q, kv: OTHER[b, kv] >= OTHER[b, q], "at_least")
FIXED = Constant("fixed", [0, 0, 1, 2])


def _plan(mask: Mask) -> KernelPlan:
    return lower(AttentionSpec(128, mask=mask), "plan")


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (document(), "document_ids_begin"),
        (document() & causal(), "document_ids_begin"),
        (document() & sliding_window(100, 0), "document_ids_begin"),
        (document(IDS) & causal(), "ids_begin"),
        (document(IDS) & document(OTHER) & causal(), "ids_begin"),
        (AT_LEAST & causal(), "other_begin"),
    ],
    ids=str,
)
def test_masks_whose_keys_begin_with_a_segment(mask: Mask, name: str) -> None:
    names = HopperNames(_plan(mask))
    assert names.segments is not None and names.segments.name == name
    assert names.work[:5] == ("visits", "batch", "head", "q_first", "q_last")
    assert names.runs == ("kv_first",)
    assert names.own_visits == ("first", "last", "all_begin", "all_end")


@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        sliding_window(100, 0),
        document(align="bottom_right") & causal(align="bottom_right"),
        document() & causal() & ~block_sparse(block=16),  # tiles of keys are listed
        (document() | sink_tokens(4)) & causal(),  # two runs
        ~document() & causal(),
        document(Tensor("free", ("batch", "kv_len"), "int32")) & causal(),  # not sorted
        Mask(lambda b, h, q, kv: FIXED[q] == FIXED[kv], "fixed", equal_lengths=True),
        Mask(lambda b, h, q, kv: BY_HEAD[h, q] == BY_HEAD[h, kv], "by_head", equal_lengths=True),
        Mask(lambda b, h, q, kv: ANY[b, q] == ANY[b, kv], "any", equal_lengths=True),
        Mask(lambda b, h, q, kv: OTHER[0, q] == OTHER[0, kv], "first", equal_lengths=True),
        Mask(lambda b, h, q, kv: OTHER[b, q + 1] == OTHER[b, kv], "next", equal_lengths=True),
    ],
    ids=lambda mask: mask.label,
)
def test_other_masks(mask: Mask) -> None:
    assert HopperNames(_plan(mask)).segments is None

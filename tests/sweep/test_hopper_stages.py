"""The Gluon forward kernel with few buffers: what a program sets up must not depend on them."""

from __future__ import annotations

from flashgen import AttentionSpec, causal
from flashgen.config import KernelConfig
from support.cases import Case
from support.gluon import interpreted
from support.variants import rendered_module
from sweep.hopper import check_hopper


def test_three_consumers_with_one_buffer_of_queries_and_two_stages() -> None:
    """What consumers tell of takes more places than there are buffers.

    Programs take a second tile of queries by it: once the last place was left as it was found, and
    they computed another tile, from queries that were nowhere.
    """
    spec = AttentionSpec(head_dim=160, dtype="bfloat16", mask=causal())
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    check_hopper(module, spec, Case(1000, 1000, 1, 2, 2), KernelConfig(192, 64, 12, 2))

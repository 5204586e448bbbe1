"""Which structure the Gluon forward kernel has."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec, Mask, block_sparse, causal, sliding_window
from flashgen.kernels.forward_hopper.shape import HopperShape, hopper_shape
from flashgen.plan import lower


def _shape(head_dim: int | tuple[int, int], mask: Mask) -> HopperShape:
    return hopper_shape(lower(AttentionSpec(head_dim, "bfloat16", mask=mask), "x"))


@pytest.mark.parametrize(
    ("head_dim", "turns"),
    [
        (64, True),
        (80, True),
        (96, True),
        (112, True),
        (120, False),  # padded to 128 columns
        (128, False),
        ((80, 128), False),
        ((192, 128), False),
        (256, True),
    ],
)
def test_consumers_take_turns_unless_products_last_longest(head_dim, turns) -> None:
    assert _shape(head_dim, causal()).ping_pong is turns


@pytest.mark.parametrize("head_dim", [80, 128])
def test_lists_of_tiles_have_two_consumers(head_dim) -> None:
    listed, sorted_runs = _shape(head_dim, block_sparse()), _shape(head_dim, sliding_window(256, 0))
    assert listed.overlapped_tiles and listed.q_in_registers and listed.ping_pong
    assert not sorted_runs.overlapped_tiles and not sorted_runs.q_in_registers

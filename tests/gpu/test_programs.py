"""Notes on a GPU: every program begins, has scores and ends, in this order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.programs import MOMENTS, programs
from benchmarks.timeline import CELLS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("name", ["documents_d128", "causal_d256"])
def test_every_program_notes_three_moments(name: str) -> None:
    """In one of five calls, since the GPU may serve other processes in the middle of one."""
    tries = [programs(CELLS[name, 16384], torch.device("cuda")) for _ in range(5)]
    for found in tries:
        assert found["programs"] == torch.cuda.get_device_properties(0).multi_processor_count
    assert any(map(_is_of_one_call, tries)), tries


def _is_of_one_call(found: dict[str, Any]) -> bool:
    begin, scores, end = (found["us"][moment] for moment in MOMENTS)
    in_order = begin[0] == 0 and begin[-1] < scores[-1] < end[0] <= end[-1]
    # A call lasts a little longer than its programs do.
    within = end[-1] < 1.05 * 1e3 * found["call_ms"]["noted"]
    return in_order and within and 500 < found["mhz"] < 2500 and 0 < found["idle"] < 0.5

"""Notes on a GPU: every program begins, has scores and ends, in this order."""

from __future__ import annotations

import pytest
import torch

from benchmarks.programs import MOMENTS, programs
from benchmarks.timeline import CELLS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("name", ["documents_d128", "causal_d256"])
def test_every_program_notes_three_moments(name: str) -> None:
    found = programs(CELLS[name, 16384], torch.device("cuda"))
    assert found["programs"] == torch.cuda.get_device_properties(0).multi_processor_count
    begin, scores, end = (found["us"][moment] for moment in MOMENTS)
    assert begin[0] == 0 and begin[-1] < scores[-1] < end[0] <= end[-1]
    # A call lasts a little longer than its programs do.
    assert end[-1] < 1.05 * 1e3 * found["call_ms"]["noted"]
    assert 500 < found["mhz"] < 2500 and 0 < found["idle"] < 0.5

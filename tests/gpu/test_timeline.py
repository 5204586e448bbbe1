"""Marks on a GPU: every role of a program passes some, and the clock goes on."""

from __future__ import annotations

import pytest
import torch

from benchmarks.timeline import CELLS, timeline

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("name", ["window_d128", "documents_d128", "causal_d256"])
def test_every_role_passes_marks(name: str) -> None:
    found = timeline(CELLS[name, 16384], 3, torch.device("cuda"))
    consumers = 2 if name == "causal_d256" else 3
    assert {row["role"] for row in found["intervals"]} == {*range(consumers + 1)}
    assert 10_000 < found["cycles"] < 100_000_000
    for role in range(consumers + 1):
        rows = [row for row in found["intervals"] if row["role"] == role]
        assert 0 < sum(row["cycles"] for row in rows) <= found["cycles"]

"""What is made of the kernels that a trace of a mesh has."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.mesh_timeline import COLOURS, draw, kind_of, lines, overlap

#: Two transfers at once, of which products cover a quarter and then all.
KERNELS = [
    ("transfers", 0.0, 400.0),
    ("transfers", 100.0, 300.0),
    ("forward products", 300.0, 500.0),
    ("transfers", 600.0, 100.0),
    ("rest", 0.0, 900.0),
]


def test_overlap_counts_time_once() -> None:
    assert overlap(KERNELS) == pytest.approx((100 + 100) / 500)
    assert overlap(KERNELS[2:3]) == 1.0


def test_the_picture_has_all_kernels_of_all_ranks() -> None:
    found = {"title": "t", "gpu": "g", "torch": "x", "traces": {"ring": [KERNELS, KERNELS[:3]]}}
    root = ET.fromstring(draw(found))
    bars = [x.get("fill") for x in root.iter() if x.tag.endswith("rect")]
    assert len(bars) == len(KERNELS) + 3 + len(COLOURS)
    assert bars.count(COLOURS["transfers"]) == 5 + 1
    assert sum("rank 1" in line and "transfers 0.700" in line for line in lines(found)) == 1


def test_kinds() -> None:
    names = "_backward_rows", "_backward_hopper", "_attention_hopper", "ncclDevKernel_SendRecv(x)"
    assert [*map(kind_of, names)] == ["rest", "backward products", "forward products", "transfers"]

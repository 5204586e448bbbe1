"""The forward benchmark on the CPU: its FLOPs, its masks, its bookkeeping and its tables."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import accuracy, cells, forward, peers, table
from benchmarks.cells import CELLS, GRID, WINDOW, Cell, visible_pairs

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def cell(mask="causal", seq_len=32, dtype="float32", **fields):
    return Cell(f"{mask}_d16", mask, seq_len, 16, 16, dtype, **fields)


def row_of(cell):
    return {
        "cell": cell.name,
        "mask": cell.mask,
        "seq_len": cell.seq_len,
        "head_dim": [cell.qk_head_dim, cell.v_head_dim],
        "dtype": cell.dtype,
        "in_grid": cell.in_grid,
        "config": {"BLOCK_M": 128, "USE_TMA": True},
        "ms": {},
        "tflops": {},
        "error": {},
        "unavailable": {},
    }


@pytest.fixture
def small(monkeypatch):
    """Cells of a batch that a CPU can do."""
    monkeypatch.setattr(cells, "TOKENS", 64)
    monkeypatch.setattr(cells, "WIDTH", 32)


def peer(function):
    @contextmanager
    def entered(cell, inputs):
        yield lambda: function(cell, inputs)

    return entered


def exact(cell, inputs):
    return scaled_dot_product_attention(*inputs, is_causal=cell.mask == "causal")


def refusing(cell, inputs):
    raise RuntimeError("No available kernel.\nAborting execution.")


# --- cells ----------------------------------------------------------------------------------------


def test_the_grid():
    assert len(GRID) == 18
    assert {(c.qk_head_dim, c.mask, c.seq_len) for c in GRID} == {
        (d, mask, s)
        for d in (64, 128, 256)
        for mask in ("full", "causal")
        for s in (2048, 8192, 16384)
    }
    for c in GRID:
        assert c.dtype == "bfloat16"
        assert c.batch * c.seq_len == 16384
        assert c.num_heads * c.qk_head_dim == 2048
    assert len({c.name for c in CELLS}) == len(CELLS)


def test_every_cell_has_a_spec():
    for c in CELLS:
        homes = [ROOT / "specs", ROOT / "benchmarks" / "specs"]
        assert any((home / f"{c.module}.py").exists() for home in homes), c.module


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
@pytest.mark.parametrize("window", [0, 1, 5, 6, 7, 100])
def test_visible_pairs_against_a_count(seq_len, window):
    distances = [q - k for q in range(seq_len) for k in range(seq_len)]
    assert visible_pairs("full", seq_len) == len(distances)
    assert visible_pairs("causal", seq_len) == sum(d >= 0 for d in distances)
    assert visible_pairs("window", seq_len, window) == sum(0 <= d <= window for d in distances)


def test_flops_of_a_known_cell():
    full = next(c for c in GRID if c.name == "full_d128 S=8192")
    assert full.flops == 4 * 2 * 16 * 8192 * 8192 * 128
    wide = next(c for c in CELLS if c.module == "causal_d192_v128")
    assert wide.flops == 2 * 1 * 10 * (16384 * 16385 // 2) * (192 + 128)


def test_flex_attention_is_given_the_masks_that_are_counted():
    q_idx, kv_idx = torch.arange(2048)[:, None], torch.arange(2048)[None, :]
    assert peers._causal(0, 0, q_idx, kv_idx).sum() == visible_pairs("causal", 2048)
    assert peers._window(0, 0, q_idx, kv_idx).sum() == visible_pairs("window", 2048, WINDOW)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_exact_heads_are_what_torch_computes(small, mask):
    c = cell(mask)
    inputs = forward.make_inputs(c, CPU)
    assert accuracy.relative_error(exact(c, inputs), accuracy.exact_heads(c, inputs)) < 1e-6


def test_exact_heads_of_a_window(monkeypatch, small):
    monkeypatch.setattr(accuracy, "WINDOW", 5)
    c = cell("window")
    inputs = forward.make_inputs(c, CPU)
    distance = torch.arange(32)[:, None] - torch.arange(32)[None, :]
    seen = (distance >= 0) & (distance <= 5)
    out = scaled_dot_product_attention(*inputs, attn_mask=seen)
    assert accuracy.relative_error(out, accuracy.exact_heads(c, inputs)) < 1e-6


# --- measuring ------------------------------------------------------------------------------------


def test_measure_keeps_every_repetition_and_reverses_every_second(small):
    order = []

    def named(name):
        def function(cell, inputs):
            order.append(name)
            return exact(cell, inputs)

        return peer(function)

    c = cell()
    row = row_of(c)
    pair = {"flashgen": named("flashgen"), "FlexAttention": named("FlexAttention")}
    times = iter([0.5, 1.0, 2.0, 4.0])
    for repetition in range(2):
        forward.measure(c, row, pair, repetition, CPU, lambda call: next(times))
    assert order == ["flashgen", "FlexAttention", "FlexAttention", "flashgen"]
    assert row["ms"] == {"flashgen": [0.5, 4.0], "FlexAttention": [1.0, 2.0]}
    assert row["tflops"]["flashgen"] == [round(c.flops / ms / 1e9, 1) for ms in (0.5, 4.0)]
    assert set(row["error"]) == set(pair)


def test_a_peer_that_refuses_is_noted_and_left_out(small):
    c = cell()
    row = row_of(c)
    calls = []
    both = {
        "flashgen": peer(exact),
        "SDPA flash": peer(lambda *given: (calls.append(1), refusing(*given))),
    }
    for repetition in range(2):
        forward.measure(c, row, both, repetition, CPU, lambda call: 1.0)
    assert row["unavailable"] == {"SDPA flash": "RuntimeError: No available kernel."}
    assert len(calls) == 1
    assert row["ms"] == {"flashgen": [1.0, 1.0]}


def test_flashgen_may_not_refuse(small):
    with pytest.raises(RuntimeError, match="No available kernel"):
        forward.measure(
            cell(), row_of(cell()), {"flashgen": peer(refusing)}, 0, CPU, lambda call: 1.0
        )


def test_a_wrong_output_is_found(small):
    c = cell()
    rows = []
    for error in (0.0, 0.05, math.nan):
        rows.append(row_of(c) | {"cell": f"off by {error}"})
        rounded = peer(lambda c, inputs: exact(c, inputs).bfloat16())
        wrong = peer(lambda c, inputs, error=error: exact(c, inputs) * (1 + error))
        both = {"flashgen": wrong, "FlexAttention": rounded}
        forward.measure(c, rows[-1], both, 0, CPU, lambda call: 1.0)
    assert accuracy.wrong_cells(rows) == ["off by 0.05", "off by nan"]


def test_peers_of_the_cells():
    by_module = {c.module: peers.peers_of(c) for c in CELLS}
    assert by_module["causal_d128"] == ("flashgen", "FlexAttention", "SDPA cuDNN", "SDPA flash")
    assert by_module["causal_fp32_d64"] == ("flashgen", "FlexAttention", "SDPA efficient")
    assert set(peers.peers_of(CELLS[0], with_fa4=True)) <= set(peers.PEERS)


# --- tables ---------------------------------------------------------------------------------------


def document():
    rows = []
    for c in (
        Cell("full_d64", "full", 2048, 64, 64),
        Cell("full_d64", "full", 8192, 64, 64),
        Cell("causal_d64", "causal", 2048, 64, 64),
        Cell("window_d128", "window", 16384, 128, 128, in_grid=False),
    ):
        row = row_of(c)
        row["tflops"] = {"SDPA cuDNN": [400.4, 401.0], "FlexAttention": [380.0, 384.0]}
        row["tflops"]["flashgen"] = [c.seq_len / 4, c.seq_len / 4 + 2]
        row["ms"] = {"FlexAttention": [3.0, 3.2], "flashgen": [2.0, 2.2]}
        row["error"] = {"flashgen": 0.00213, "FlexAttention": 0.00214, "SDPA cuDNN": 0.002}
        rows.append(row)
    rows[3]["tflops"].pop("SDPA cuDNN")
    rows[3]["error"].pop("SDPA cuDNN")
    rows[3]["unavailable"] = {"SDPA cuDNN": "NotImplementedError: no sliding window"}
    rows[3]["block_mask"] = {"ms": 2.512, "peak_mib": 2560.0}
    environment = {
        "date": "2026-01-31",
        "gpu": "Some GPU",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cudnn": "9.19.0",
        "cuda": "12.8",
    }
    return {"environment": environment, "protocol": forward.protocol(), "cells": rows}


SUMMARY = """\
Forward TFLOP/s at sequence lengths 2048 / 8192; Some GPU, torch 2.11.0, triton 3.6.0, \
cuDNN 9.19.0, 2026-01-31, mean of 2 medians.

| head_dim | mask | flashgen | FlexAttention | SDPA cuDNN | flashgen / FlexAttention |
| --- | --- | ---: | ---: | ---: | ---: |
| 64 | full | 513 / 2049 | 382 / 382 | 401 / 401 | 1.48 / 1.48 |
| 64 | causal | 513 | 382 | 401 | 1.48 |"""

FULL = """\
Some GPU, torch 2.11.0, triton 3.6.0, cuDNN 9.19.0, 2026-01-31, mean of 2 medians. TFLOP/s, the \
repetitions one after the other.

| cell | dtype | flashgen | FlexAttention | SDPA cuDNN | flashgen / FlexAttention |
| --- | --- | ---: | ---: | ---: | ---: |
| full_d64 S=2048 | bfloat16 | 512 514 | 380 384 | 400 401 | 1.48 |
| full_d64 S=8192 | bfloat16 | 2048 2050 | 380 384 | 400 401 | 1.48 |
| causal_d64 S=2048 | bfloat16 | 512 514 | 380 384 | 400 401 | 1.48 |
| window_d128 S=16384 | bfloat16 | 4096 4098 | 380 384 | - | 1.48 |

Error relative to float64 (Frobenius norm over two heads):
"""


def test_the_summary_table():
    assert table.summary_table(document()) == SUMMARY


def test_the_full_table():
    text = table.full_table(document())
    assert text.startswith(FULL)
    assert "| window_d128 S=16384 | 2.13e-03 | 2.14e-03 | - |\n" in text
    assert "| window_d128 S=16384 | 2.51 | 2560 | BLOCK_M=128, USE_TMA=True |\n" in text
    refusal = "- window_d128 S=16384, SDPA cuDNN: NotImplementedError: no sliding window"
    assert text.endswith(f"Not available:\n\n{refusal}")


def test_a_table_fills_its_place_and_nothing_else():
    text = "a\n<!-- benchmark: summary -->\nold\n<!-- /benchmark -->\nb\n"
    expected = f"a\n<!-- benchmark: summary -->\n{SUMMARY}\n<!-- /benchmark -->\nb\n"
    assert table.fill(text, document()) == expected
    assert table.fill(expected, document()) == expected
    assert table.NO_RESULTS in table.fill(text, None)


def test_the_newest_results_are_taken(tmp_path):
    assert table.newest_results(tmp_path) is None
    for name, date in (("a", "2026-02-01"), ("b", "2026-01-31")):
        content = document()
        content["environment"]["date"] = date
        (tmp_path / f"{name}.json").write_text(forward.layout(content))
    newest = table.newest_results(tmp_path)
    assert newest is not None and newest["environment"]["date"] == "2026-02-01"


def test_results_are_json_with_a_cell_a_line():
    text = forward.layout(document())
    assert json.loads(text) == document()
    assert sum(line.startswith('    {"cell"') for line in text.splitlines()) == 4


def test_the_documents_show_the_committed_results():
    for path in table.DOCUMENTS:
        text = path.read_text()
        assert "<!-- benchmark: " in text, path
        assert table.fill(text, table.newest_results()) == text, (
            f"{path}: run python -m benchmarks.table --write"
        )

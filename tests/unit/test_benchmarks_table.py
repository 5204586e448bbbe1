"""The tables of the benchmarks, and that the documents show the committed results."""

from __future__ import annotations

import json

from benchmarks import record, table
from benchmarks.cells import Cell


def row_of(cell):
    return {
        "cell": cell.name,
        "mask": cell.attention,
        "title": cell.title,
        "seq_len": cell.seq_len,
        "head_dim": [cell.qk_head_dim, cell.v_head_dim],
        "dtype": cell.dtype,
        "num_heads": cell.num_heads,
        "in_grid": cell.in_grid,
        "config": {"BLOCK_M": 128, "USE_TMA": True},
        "error": {},
        "unavailable": {},
    }


ENVIRONMENT = {
    "date": "2026-01-31",
    "gpu": "Some GPU",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cudnn": "9.19.0",
    "cuda": "12.8",
}


def forward_results():
    rows = []
    for c in (
        Cell("full_d64", "full", 2048, 64, 64, in_grid=True),
        Cell("full_d64", "full", 8192, 64, 64, in_grid=True),
        Cell("causal_d64", "causal", 2048, 64, 64, in_grid=True),
        Cell("window_d128", "window", 16384, 128, 128),
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
    return results_of("forward", rows)


def results_of(benchmark, rows):
    return {
        "benchmark": benchmark,
        "environment": ENVIRONMENT,
        "protocol": record.protocol(),
        "cells": rows,
    }


def variant_results():
    rows = []
    for c, extra in (
        (Cell("causal_d128", "causal", 16384, 128, 128, title="causal"), 0),
        (Cell("documents_d128", "documents", 16384, 128, 128, title="documents"), 131584),
    ):
        row = row_of(c) | {"extra_bytes": extra, "visible_pairs": 16384**2 * 3 // 40}
        row["tflops"] = {"flashgen": [500.0, 502.0], "FlexAttention": [400.0, 402.0]}
        row["ms"] = {"FlexAttention": [3.0, 3.2], "flashgen": [2.0, 2.2]}
        row["block_mask"] = {"ms": 2.512, "peak_mib": 2560.0}
        rows.append(row)
    rows[0]["tflops"]["SDPA cuDNN"] = [600.0]
    rows[1].pop("block_mask")
    return results_of("variants", rows)


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


VARIANTS = """\
Forward TFLOP/s on visible elements: head_dim 128, 16 heads, 16384 tokens, bfloat16; Some GPU, \
torch 2.11.0, triton 3.6.0, cuDNN 9.19.0, 2026-01-31, mean of 2 medians.

| attention | visible | flashgen | FlexAttention | SDPA cuDNN | flashgen / FlexAttention | \
flashgen's extra KiB | BlockMask MiB | BlockMask ms |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| causal | 7.5% | 501 | 401 | 600 | 1.48 | 0 | 2560 | 2.51 |
| documents | 7.5% | 501 | 401 | - | 1.48 | 128 | - | - |"""


def test_the_summary_table():
    assert table.summary_table(forward_results()) == SUMMARY


def test_the_table_of_variants():
    assert table.variants_table(variant_results()) == VARIANTS


def test_the_full_table():
    text = table.full_table(forward_results())
    assert text.startswith(FULL)
    assert "| window_d128 S=16384 | 2.13e-03 | 2.14e-03 | - |\n" in text
    assert "| window_d128 S=16384 | 2.51 | 2560 | BLOCK_M=128, USE_TMA=True |\n" in text
    refusal = "- window_d128 S=16384, SDPA cuDNN: NotImplementedError: no sliding window"
    assert text.endswith(f"Not available:\n\n{refusal}")


def test_a_table_fills_its_place_and_nothing_else():
    text = "a\n<!-- benchmark: summary -->\nold\n<!-- /benchmark -->\nb\n"
    expected = f"a\n<!-- benchmark: summary -->\n{SUMMARY}\n<!-- /benchmark -->\nb\n"
    results = {"forward": forward_results(), "variants": variant_results()}
    assert table.fill(text, results) == expected
    assert table.fill(expected, results) == expected
    assert table.NO_RESULTS in table.fill(text, {"variants": variant_results()})
    assert VARIANTS in table.fill(text.replace("summary", "variants"), results)


def test_the_newest_results_of_each_benchmark_are_taken(tmp_path):
    assert table.newest_results(tmp_path) == {}
    for name, benchmark, date in (
        ("a", "forward", "2026-02-01"),
        ("b", "forward", "2026-01-31"),
        ("c", "variants", "2026-01-01"),
    ):
        environment = ENVIRONMENT | {"date": date}
        content = results_of(benchmark, []) | {"environment": environment}
        (tmp_path / f"{name}.json").write_text(record.layout(content))
    newest = table.newest_results(tmp_path)
    dates = {name: results["environment"]["date"] for name, results in newest.items()}
    assert dates == {"forward": "2026-02-01", "variants": "2026-01-01"}


def test_results_are_json_with_a_cell_a_line():
    text = record.layout(forward_results())
    assert json.loads(text) == forward_results()
    assert sum(line.startswith('    {"cell"') for line in text.splitlines()) == 4


def test_the_documents_show_the_committed_results():
    shown = "".join(path.read_text() for path in table.DOCUMENTS)
    for name in table.TABLES:
        assert f"<!-- benchmark: {name} -->" in shown, name
    for path in table.DOCUMENTS:
        text = path.read_text()
        assert table.fill(text, table.newest_results()) == text, (
            f"{path}: run python -m benchmarks.table --write"
        )

"""The tables and pictures of the benchmarks, and that the committed results are shown."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import figures, headline, plot, record, table
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
        row["ms"] = {"FlexAttention": [3.0, 3.2], "flashgen": [2.0, 2.2], "SDPA cuDNN": [1.9, 2.3]}
        row["error"] = {"flashgen": 0.00213, "FlexAttention": 0.00214, "SDPA cuDNN": 0.002}
        rows.append(row)
    rows[1]["ms"]["SDPA cuDNN"] = [1.0, 1.1]
    for name in ("tflops", "ms", "error"):
        rows[3][name].pop("SDPA cuDNN")
    rows[3]["unavailable"] = {"SDPA cuDNN": "NotImplementedError: no sliding window"}
    rows[3]["block_mask"] = {"ms": 2.512, "peak_mib": 2560.0}
    return results_of("forward", rows)


def sustained(results, factor):
    """The same with sustained figures, and with flash-attn-4 beside flashgen."""
    env = results["environment"] | {"flash_attn_4": "4.0.0"}
    rows = []
    for row in results["cells"]:
        ms = row["ms"] | {"FA4": [2 * t for t in row["ms"]["flashgen"]]}
        rates = row["tflops"] | {"FA4": [r / 2 for r in row["tflops"]["flashgen"]]}
        slow = {name: [t * factor for t in times] for name, times in ms.items()}
        slow["flashgen"] = ms["flashgen"]
        held = {name: [r / factor for r in rate] for name, rate in rates.items()}
        more = {"sustained_ms": slow, "sustained_tflops": held}
        rows.append(row | {"ms": ms, "tflops": rates} | more)
    return results | {"environment": env, "cells": rows}


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
    rows[0]["tflops"]["SDPA cuDNN"], rows[0]["ms"]["SDPA cuDNN"] = [600.0], [1.9]
    rows[1]["tflops"]["flashgen"] = [250.0, 252.0]
    return results_of("variants", rows)


def backward_results():
    """Of the backward pass: the same grid, one cell of it at the variants' size, and a variant."""
    rows = [row for row in forward_results()["cells"] if row["in_grid"]]
    for c in (
        Cell("causal_d128", "causal", 16384, 128, 128, in_grid=True),
        Cell("window_d128", "window", 16384, 128, 128, title="window"),
    ):
        row = row_of(c) | {"extra_bytes": 2048, "visible_pairs": 16384**2 // 2}
        row["tflops"] = {"flashgen": [500.0], "FlexAttention": [250.0]}
        row["ms"] = {"flashgen": [2.0], "FlexAttention": [4.0]}
        row["config"] = {"keys": {"BLOCK_M": 64}, "queries": {"BLOCK_M": 128, "USE_TMA": True}}
        rows.append(row)
    return results_of("backward", rows)


SUMMARY = """\
Forward TFLOP/s at sequence lengths 2048 / 8192, and flashgen's ratio to the best peer; Some GPU, \
torch 2.11.0, triton 3.6.0, cuDNN 9.19.0, 2026-01-31, mean of 2 medians.

| head_dim | mask | flashgen | SDPA cuDNN | FlexAttention | to the best, medians |
| --- | --- | ---: | ---: | ---: | ---: |
| 64 | full | 513 / 2049 | 401 / 401 | 382 / 382 | 1.00 / 0.50 |
| 64 | causal | 513 | 401 | 382 | 1.00 |

- By medians, geometric mean over 3 cells: 0.794 times the best peer of each cell (least 0.50, \
full_d64 S=8192); of each peer: SDPA cuDNN 0.79, FlexAttention 1.48."""

FULL = """\
Some GPU, torch 2.11.0, triton 3.6.0, cuDNN 9.19.0, 2026-01-31, mean of 2 medians. TFLOP/s, the \
repetitions one after the other.

By medians:

| cell | dtype | flashgen | SDPA cuDNN | FlexAttention | best peer | flashgen / best |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
| full_d64 S=2048 | bfloat16 | 512 514 | 400 401 | 380 384 | SDPA cuDNN | 1.00 |
| full_d64 S=8192 | bfloat16 | 2048 2050 | 400 401 | 380 384 | SDPA cuDNN | 0.50 |
| causal_d64 S=2048 | bfloat16 | 512 514 | 400 401 | 380 384 | SDPA cuDNN | 1.00 |
| window_d128 S=16384 | bfloat16 | 4096 4098 | - | 380 384 | FlexAttention | 1.48 |

- By medians, geometric mean over 3 cells: 0.794"""


VARIANTS = """\
Forward TFLOP/s on visible elements: head_dim 128, 16 heads, 16384 tokens, bfloat16; Some GPU, \
torch 2.11.0, triton 3.6.0, cuDNN 9.19.0, 2026-01-31, mean of 1 to 2 medians. Ratios are \
flashgen's, by medians.

| attention | visible | flashgen | FlexAttention | to FlexAttention | to own causal |
| --- | ---: | ---: | ---: | ---: | ---: |
| causal | 7.5% | 501 | 401 | 1.48 | 1.00 |
| documents | 7.5% | 251 | 401 | 1.48 | 0.50 |"""


def test_the_summary_table():
    assert table.summary_table(forward_results()) == SUMMARY


def test_the_table_of_variants():
    assert table.variants_table(variant_results()) == VARIANTS


def test_the_full_table():
    text = table.full_table(forward_results())
    assert text.startswith(FULL)
    assert "| window_d128 S=16384 | 2.13e-03 | - | 2.14e-03 |\n" in text
    assert "| window_d128 S=16384 | 2.51 | 2560 | - | BLOCK_M=128, USE_TMA=True |\n" in text
    refusal = "- window_d128 S=16384, SDPA cuDNN: NotImplementedError: no sliding window"
    assert text.endswith(f"Not available:\n\n{refusal}")


def test_the_tables_of_the_backward_pass():
    results = backward_results()
    grid, variants = table.backward_table(results).split("\n\nBackward TFLOP/s on visible")
    assert grid.startswith("Backward TFLOP/s at sequence lengths 2048 / 8192 / 16384, and")
    assert "| 64 | causal | 513 | 401 | 382 | 1.00 |" in grid
    assert "| 128 | causal | 500 | - | 250 | 2.00 |" in grid
    assert variants.splitlines()[2:] == [
        "| attention | visible | flashgen | FlexAttention | to FlexAttention | to own causal |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| causal | 50.0% | 500 | 250 | 2.00 | 1.00 |",
        "| window | 50.0% | 500 | 250 | 2.00 | 1.00 |",
    ]
    rows = results["cells"]
    for part, shown in ((rows[:4], grid), (rows[4:], "on visible elements")):
        text = table.backward_table(results | {"cells": part})
        assert text.count("Backward TFLOP/s") == 1
        assert shown in text
    block = table.fill("<!-- benchmark: backward -->\n<!-- /benchmark -->", {"backward": results})
    assert f"(pictures/backward.svg)\n\n{grid}" in block
    full = table.full_table(results)
    assert "module takes beside its gradients," in full
    assert (
        "| window_d128 S=16384 | - | - | 2 | keys: BLOCK_M=64; queries: BLOCK_M=128, USE_TMA=True |"
        in full
    )


def test_sustained_figures_stand_beside_the_medians():
    results = sustained(forward_results(), 2.0)
    text = table.summary_table(results)
    assert "flash-attn-4 4.0.0 (FA4), 2026-01-31, mean of 2 medians and sustained" in text
    assert text.splitlines()[2] == (
        "| head_dim | mask | flashgen | FA4 | SDPA cuDNN | FlexAttention "
        "| to the best, medians | to the best, sustained |"
    )
    assert (
        "| 64 | full | 513 / 2049 | 256 / 1024 | 401 / 401 | 382 / 382 "
        "| 1.00 / 0.50 | 2.00 / 1.00 |" in text
    )
    assert "- By sustained, geometric mean over 3 cells: 1.587 times the best" in text
    assert "FA4 4.00, SDPA cuDNN 1.59, FlexAttention 2.95." in text
    full = table.full_table(results)
    assert full.count("| window_d128 S=16384 | bfloat16 |") == 2
    assert "By sustained:" in full


def test_the_variants_stand_beside_the_quicker_way_of_fa4():
    results = sustained(variant_results(), 2.0)
    slow, quick = results["cells"]
    for timing in ("ms", "sustained_ms"):
        quick[timing]["FA4 mask_mod"] = [1.0]
        quick[timing.replace("ms", "tflops")]["FA4 mask_mod"] = [999.0]
    text = table.variants_table(results)
    assert "| causal | 7.5% | 501 | 401 | 250 | 1.48 / 2.95 | 2.00 / 4.00 | 1.00 / 1.00 |" in text
    assert (
        "| documents | 7.5% | 251 | 401 | 999 | 1.48 / 2.95 | 0.48 / 0.48 | 0.50 / 0.50 |" in text
    )
    assert figures.best_fa4(slow) == "FA4"


def test_the_headline_table():
    """The longest cells of the grid, then the variants; what one pass lacks is a dash."""
    results = {
        "forward": forward_results(),
        "variants": variant_results(),
        "backward": backward_results() | {"environment": ENVIRONMENT | {"date": "2026-02-01"}},
    }
    lines = headline.headline_table(results).splitlines()
    assert lines[0] == (
        "| attention | forward TFLOP/s | vs Flex | vs best other "
        "| backward TFLOP/s | vs Flex | vs best other |"
    )
    assert lines[2:4] == [
        "| full, head_dim 64 | 2049 | 1.48 | 0.50 | 2049 | 1.48 | 0.50 |",
        "| documents | 251 | 1.48 | - | - | - | - |",
    ]
    assert "8192 tokens, bfloat16, medians; head_dim 128 where none is named." in lines[-1]
    assert lines[-1].endswith("cuDNN 9.19.0, forward 2026-01-31, backward 2026-02-01.")
    other = {"environment": ENVIRONMENT | {"gpu": "Another"}}
    said = headline.headline_table(results | {"backward": backward_results() | other})
    assert "forward 2026-01-31; Another, torch 2.11.0" in said
    assert headline.headline_table({"forward": forward_results()}) == ""
    text = "<!-- benchmark: headline -->\nold\n<!-- /benchmark -->"
    assert table.fill(text, results).splitlines()[1:-1] == lines
    assert table.fill(text, {}) == "<!-- benchmark: headline -->\n<!-- /benchmark -->"


def test_figures_of_rows():
    row = forward_results()["cells"][1]
    assert figures.ratio(row, "SDPA cuDNN") == pytest.approx(0.5)
    assert figures.ratio(row, "FA4") is figures.ratio(row, "FlexAttention", "sustained_ms") is None
    assert figures.best_peer(row) == "SDPA cuDNN"
    assert figures.best_peer(row, "sustained_ms") is None
    assert figures.geometric_mean([2.0, 0.5, 8.0]) == pytest.approx(2.0)
    assert figures.of_causal(row, [row]) is None
    assert math.isclose(figures.rate(row, "SDPA cuDNN"), 400.7)


def test_a_table_fills_its_place_and_nothing_else():
    text = "a\n<!-- benchmark: summary -->\nold\n<!-- /benchmark -->\nb\n"
    expected = f"a\n<!-- benchmark: summary -->\n{SUMMARY}\n<!-- /benchmark -->\nb\n"
    results = {"forward": forward_results(), "variants": variant_results()}
    assert table.fill(text, results) == expected
    assert table.fill(expected, results) == expected
    empty = "a\n<!-- benchmark: summary -->\n<!-- /benchmark -->\nb\n"
    assert table.fill(text, {"variants": variant_results()}) == empty
    assert table.fill(empty, results) == expected
    assert VARIANTS in table.fill(text.replace("summary", "variants"), results)


def test_the_newest_results_of_each_benchmark_are_taken(tmp_path):
    assert figures.newest_results(tmp_path) == {}
    for name, benchmark, date, gpu in (
        ("a", "forward", "2026-02-01", "H200"),
        ("b", "forward", "2026-01-31", "H200"),
        ("variants-h100-2026-01-01b", "variants", "2026-01-01", "H100"),
        ("variants-h200-2026-01-01", "variants", "2026-01-01", "H200"),
    ):
        environment = ENVIRONMENT | {"date": date, "gpu": gpu}
        content = results_of(benchmark, []) | {"environment": environment}
        (tmp_path / f"{name}.json").write_text(record.layout(content))
    newest = figures.newest_results(tmp_path)
    dates = {name: results["environment"]["date"] for name, results in newest.items()}
    assert dates == {"forward": "2026-02-01", "variants": "2026-01-01"}
    assert newest["variants"]["environment"]["gpu"] == "H100"  # the second one of that day


def test_results_are_json_with_a_cell_a_line():
    text = record.layout(forward_results())
    assert json.loads(text) == forward_results()
    assert sum(line.startswith('    {"cell"') for line in text.splitlines()) == 4


def test_the_documents_show_the_committed_results():
    shown = "".join(path.read_text() for path in table.DOCUMENTS)
    for name in (*table.TABLES, *table.JOINED):
        assert f"<!-- benchmark: {name} -->" in shown, name
    for path in table.DOCUMENTS:
        text = path.read_text()
        assert table.fill(text, figures.newest_results()) == text, (
            f"{path}: run python -m benchmarks.table --write"
        )


def test_the_pictures_are_of_the_committed_results():
    results = figures.newest_results()
    shown = "".join(path.read_text() for path in table.DOCUMENTS)
    for name, (benchmark, show, _) in plot.DRAWN.items():
        if benchmark not in results:
            assert f"(pictures/{name})" not in shown
            continue
        assert f"(pictures/{name})" in shown
        text = (plot.PICTURES / name).read_text()
        assert plot.digest(show(results[benchmark])) in text, (
            f"docs/pictures/{name}: run python -m benchmarks.plot --write"
        )


def test_what_a_picture_shows():
    old = plot.dense(forward_results())
    assert list(old["panels"]) == ["full, head_dim 64", "causal, head_dim 64"]
    assert old["panels"]["full, head_dim 64"]["8,192"] == [
        ("flashgen", 2049),
        ("SDPA cuDNN", 401),
        ("FlexAttention", 382),
    ]
    assert "medians" in old["title"]
    new = plot.dense(sustained(forward_results(), 2.0))
    assert new["panels"]["full, head_dim 64"]["8,192"][:2] == [("flashgen", 1024), ("FA4", 512)]
    assert "sustained" in new["title"]
    assert plot.digest(new) != plot.digest(old)
    assert "backward TFLOP/s" in plot.dense(backward_results())["title"]
    results = sustained(variant_results(), 2.0)
    assert plot.variants(results)["panels"][""]["documents"][:2] == [("flashgen", 126), ("FA4", 63)]


@pytest.mark.parametrize("name", plot.DRAWN)
def test_a_picture_is_drawn_the_same_twice(name):
    pytest.importorskip("matplotlib", reason="pip install 'flashgen[bench]' brings matplotlib")
    benchmark, show, horizontal = plot.DRAWN[name]
    made = {
        "forward": forward_results,
        "variants": variant_results,
        "backward": backward_results,
    }[benchmark]
    shown = show(sustained(made(), 2.0))
    drawn = plot.draw(shown, horizontal)
    assert drawn == plot.draw(shown, horizontal)
    assert plot.digest(shown) in drawn
    for peer in ("flashgen", "FA4", "FlexAttention"):
        assert f">{peer}</text>" in drawn and plot.COLOURS[peer] in drawn

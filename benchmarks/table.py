"""The tables of README.md and docs/performance.md, made from committed files of results.

    python -m benchmarks.table FILE.json    prints them
    python -m benchmarks.table --write      puts the newest results' into the documents

A document says where a table goes with <!-- benchmark: NAME -->, a name of `TABLES`, and where it
ends with <!-- /benchmark -->.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
NO_RESULTS = "No results are committed yet."
OWN, RIVAL = "flashgen", "FlexAttention"

Document = Mapping[str, Any]
Row = Mapping[str, Any]

_BLOCK = re.compile(r"(<!-- benchmark: (\w+) -->\n).*?(<!-- /benchmark -->)", re.DOTALL)


def newest_results(folder: Path = RESULTS) -> dict[str, Document]:
    """Of each benchmark that a folder has results of, those with the latest date."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_date = sorted(documents, key=lambda document: str(document["environment"]["date"]))
    return {document["benchmark"]: document for document in by_date}


def summary_table(document: Document) -> str:
    """The grid: a row for each head dim and mask, in it a figure for each sequence length."""
    rows = [row for row in document["cells"] if row["in_grid"]]
    peers = _peers(rows)
    lengths = " / ".join(str(length) for length in sorted({row["seq_len"] for row in rows}))
    lines = [
        f"Forward TFLOP/s at sequence lengths {lengths}; {caption(document)}.",
        "",
        *_header(["head_dim", "mask", *peers, f"{OWN} / {RIVAL}"], left=2),
    ]
    for (head_dim, mask), group in groupby(rows, lambda row: (row["head_dim"][0], row["mask"])):
        cells = list(group)
        rates = [" / ".join(_rate(row, peer) for row in cells) for peer in peers]
        ratios = " / ".join(_ratio(row) for row in cells)
        lines.append(_line([str(head_dim), mask, *rates, ratios]))
    return "\n".join(lines)


def full_table(document: Document) -> str:
    """Every cell: the figure of each repetition, the errors, and what a BlockMask costs."""
    rows = document["cells"]
    parts = (
        f"{caption(document)}. TFLOP/s, the repetitions one after the other.",
        _rates_table(rows),
        "Error relative to float64 (Frobenius norm over two heads):",
        _error_table(rows),
        f"What making {RIVAL}'s BlockMask costs before the call, and what {OWN}'s module ships:",
        _cost_table(rows),
        *_refusals(rows),
    )
    return "\n\n".join(parts)


def variants_table(document: Document) -> str:
    """A row for each variant: rates over the visible elements, and what its mask costs."""
    rows = document["cells"]
    peers = _peers(rows)
    ratio, memory = f"{OWN} / {RIVAL}", f"{OWN}'s extra KiB"
    columns = ["attention", "visible", *peers, ratio, memory, "BlockMask MiB", "BlockMask ms"]
    lines = [
        f"Forward TFLOP/s on visible elements: head_dim {rows[0]['head_dim'][0]}, "
        f"{rows[0]['num_heads']} heads, {rows[0]['seq_len']} tokens, {rows[0]['dtype']}; "
        f"{caption(document)}.",
        "",
        *_header(columns),
    ]
    for row in rows:
        visible = f"{100 * row['visible_pairs'] / row['seq_len'] ** 2:.1f}%"
        rates = [_rate(row, peer) for peer in peers]
        extra = f"{row['extra_bytes'] / 1024:.0f}"
        lines.append(_line([row["title"], visible, *rates, _ratio(row), extra, *_block_mask(row)]))
    return "\n".join(lines)


def caption(document: Document) -> str:
    """What the figures belong to, as a sentence without its stop."""
    env = document["environment"]
    repeats = max(len(rates) for row in document["cells"] for rates in row["tflops"].values())
    medians = "one median" if repeats == 1 else f"mean of {repeats} medians"
    return (
        f"{env['gpu']}, torch {env['torch']}, triton {env['triton']}, cuDNN {env['cudnn']}, "
        f"{env['date']}, {medians}"
    )


#: By name: the benchmark that a table is of, and what makes it.
TABLES: dict[str, tuple[str, Callable[[Document], str]]] = {
    "summary": ("forward", summary_table),
    "full": ("forward", full_table),
    "variants": ("variants", variants_table),
    "variants_full": ("variants", full_table),
}


def fill(text: str, results: Mapping[str, Document]) -> str:
    """``text`` with the tables of these results between its marks."""

    def block(match: re.Match[str]) -> str:
        benchmark, table = TABLES[match[2]]
        shown = table(results[benchmark]) if benchmark in results else NO_RESULTS
        return f"{match[1]}{shown}\n{match[3]}"

    return _BLOCK.sub(block, text)


def _peers(rows: Iterable[Row]) -> list[str]:
    """The peers that any row has a figure for, in the order of first mention."""
    return list(dict.fromkeys(peer for row in rows for peer in sorted(row["tflops"], key=_place)))


def _place(peer: str) -> tuple[int, str]:
    return ([OWN, RIVAL].index(peer) if peer in (OWN, RIVAL) else 2, peer)


def _rate(row: Row, peer: str) -> str:
    rates = row["tflops"].get(peer)
    return f"{mean(rates):.0f}" if rates else "-"


def _ratio(row: Row) -> str:
    """How many times as fast as the rival: times, unlike rates, have not been rounded twice."""
    ms = row["ms"]
    return f"{mean(ms[RIVAL]) / mean(ms[OWN]):.2f}" if {OWN, RIVAL} <= set(ms) else "-"


def _rates_table(rows: list[Row]) -> str:
    peers = _peers(rows)
    lines = _header(["cell", "dtype", *peers, f"{OWN} / {RIVAL}"], left=2)
    for row in rows:
        rates = [" ".join(f"{rate:.0f}" for rate in row["tflops"].get(peer, [])) for peer in peers]
        shown = [rate or "-" for rate in rates]
        lines.append(_line([row["cell"], row["dtype"], *shown, _ratio(row)]))
    return "\n".join(lines)


def _error_table(rows: list[Row]) -> str:
    peers = _peers(rows)
    lines = _header(["cell", *peers])
    for row in rows:
        errors = [f"{row['error'][peer]:.2e}" if peer in row["error"] else "-" for peer in peers]
        lines.append(_line([row["cell"], *errors]))
    return "\n".join(lines)


def _cost_table(rows: list[Row]) -> str:
    lines = _header(["cell", "BlockMask ms", "BlockMask peak MiB", "configuration"])
    for row in rows:
        peak_mib, ms = _block_mask(row)
        config = ", ".join(f"{key}={value}" for key, value in (row["config"] or {}).items())
        if row.get("form") == "hopper":
            config = f"Gluon: {config}"
        lines.append(_line([row["cell"], ms, peak_mib, config or "-"]))
    return "\n".join(lines)


def _block_mask(row: Row) -> tuple[str, str]:
    """MiB and milliseconds of making the BlockMask."""
    cost = row.get("block_mask")
    return (f"{cost['peak_mib']:.0f}", f"{cost['ms']:.2f}") if cost else ("-", "-")


def _refusals(rows: list[Row]) -> Iterator[str]:
    refusals = [
        f"- {row['cell']}, {peer}: {reason}"
        for row in rows
        for peer, reason in row["unavailable"].items()
    ]
    if refusals:
        yield "Not available:"
        yield "\n".join(refusals)


def _header(columns: list[str], left: int = 1) -> list[str]:
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return [_line(columns), _line(rule)]


def _line(fields: list[str]) -> str:
    return f"| {' | '.join(fields)} |"


def main() -> None:
    """Prints the tables of a file of results, or puts the newest results' into the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", type=Path, nargs="?", help="results to print the tables of")
    what.add_argument("--write", action="store_true", help="update README.md and docs/")
    options = parser.parse_args()
    if options.write:
        for path in DOCUMENTS:
            path.write_text(fill(path.read_text(), newest_results()))
        return
    document = json.loads(options.file.read_text())
    tables = [table(document) for name, table in TABLES.values() if name == document["benchmark"]]
    sys.stdout.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()

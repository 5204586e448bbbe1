"""The pictures of docs/performance.md, made from committed files of results by matplotlib.

    python -m benchmarks.plot --write      draws docs/pictures from the newest results

A picture holds a digest of its contents, so that a test tells whether it shows the newest results,
whatever version of matplotlib drew it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.figures import (
    FA4,
    PEERS,
    TIMINGS,
    Document,
    best_fa4,
    newest_results,
    rate,
    timings,
)

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
#: Colours that are legible on white and on black.
COLOURS = dict(
    zip(
        PEERS,
        ("#e8590c", "#3b82c4", "#5a9e3a", "#9b6fc9", "#8a8f98", "#c9a227", "#f2b48c"),
        strict=True,
    )
)
INK = "#808488"

#: The contents of a picture: its title, and the groups of bars of each panel, as (peer, TFLOP/s).
Bars = list[tuple[str, float]]
Shown = dict[str, Any]


def dense(document: Document) -> Shown:
    """A panel for each mask and head dim of the grid, with a group for each sequence length."""
    rows = [row for row in document["cells"] if row["in_grid"]]
    timing = timings(rows)[-1]
    panels: dict[str, dict[str, Bars]] = {}
    for row in sorted(rows, key=lambda row: row["mask"] != "full"):  # full above causal
        panel = panels.setdefault(f"{row['mask']}, head_dim {row['head_dim'][0]}", {})
        panel[f"{row['seq_len']:,}"] = [
            (peer, round(value)) for peer in PEERS if (value := rate(row, peer, timing))
        ]
    return {"title": _title("Full and causal attention", document, timing), "panels": panels}


def variants(document: Document) -> Shown:
    """One panel with a group for each variant; FlashAttention 4 in the faster of its ways."""
    rows = document["cells"]
    timing = timings(rows)[-1]
    groups: dict[str, Bars] = {}
    for row in rows:
        names = {peer: best_fa4(row, timing) if peer == FA4 else peer for peer in PEERS}
        found = [(peer, rate(row, name, timing)) for peer, name in names.items()]
        groups[row["title"]] = [(peer, round(value)) for peer, value in found if value]
    first = rows[0]
    what = f"Variants, {first['seq_len']:,} tokens, head_dim {first['head_dim'][0]}"
    return {"title": _title(what, document, timing), "panels": {"": groups}}


def _title(what: str, document: Document, timing: str) -> str:
    env, passed = document["environment"], document["benchmark"]
    passed = "backward" if passed == "backward" else "forward"
    return f"{what}: {passed} TFLOP/s on visible elements, {TIMINGS[timing]}, {env['gpu']}"


def digest(shown: Shown) -> str:
    """The digest of a picture's contents, as the picture holds it."""
    return "sha256:" + hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(shown: Shown, horizontal: bool) -> str:
    """The picture as SVG, the same bytes for the same figures.

    Raises:
        ImportError: matplotlib is not installed; pip install 'flashgen[bench]' brings it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "flashgen",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
        **{f"axes.{part}": INK for part in ("edgecolor", "labelcolor", "titlecolor")},
    }
    panels = shown["panels"]
    columns = 1 if len(panels) == 1 else 3
    lines = -(-len(panels) // columns)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 7.2 if horizontal else 2.2 * lines + 1), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False, sharex=horizontal, sharey=True)
        for place, (name, groups) in zip(axes.flat, panels.items(), strict=False):
            _bars(place, groups, horizontal)
            place.set_title(name, fontsize=9)
        drawn = {label: bar for a in axes.flat for bar, label in zip(*_legend(a), strict=True)}
        peers = [peer for peer in PEERS if peer in drawn]
        figure.suptitle(shown["title"], fontsize=10)
        figure.legend(
            [drawn[peer] for peer in peers],
            peers,
            loc="outside lower center",
            ncols=len(peers),
            frameon=False,
        )
        out = StringIO()
        about = {"Date": None, "Creator": None, "Description": digest(shown)}
        figure.savefig(out, format="svg", transparent=True, metadata=about)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    found: tuple[list[Any], list[str]] = axes.get_legend_handles_labels()
    return found


def _bars(axes: Any, groups: dict[str, Bars], horizontal: bool) -> None:
    """Groups of bars with their figures at the ends, the first group on the left or at the top."""
    width = 0.84 / max(map(len, groups.values()))
    placed: dict[str, list[tuple[float, float]]] = {}
    for at, bars in enumerate(groups.values()):
        for i, (peer, value) in enumerate(bars):
            placed.setdefault(peer, []).append((at + (i - (len(bars) - 1) / 2) * width, value))
    for peer, places in placed.items():
        bar = axes.barh if horizontal else axes.bar
        drawn = bar(*zip(*places, strict=True), 0.94 * width, color=COLOURS[peer], label=peer)
        if horizontal:
            axes.bar_label(drawn, fontsize=7, padding=2, color=INK)
    ticks = range(len(groups))
    if horizontal:
        axes.set_yticks(ticks, list(groups))
        axes.invert_yaxis()
    else:
        axes.set_xticks(ticks, list(groups))
    axes.grid(axis="x" if horizontal else "y", linewidth=0.5, alpha=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


#: By file: the benchmark of a picture, its contents, and whether its bars are horizontal.
DRAWN: dict[str, tuple[str, Callable[[Document], Shown], bool]] = {
    "dense.svg": ("forward", dense, False),
    "variants.svg": ("variants", variants, True),
    "backward.svg": ("backward", dense, False),
}


def main() -> None:
    """Draws the pictures of the newest results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", action="store_true", required=True, help="write docs/pictures")
    parser.parse_args()
    results = newest_results()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, (benchmark, show, horizontal) in DRAWN.items():
        if benchmark in results:
            (PICTURES / name).write_text(draw(show(results[benchmark]), horizontal))


if __name__ == "__main__":
    main()

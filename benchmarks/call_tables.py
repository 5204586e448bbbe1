"""Tables of short calls: their cost on the CPU, and steps of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from benchmarks.figures import OWN, TIMINGS, Document, caption, machine, peers_of, timings
from benchmarks.markdown import header, line


def launch_table(document: Document) -> str:
    """Microseconds of the CPU that a call takes, beside the peers' and in parts."""
    parts = [
        f"Microseconds of the CPU for a call at S=128, no CUDA graph; {machine(document)}.",
        _microseconds(document["calls"]),
    ]
    if "training" in document:  # early files lack it
        parts += [
            "Of training in eager mode, for a forward and a backward pass:",
            _microseconds(document["training"]),
        ]
    parts += [
        f"Of {OWN}'s, and what it does once or otherwise:",
        _microseconds(document["parts"]),
    ]
    return "\n\n".join(parts)


def decoding_table(document: Document) -> str:
    """Microseconds of each step by each implementation, and our rate of reading keys, values."""
    rows = document["cells"]
    ways = peers_of(rows)
    parts = [
        f"Microseconds of a step: sequences x queries of keys; 32 heads, 8 of keys, head_dim 128, "
        f"bfloat16; {caption(document)}. TB/s are of keys and values, read once."
    ]
    for timing in timings(rows):
        lines = header(["step", *ways, f"{OWN}, TB/s"])
        for row in rows:
            ms = {way: mean(row[timing][way]) for way in ways if row[timing].get(way)}
            shown = [f"{1e3 * ms[way]:.1f}" if way in ms else "-" for way in ways]
            lines.append(line([row["step"], *shown, f"{row['bytes'] / ms[OWN] / 1e9:.2f}"]))
        parts += [f"By {TIMINGS[timing]}:", "\n".join(lines)]
    refused = {f"- {way}: {reason}" for row in rows for way, reason in row["unavailable"].items()}
    if refused:
        parts += ["Not available:", "\n".join(sorted(refused))]
    return "\n\n".join(parts)


def _microseconds(rows: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = header(["", *rows])
    for name in names:
        lines.append(line([name, *(f"{r[name]:.1f}" if name in r else "-" for r in rows.values())]))
    return "\n".join(lines)

"""The table of models of transformers: errors, and milliseconds of each implementation."""

from __future__ import annotations

from benchmarks.figures import OWN, Document, Row
from benchmarks.markdown import header, line

NAMES = (OWN, "SDPA", "eager")


def models_table(document: Document) -> str:
    """A row for each model: errors, and milliseconds of each implementation."""
    kinds = {"forward": "forward", "training": "training step", "token": "a token"}
    made = document["environment"]
    lines = [
        f"bfloat16; milliseconds of {' / '.join(NAMES)}; {made['gpu']}, torch {made['torch']}, "
        f"triton {made['triton']}, transformers {made['transformers']}, {made['date']}, medians of "
        f"turns. Errors are of output / gradients, {OWN}'s and eager attention's.",
        "",
        *header(["model", *kinds.values(), f"error, {OWN}", "error, eager", "equal tokens"]),
    ]
    for row in document["cells"]:
        shown = [
            " / ".join(_number(row["ms"].get(kind, {}).get(name)) for name in NAMES)
            if kind in row["ms"]
            else "-"
            for kind in kinds
        ]
        errors = [_both_errors(row, name) for name in (OWN, "eager")]
        lines.append(line([row["cell"], *shown, *errors, row["equal_tokens"].get(OWN, "-")]))
    refusals = [
        f"- {row['cell']}, {name}: {reason.partition('. ')[0]}"
        for row in document["cells"]
        for name, reason in row["unavailable"].items()
    ]
    return "\n".join([*lines, *(["", *refusals] if refusals else [])])


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3g}"


def _both_errors(row: Row, name: str) -> str:
    found = [row[kind].get(name) for kind in ("error", "grad_error")]
    return " / ".join("-" if x is None else f"{x:.2g}" for x in found)

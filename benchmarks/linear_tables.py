"""Tables of linear attention: in short, beside fla and softmax, and every cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from statistics import mean
from typing import Any

from benchmarks.figures import OWN, Document, Row, machine, peers_of
from benchmarks.linear_ways import FLA, HEADS, VARIANTS
from benchmarks.markdown import header, line

#: Bytes of q, k, v and the output for each of their elements.
BYTES = 8


def linear_table(document: Document) -> str:
    """Each variant at all lengths, one cell in all ways, random features, a million tokens."""
    rows = [row for row in document["cells"] if row["ms"].get(OWN)]
    rate = document["copy_rate"]

    def of_part(part: str) -> list[Row]:
        return [row for row in rows if row["part"] == part]

    parts = [
        f"Causal, bfloat16, {HEADS} heads; {_source(document)}. Ratios are to the fastest of fla's "
        "ways. *Of copy*: the time in which q, k, v and the output would be read and written once, "
        f"at the {rate / 1e12:.2f} TB/s of a copy in this run, over the time of the forward pass. "
        "Memory: what a forward and a backward pass take beside their inputs."
    ]
    if grid := of_part("grid"):
        parts.append(_grid(grid, rate))
    if cell := of_part("cell"):
        parts += [f"{_size(cell[0])}, head_dim {cell[0]['head_dim']}:", _every_way(cell, rate)]
    if beside := of_part("softmax"):
        parts += ["Performer beside causal softmax attention:", _every_way(beside, rate)]
    if tokens := of_part("tokens"):
        parts += ["The same number of tokens in sequences of other lengths:", _of_tokens(tokens)]
    return "\n\n".join([*parts, *_checked(document), *_refusals(document)])


def linear_full_table(document: Document) -> str:
    """A row for each cell: milliseconds of both passes, in both orders, and memory."""
    rows = [row for row in document["cells"] if row["ms"]]
    names = peers_of(rows)
    passes = (("ms", "forward"), ("backward_ms", "backward"))
    columns = [f"{name}, {said}" for name in names for _, said in passes]
    lines = header(["cell", *columns, *(f"{name}, MiB" for name in names)])
    for row in rows:
        ms = (
            " ".join(f"{ms:.4g}" for ms in row[key].get(name, ())) or "-"
            for name in names
            for key, _ in passes
        )
        mib = (
            _joined(str(row[key].get(name, "-")) for key in ("mib", "training_mib"))
            for name in names
        )
        lines.append(line([row["cell"], *ms, *mib]))
    said = "Milliseconds, in both orders; MiB of a forward call / of a forward and a backward pass"
    return f"{said}; {_source(document)}.\n\n" + "\n".join(lines)


def _grid(rows: Sequence[Row], rate: float) -> str:
    """A row for each head_dim and variant, with a figure for each size in each column."""
    sizes = list(dict.fromkeys((row["batch"], row["seq_len"]) for row in rows))
    sizes.sort(key=lambda size: (-size[0] * size[1], size[1]))
    columns: dict[str, Callable[[Row], str]] = {
        f"{OWN} forward, ms": lambda row: _mean(row, "ms", OWN),
        "to fla": lambda row: _ratio(row, "ms"),
        "of copy": lambda row: _of_copy(row, rate),
        f"{OWN} backward, ms": lambda row: _mean(row, "backward_ms", OWN),
        "backward to fla": lambda row: _ratio(row, "backward_ms"),
        f"{OWN}, GiB": lambda row: _gib(row, OWN),
        f"{FLA}, GiB": lambda row: _gib(row, FLA),
    }
    lines = header(["head_dim", "variant", *columns], left=2)
    for head_dim in dict.fromkeys(row["head_dim"] for row in rows):
        for variant in VARIANTS:
            found = {
                (row["batch"], row["seq_len"]): row
                for row in rows
                if (row["head_dim"], row["variant"]) == (head_dim, variant)
            }
            if found:
                shown = [
                    _joined(show(found[size]) if size in found else "-" for size in sizes)
                    for show in columns.values()
                ]
                lines.append(line([str(head_dim), VARIANTS[variant], *shown]))
    said = " / ".join(f"{batch} x {seq_len}" for batch, seq_len in sizes)
    return f"{said} (sequences x tokens):\n\n" + "\n".join(lines)


def _every_way(rows: Sequence[Row], rate: float) -> str:
    """A row for each cell, with the milliseconds of each way."""
    names = peers_of(rows)
    lines = header(
        ["cell", *names, "to the fastest peer", "of copy", *(f"{x}, GiB" for x in names)]
    )
    for row in rows:
        lines.append(
            line(
                [
                    row["cell"] if row["part"] == "softmax" else VARIANTS[row["variant"]],
                    *(
                        _joined(_mean(row, key, name) for key in ("ms", "backward_ms"))
                        for name in names
                    ),
                    _joined(_ratio(row, key) for key in ("ms", "backward_ms")),
                    _of_copy(row, rate),
                    *(_gib(row, name) for name in names),
                ]
            )
        )
    return "Milliseconds, forward / backward.\n\n" + "\n".join(lines)


def _of_tokens(rows: Sequence[Row]) -> str:
    """A row for each cell: milliseconds, and how they compare with those of the shortest."""
    lines = header(["cell", "forward, ms", "backward, ms", "of the shortest's", "GiB"])
    for row in rows:
        alike = (x for x in rows if x["variant"] == row["variant"])
        shortest = min(alike, key=lambda other: int(other["seq_len"]))
        relative = (
            f"{mean(row[key][OWN]) / mean(shortest[key][OWN]):.2f}"
            if row[key].get(OWN) and shortest[key].get(OWN)
            else "-"
            for key in ("ms", "backward_ms")
        )
        ms = (_mean(row, key, OWN) for key in ("ms", "backward_ms"))
        lines.append(line([row["cell"], *ms, _joined(relative), _gib(row, OWN)]))
    return "\n".join(lines)


def _checked(document: Document) -> Iterator[str]:
    """The largest errors of each implementation on the short sequences that were checked."""
    worst: dict[str, list[float]] = {}  # of output and gradients, then of decays if there are any
    for row in document["checks"]:
        for name, errors in row["error"].items():
            found = [max(errors[:4]), *errors[4:]]
            longest = zip_longest(worst.get(name, []), found, fillvalue=0.0)
            worst[name] = [max(pair) for pair in longest]
    if worst:
        shown = (f"{name} {_joined(f'{x:.1e}' for x in worst[name])}" for name in worst)
        yield (
            "Largest error of the output and the gradients of q, k and v / of decays, relative to "
            f"the recurrence in float64, over {len(document['checks'])} short calls: "
            f"{', '.join(shown)}."
        )


def _refusals(document: Document) -> Iterator[str]:
    lines = [
        f"- {row['cell']}, {name}: {reason}"
        for row in (*document["checks"], *document["cells"])
        for name, reason in row["unavailable"].items()
    ]
    if lines:
        yield "Not available:"
        yield "\n".join(lines)


def _source(document: Document) -> str:
    fla = document["environment"].get("fla_core")
    beside = f", fla-core {fla} (fla)" if fla else ""
    return f"{machine(document)}{beside}, mean of 2 medians"


def _size(row: Row) -> str:
    return f"{row['batch']} x {row['seq_len']}"


def _joined(shown: Iterable[Any]) -> str:
    return " / ".join(shown)


def _mean(row: Row, key: str, name: str) -> str:
    return f"{mean(row[key][name]):.3g}" if row[key].get(name) else "-"


def _ratio(row: Row, key: str) -> str:
    """How many times as fast as the fastest other way."""
    others = [mean(ms) for name, ms in row[key].items() if name != OWN]
    return f"{min(others) / mean(row[key][OWN]):.2f}" if others and row[key].get(OWN) else "-"


def _of_copy(row: Row, rate: float) -> str:
    elements = row["batch"] * row["seq_len"] * HEADS * row["head_dim"]
    return f"{100 * BYTES * elements / rate / (mean(row['ms'][OWN]) / 1e3):.0f}%"


def _gib(row: Row, name: str) -> str:
    mib = row["training_mib"].get(name)
    return f"{mib / 1024:.1f}" if mib else "-"

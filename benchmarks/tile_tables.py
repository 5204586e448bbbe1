"""Tables of masks that only the data knows, from the results of benchmarks.tiles."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.figures import OWN, RIVAL, Document, Row, caption, peers_of
from benchmarks.markdown import header, line

#: Figures of a pass, and the name of the pass.
PASSES = {"ms": "forward", "backward_ms": "backward"}

#: What rates are of.
WORK = ("visited", "visible")


def tiles_table(document: Document) -> str:
    """Milliseconds of both passes, rates beside causal's, and ratios to FlexAttention."""
    rows: Sequence[Row] = document["cells"]
    parts = [
        "Milliseconds of one sequence, 16 heads of 128, bfloat16, with tiles and BlockMasks ready; "
        "'made' is flashgen's forward pass with the making of its tiles, '-' where bounds are "
        f"exact and there are none; 'visible' is a share of all pairs; {caption(document)}.",
        _times(rows),
        "Microseconds of making; flashgen's rates over those of causal attention, of the elements "
        "of tiles that hold a visible pair and of visible pairs; and how many times as fast as "
        f"{RIVAL}, ready and with the making of flashgen's tiles and of {RIVAL}'s BlockMask.",
        _ratios(rows),
    ]
    refused = {
        f"- {row['cell']}, {name}: {reason}"
        for row in rows
        for name, reason in row["unavailable"].items()
    }
    if refused:
        parts += ["Not available:", "\n".join(sorted(refused))]
    return "\n\n".join(parts)


def _times(rows: Sequence[Row]) -> str:
    names = peers_of(rows)
    columns = [f"{name}, {of}" for of in PASSES.values() for name in names]
    lines = header(["cell", "visible", *columns, "made"])
    for row in rows:
        share = row["visible"] / (row["heads"] * row["seq_len"] ** 2)
        shown = [_ms(time_of(row, key, name)) for key in PASSES for name in names]
        lines.append(line([row["cell"], f"{share:.1%}", *shown, _ms(time_of(row, "made_ms"))]))
    return "\n".join(lines)


def _ratios(rows: Sequence[Row]) -> str:
    per = [f"{work}, {name}" for work in WORK for name in PASSES.values()]
    against = ["forward", "backward", "forward with making", "both with making"]
    lines = header(["cell", "tiles us", "BlockMask us", *per, *against])
    for row in rows:
        making = [_us(time_of(row, "making_ms", name)) for name in (OWN, RIVAL)]
        rates = [of_causal(row, rows, key, work) for work in WORK for key in PASSES]
        ratios = [_times_as(value) for value in (*rates, *to_flex(row))]
        lines.append(line([row["cell"], *making, *ratios]))
    return "\n".join(lines)


def time_of(row: Row, key: str, name: str = OWN) -> float | None:
    """The mean milliseconds of both orders; None without a figure."""
    found: Sequence[float] = row[key].get(name, [])
    return mean(found) if found else None


def of_causal(row: Row, rows: Sequence[Row], key: str, work: str = "visited") -> float | None:
    """Flashgen's rate in a pass over that of causal attention of the same sizes.

    Args:
        row: the cell.
        rows: all cells.
        key: the figures of the pass.
        work: ``"visited"`` counts the elements of tiles that hold a visible pair, ``"visible"``
            visible pairs.
    """
    causal = next((other for other in rows if other["cell"] == row["reference"]), None)
    if causal is None or causal is row:
        return None
    own, plain = time_of(row, key), time_of(causal, key)
    if own is None or plain is None:
        return None
    mine, its = (x[work][key] if work == "visited" else x[work] for x in (row, causal))
    rate: float = mine / its * plain / own
    return rate


def to_flex(row: Row) -> list[float | None]:
    """FlexAttention's time over flashgen's: both passes, and with making forward and both.

    A module without tiles has nothing to make.
    """
    forward, backward = (_ratio([time_of(row, key, RIVAL)], [time_of(row, key)]) for key in PASSES)
    made = time_of(row, "made_ms") or time_of(row, "ms")
    theirs = [time_of(row, key, RIVAL) for key in ("making_ms", *PASSES)]
    own = [made, time_of(row, "backward_ms")]
    return [forward, backward, _ratio(theirs[:2], own[:1]), _ratio(theirs, own)]


def _ratio(theirs: Sequence[float | None], own: Sequence[float | None]) -> float | None:
    others, mine = ([x for x in times if x is not None] for times in (theirs, own))
    if len(others) < len(theirs) or len(mine) < len(own):
        return None
    return sum(others) / sum(mine)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.0f}"


def _times_as(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

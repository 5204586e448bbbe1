"""page: accounts over lengths as one HTML file without other files or a network.

All contents are in the file as text; its script shows the parts of one length and one variant, and
hides the others. Exact numbers are in ``<data value>`` beside the rounded text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flashgen.explain.account import Account, MaskAccount
from flashgen.explain.lengths import Series
from flashgen.explain.limits import UNITS
from flashgen.explain.picture import Picture
from flashgen.explain.svg import COLOURS, MOST_CELLS, svg
from flashgen.explain.words import by_reason, bytes_text, call_text, first_of_each, time_text
from flashgen.files import write_atomically
from flashgen.paths import PACKAGE
from flashgen.version import __version__

# The template is beside this module: the templates of modules have digests, and a page has none.
_TEMPLATES = PACKAGE / "explain" / "templates"


def write_page(path: Path, series: Sequence[Series]) -> None:
    """Writes the page of these variants.

    Raises:
        OutputError: the file cannot be written.
    """
    write_atomically(path, page(series), "choose another place with --html")


def page(series: Sequence[Series]) -> str:
    """The page of these variants, which first shows the first one with the call as asked for."""
    lengths = sorted({length for one in series for length in one.lengths})
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            series=series,
            lengths=lengths,
            shown=series[0].asked.call.kv_len,
            keys_alone=any(one.asked.call.q_len != one.asked.call.kv_len for one in series),
            units=UNITS,
            colours=COLOURS,
            version=__version__,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": lambda number: _data(number, f"{number:,}"),
        "figure": lambda number: _data(number, f"{number:,.3g}"),
        "rounded": lambda number: _data(number, f"{number:,.0f}"),
        "percent": lambda share: _data(share, f"{share:.0%}"),
        "per_mille": lambda share: _data(share, f"{share:.3%}"),
        "giga": lambda number: _data(number, f"{number / 1e9:,.1f}"),
        "bytes": lambda number: _data(number, bytes_text(number)),
        "time": lambda seconds: _data(seconds, time_text(seconds).replace("us", "µs")),
        "call": call_text,
        "by_reason": by_reason,
        "first_of_each": first_of_each,
        "drawn": _drawn,
        "shown_cells": lambda mask: _cells(mask),
    }
    return environment


def _data(number: float, said: str) -> Markup:
    """The text for a number, with the number itself."""
    return Markup('<data value="{}">{}</data>').format(repr(number), said)


def _cells(mask: MaskAccount) -> Picture:
    return mask.picture.scaled(MOST_CELLS, MOST_CELLS)


def _drawn(account: Account) -> Markup:
    """The picture of the mask as a part of the page."""
    tiles = ", ".join(f"{number:,} {kind}" for kind, number in account.mask.tiles.items())
    said = html.escape(f"{account.mask.label}, tiles of a head: {tiles}")
    return Markup(svg(_cells(account.mask), said, head='role="img"'))

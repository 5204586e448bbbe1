"""Lines of output in a terminal, without `rich`, whose import takes a while."""

from __future__ import annotations

import shutil
import sys
import textwrap


def wrapped(line: str, width: int) -> str:
    """A line in as many as a terminal of this width needs, broken at spaces and indented."""
    return textwrap.fill(
        line, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )


def width_of_terminal() -> int | None:
    """Its columns; None where output goes to a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

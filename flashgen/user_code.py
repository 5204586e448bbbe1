"""Where in the user's own code a mistake is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from traceback import FrameSummary, extract_stack

from flashgen.errors import MaskError


def users_line(frames: Sequence[FrameSummary]) -> str:
    """Of a stack, the innermost line that is neither flashgen's nor torch's, as a person finds it.

    ``"specs/mine.py:7: `if q_idx > 5:`"``, or "" where there is none.
    """
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    for frame in reversed(frames):
        name = os.path.abspath(frame.filename)
        if not name.startswith(package) and f"{os.sep}torch{os.sep}" not in name:
            return f"{frame.filename}:{frame.lineno}: `{frame.line}`"
    return ""


def mistake(problem: str, remedy: str) -> MaskError:
    """A `MaskError` that shows the line of the user's own code that is being run."""
    where = users_line(extract_stack())
    return MaskError(f"{where + ': ' if where else ''}{problem}; {remedy}")

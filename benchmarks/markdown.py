"""Rows of tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def header(columns: Sequence[str], left: int = 1) -> list[str]:
    """The names of columns and the rule; all but the first ``left`` columns align to the right."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return [line(columns), line(rule)]


def line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"

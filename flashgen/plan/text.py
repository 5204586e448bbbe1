"""What printed source mentions."""

from __future__ import annotations

import re
from collections.abc import Iterable

_GATHER = re.compile(r"\b_at_(\d+)d\(")


def quoted(line: str) -> str:
    """A user's line as it stands in a docstring, which it neither ends nor escapes from."""
    return line.replace("\\", r"\\").replace('"""', r"\"\"\"")


def mentioned(names: Iterable[str], texts: Iterable[str]) -> frozenset[str]:
    """The names that occur, as whole words, in any of the texts."""
    words = set(re.findall(r"\w+", " ".join(texts)))
    return frozenset(name for name in names if name in words)


def gathered_dimensions(texts: Iterable[str]) -> tuple[int, ...]:
    """The numbers of dimensions that tensors are indexed by in the texts, ascending."""
    return tuple(sorted({int(n) for text in texts for n in _GATHER.findall(text)}))

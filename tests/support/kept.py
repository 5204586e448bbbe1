"""What flashgen makes of texts, once in a process: the same stand in many modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from flashgen.codegen import digest, environment, folding


def keep_texts() -> None:
    """Of functions whose result depends on a text alone: lines that are folded, and digests.

    A quarter of the time went to lines that modules take to render, and a tenth of that of all
    tests but the sweep to digests.
    """
    for name in ("_mask", "_fitted", "fold"):
        _replace(folding, name, functools.cache(getattr(folding, name)))
    of_tuple = functools.cache(digest.source_digest)

    def source_digest(text: str, functions: Iterable[str] = ()) -> str:
        return of_tuple(text, tuple(functions))

    _replace(digest, "source_digest", source_digest)
    assert environment.fold is folding.fold  # type: ignore[attr-defined]


def _replace(home: Any, name: str, kept: Callable[..., Any]) -> None:
    """Where it is defined, and where it was imported already."""
    original = getattr(home, name)
    for module in [one for key, one in sys.modules.items() if key.startswith("flashgen.")]:
        if vars(module).get(name) is original:
            setattr(module, name, kept)

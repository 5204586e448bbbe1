"""Lines of rendered source that are folded once in a process: the same stand in many modules."""

from __future__ import annotations

import functools

from flashgen.codegen import environment, folding


def keep_folded() -> None:
    """Of what `flashgen.codegen.folding` makes of a text, which depends on that alone.

    A quarter of the time went there that modules take to render.
    """
    for name in ("_mask", "_fitted", "fold"):
        setattr(folding, name, functools.cache(getattr(folding, name)))
    environment.fold = folding.fold  # type: ignore[attr-defined]

"""What every declaration has; `flashgen.params` and `flashgen.constants` have the kinds."""

from __future__ import annotations

from typing import Any


class Param:
    """What the call gives a value, as a keyword of ``attention``; or a `Constant`, which has one.

    Attributes:
        name: the keyword.
        default: its value when the call leaves it out; None makes it required.
        doc: one line for the generated docstring.
    """

    __slots__ = ()

    name: str
    default: int | float | None
    doc: str

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        raise NotImplementedError

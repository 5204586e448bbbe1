"""The errors that a user can cause: each says where it is and what to do.

A `FlashgenError` is the user's to fix: the command line prints its lines and exits with status 2.
Anything else that escapes is a bug in flashgen and keeps its traceback.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType


class FlashgenError(Exception):
    """Something the user can fix. `str(error)` is one line, or one line a mistake."""

    #: The exit status of a command that it ends.
    status = 2


class SpecFileError(FlashgenError):
    """A spec file that cannot be read as specs at all (syntax, no spec, two of one name)."""


class SpecInterruptedError(FlashgenError):
    """A spec file that ran until the user stopped it, perhaps because it never ends."""

    status = 130


class MaskError(FlashgenError):
    """A mask function that flashgen cannot follow, in the user's own terms: "problem; remedy"."""


class OutputError(FlashgenError):
    """The output folder, or a file in it, cannot be written or is not what it should be."""


class TuneError(FlashgenError):
    """Measuring on this machine's GPU that cannot be done."""


@dataclass(frozen=True)
class Violation:
    """One thing wrong with one spec.

    Attributes:
        variant: the spec's name.
        field: the spec's field at fault (``"head_dim"``), with a target where it depends on one.
        value: the value given, as the user would write it.
        problem: what is wrong with it.
        remedy: what to write instead.
        file: the spec file, or None for a spec made in memory.
    """

    variant: str
    field: str
    value: str
    problem: str
    remedy: str
    file: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        return f"{where}{self.variant}: {self.field}={self.value}: {self.problem}; {self.remedy}"


@dataclass(frozen=True)
class SramViolation(Violation):
    """Blocks that a target has too little shared memory for; `value` is their breakdown."""

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        return f"{where}{self.variant}: {self.problem} ({self.value}). {self.remedy}."


class ValidationError(FlashgenError):
    """Everything wrong with the specs of one build, reported at once, a line each."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """A value as the user would write it, on one line and not too long for a message."""
    if isinstance(value, FunctionType):
        return value.__name__
    return " ".join(_short.repr(value).split())


def one_of(values: tuple[object, ...]) -> str:
    """What to write in place of a value that is none of these."""
    return f"write one of {', '.join(map(repr, values))}"


def first_line(error: Exception) -> str:
    """An exception's class, and the first line of what it says: a compiler's or a driver's, say."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"

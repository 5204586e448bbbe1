"""Text whose line breaks are chosen by what fits: groups that are broken whole or not at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_LENGTH = 100


@dataclass(frozen=True)
class Line:
    """A line break where its group is broken, else this text."""

    flat: str = ""


@dataclass(frozen=True)
class Broken:
    """Text that is there only where its group is broken."""

    text: str


@dataclass(frozen=True)
class Indent:
    """What stands four columns further in."""

    body: tuple[Doc, ...]


@dataclass(frozen=True)
class Group:
    """On one line if that fits, together with what follows up to the next line break.

    What surrounds an `outer` one is measured as if that one were broken.
    """

    body: tuple[Doc, ...]
    outer: bool = False


Doc = str | Line | Broken | Indent | Group
# Indentation, whether on one line, and what to print; the last is printed first.
Stack = list[tuple[int, bool, Doc]]


def stack_of(indent: int, flat: bool, docs: tuple[Doc, ...]) -> Stack:
    """The stack that prints these in their order."""
    return [(indent, flat, doc) for doc in reversed(docs)]


def render(indent: int, docs: tuple[Doc, ...]) -> str:
    """The text of a statement that is indented so far."""
    stack = stack_of(indent, False, docs)
    lines = [""]
    while stack:
        indent, flat, doc = stack.pop()
        if isinstance(doc, str):
            *whole, last = _string_pieces(doc, indent) if lines[-1] == " " * indent else [doc]
            for piece in whole:
                lines[-1] += piece
                lines.append(" " * indent)
            lines[-1] += last
        elif isinstance(doc, Line):
            lines[-1] += doc.flat if flat else ""
            lines += [] if flat else [" " * indent]
        elif isinstance(doc, Broken):
            lines[-1] += "" if flat else doc.text
        elif isinstance(doc, Indent):
            stack += stack_of(indent + 4, flat, doc.body)
        else:
            flat = fits([*stack, *stack_of(indent, True, doc.body)], len(lines[-1]))
            stack += stack_of(indent, flat, doc.body)
    return "\n".join(lines)


def fits(stack: Stack, column: int) -> bool:
    """Whether the text from this column to the next line break fits."""
    stack = [*stack]
    while stack:
        indent, flat, doc = stack.pop()
        if isinstance(doc, str):
            column += len(doc)
        elif isinstance(doc, Line):
            if not flat:
                return True
            column += len(doc.flat)
        elif isinstance(doc, Broken):
            column += 0 if flat else len(doc.text)
        elif isinstance(doc, Indent):
            stack += stack_of(indent + 4, flat, doc.body)
        elif doc.outer:
            if column == LINE_LENGTH:
                return False  # its opening bracket stands in that line
            column = indent + 1  # behind the closing one
        else:
            stack += stack_of(indent, flat, doc.body)
        if column > LINE_LENGTH:
            return False
    return True


def _string_pieces(text: str, indent: int) -> list[str]:
    """A string literal that is too wide for a line as several, broken before spaces."""
    match = re.fullmatch(r'f?"([^"\\]*)"', text)
    if match is None or indent + len(text) <= LINE_LENGTH:
        return [text]
    width = LINE_LENGTH - indent - len('f""')
    pieces = [""]
    for word in re.findall(r" ?(?:\{[^}]*\}|[^ {])*", match[1])[:-1]:
        if pieces[-1] and len(pieces[-1]) + len(word) > width:
            pieces.append("")
        pieces[-1] += word
    return [('f"' if "{" in piece else '"') + piece + '"' for piece in pieces]

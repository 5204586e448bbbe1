"""Lines over 100 columns wide: statements broken as a formatter does it, prose wrapped."""

from __future__ import annotations

import re
import textwrap

LINE_LENGTH = 100

# From what binds least to what binds most: a wide expression is broken at the first that it has.
_OPERATORS = (
    (" | ",), (" ^ ",), (" & ",), (" + ", " - "), (" * ", " / ", " // ", " % "),
)  # fmt: skip
_COMPARISONS = (" >= ", " > ", " <= ", " < ", " == ", " != ")
_ASSIGNMENT = re.compile(r" *(?:[\w, ]+ (?:[&|+*-]?=) |return )")


def fold(line: str) -> str:
    """The statement on as few lines as fit: a call with its arguments on one line or one each, a
    sum or a junction in parentheses with an operand a line.
    """
    text = line.rstrip("\n")
    end = ":" if text.endswith(":") else ""
    return _folded(text.removesuffix(":"), end) + "\n"


def wrap(text: str, hanging: int = 4, prefix: str = "") -> str:
    """Prose, or a formula in prose, on as few lines as fit; the later ones are indented further.

    Args:
        text: with the indentation of its first line.
        hanging: columns that the later lines are indented by besides.
        prefix: what stands before each line's own text, ``"# "`` for a comment.
    """
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(
        text.strip(),
        LINE_LENGTH,
        initial_indent=indent + prefix,
        subsequent_indent=indent + prefix + " " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _folded(text: str, end: str = "") -> str:
    if len(text) + len(end) <= LINE_LENGTH:
        return text + end
    indent = re.match(" *", text)[0]  # type: ignore[index]
    head = _ASSIGNMENT.match(text)
    start = head.end() if head else len(indent)
    if head and (operators := _weakest(text[start:])):
        operands = _broken_at(text[start:], operators)
        body = _one_or_each(indent, operands, " ".join(operands), "")
        return f"{text[:start]}(\n{body}{indent}){end}"
    opening = next((i for i, c in enumerate(text) if c in "([" and i >= start), None)
    if opening is None or _closing(text, opening) != len(text) - 1:
        return text + end
    inner = text[opening + 1 : -1]
    if operators := _weakest(inner):
        body = _one_or_each(indent, _broken_at(inner, operators), inner, "")
    else:
        body = _one_or_each(indent, _arguments(inner), inner, ",")
    return f"{text[: opening + 1]}\n{body}{indent}{text[-1]}{end}"


def _one_or_each(indent: str, parts: list[str], whole: str, end: str) -> str:
    """The parts on one line if they fit, else each on its own."""
    if len(indent) + 4 + len(whole) <= LINE_LENGTH:
        return f"{indent}    {whole}\n"
    return "".join(_folded(f"{indent}    {part}", end) + "\n" for part in parts)


def _weakest(text: str) -> tuple[str, ...]:
    """The operators outside brackets that bind least; none where it has a comma or no operator."""
    outside = "".join(c if depth == 0 else "." for c, depth in _depths(text))
    if "," in outside or " if " in outside or " for " in outside:
        return ()
    found = (group for group in (_COMPARISONS, *_OPERATORS) if any(o in outside for o in group))
    return next(found, ())


def _broken_at(text: str, operators: tuple[str, ...]) -> list[str]:
    """Operands, each but the first behind its operator."""
    parts, depth, i = [""], 0, 0
    while i < len(text):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        operator = next((o for o in operators if depth == 0 and text.startswith(o, i)), None)
        if operator and parts[-1]:
            parts.append(operator.lstrip())
            i += len(operator)
        else:
            parts[-1] += text[i]
            i += 1
    return parts


def _arguments(text: str) -> list[str]:
    arguments = [""]
    for character, depth in _depths(text):
        if character == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += character
    return [argument.strip() for argument in arguments]


def _closing(text: str, opening: int) -> int | None:
    """Where the bracket that opens there is closed."""
    for i, (_, depth) in enumerate(_depths(text[opening:])):
        if i and depth == 0:
            return opening + i
    return None


def _depths(text: str) -> list[tuple[str, int]]:
    """Each character and how many brackets are open behind it; an opening one counts for itself."""
    depth, result = 0, []
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        result.append((character, depth))
    return result

"""Lines over 100 columns wide: statements broken as a formatter does it, prose wrapped.

`fold` follows the layout that black has defined and `ruff format` shares:

- a bracket is broken only where it must be; its contents are then indented on a line of their own;
- a call's arguments and a subscript's indices share that line if they fit, else each has its own
  and a trailing comma; the elements of a list or a tuple have a line each at once;
- an expression in brackets is broken at all operators that bind least, which lead their lines, and
  an operand that is still too wide at the next ones;
- a statement's value gets parentheses of its own if it has two operators that bind least, or
  neither begins nor ends with a bracket to break, or would not fit by breaking brackets.

A string wider than a line is broken too, before spaces: no formatter does that, or undoes it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from flashgen.codegen.layout import (
    LINE_LENGTH,
    Broken,
    Doc,
    Group,
    Indent,
    Line,
    fits,
    render,
    stack_of,
)

# Operators by how strongly they bind, the weakest first, as they stand between operands.
_PRECEDENCE = (
    ("or",), ("and",), ("in", "not in", "is", "is not", "<", "<=", ">", ">=", "==", "!="),
    ("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "//", "%", "@"), ("**",),
)  # fmt: skip
_RANK = {operator: i for i, group in enumerate(_PRECEDENCE) for operator in group}
_OPERATOR = re.compile(f" ({'|'.join(map(re.escape, sorted(_RANK, key=len, reverse=True)))}) ")
_STRING = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*\1""")
_STATEMENT = re.compile(
    r"(?P<head> *(?:return |\) -> |(?:el)?if |while |for [\w, ]+ in |"
    r"(?P<target>[\w., ]+(?:: [\w.]+)?) [-+*/&|^]*= )?)"
    r"(?P<value>.*?)(?P<end>:?)$"
)
_PIECE = re.compile(r"[(\[{]_*[)\]}]|\.{3}|\.?[^.(\[{]+")


@lru_cache(maxsize=8192)  # modules have many lines in common
def fold(line: str) -> str:
    """The statement, one line with its indentation, on as few lines as fit."""
    text = line.rstrip("\n")
    if len(text) <= LINE_LENGTH:
        return text + "\n"
    indent = len(text) - len(text.lstrip())
    match = _STATEMENT.match(text)
    assert match is not None  # every part is optional
    head, target, value, end = match.group("head", "target", "value", "end")
    if not head.strip():
        docs: tuple[Doc, ...] = (head, *_expression(value, nested=False))
    elif target and "," in target and len(head) + len("(") > LINE_LENGTH:
        closed = " " * indent + ") = "
        targets = _parenthesised(_separated(target.lstrip()))
        docs = (" " * indent, targets, " = ", *_value(closed, True, indent, value, end))
    else:
        docs = (head, *_value(head, bool(target and "," in target), indent, value, end))
    return render(indent, (*docs, end)) + "\n"


def folded(text: str) -> str:
    """A source with its statements and comments folded where they are too long."""
    return indented(text, 0)


def indented(text: str, width: int) -> str:
    """Statements with so many spaces before each line, folded anew where one is then too long."""
    return "\n".join(map(_fitted, _statements(textwrap.indent(text, " " * width))))


def _statements(text: str) -> Iterator[str]:
    """The text's statements, comments and empty lines, each on as many lines as it is."""
    lines: list[str] = []
    depth = 0
    for line in text.split("\n"):
        lines.append(line)
        depth = max(depth + _opened(line), 0)
        if not depth:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


@lru_cache(maxsize=1 << 15)  # modules have many lines in common
def _opened(line: str) -> int:
    """How many more brackets a line opens than it closes."""
    code = _STRING.sub("", line).partition("# ")[0]
    return sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))


@lru_cache(maxsize=8192)
def _fitted(statement: str) -> str:
    lines = statement.split("\n")
    if all(len(line) <= LINE_LENGTH for line in lines):
        return statement
    before, is_comment, comment = statement.partition("# ")
    if is_comment and not before.strip():
        return wrap(before + comment, 0, "# ")
    return fold(_joined(lines)).rstrip("\n")


def _joined(lines: list[str]) -> str:
    """A statement that was folded for fewer spaces, on one line again."""
    text = lines[0]
    for line in map(str.strip, lines[1:]):
        if line[0] in ")]}":
            text = text.removesuffix(",")
        follows = line[0] in ")]}" or (line[0] == "." and line[1] != ".")
        tight = follows or text[-1] in "([{"
        text += line if tight else f" {line}"
    return text


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


def _value(head: str, unpacked: bool, indent: int, text: str, end: str) -> tuple[Doc, ...]:
    """What stands behind a statement's head, with the parentheses that breaking it asks for."""
    parts = _split(text, ", ")
    wrapped = (_parenthesised(_separated(text) if len(parts) > 1 else _expression(text)),)
    if len(parts) > 2 or (len(parts) == 2 and "return " not in head):
        return wrapped
    stays = tuple(doc for part in parts for doc in (", ", *_expression(part, False, outer=True)))[
        1:
    ]
    fits_so = fits(stack_of(indent, True, (*stays, end)), len(head))
    if len(parts) == 2:
        return stays if fits_so else wrapped
    if _operators(text) or text.startswith("not ") or " if " in _mask(text) or _is_fluent(text):
        return stays if fits_so and _can_stay(text) else wrapped
    plain = _expression(text, nested=False)
    if text.lstrip("-~+")[0] in "([{":
        return plain
    if unpacked:
        opening = re.search(r"[(\[]", text)
        return plain if opening and len(head) + opening.end() <= LINE_LENGTH else wrapped
    alone = fits(stack_of(indent + 4, True, stays), indent + 4)
    return stays if fits_so else wrapped if alone else plain


def _parenthesised(body: tuple[Doc, ...]) -> Group:
    return Group((Broken("("), Indent((Line(), *body)), Line(), Broken(")")))


def _can_stay(text: str) -> bool:
    """Whether a value may be broken at its own brackets, without parentheses around all of it."""
    mask = _mask(text)
    operators = _operators(text)
    weakest = min((_RANK[o] for o in operators), default=None)
    if weakest is None or " if " in mask:
        return " if " not in mask and not _is_fluent(text)
    if sum(_RANK[o] == weakest for o in operators) > 1:
        return False
    last = _PIECE.findall(mask.split(" ")[-1].lstrip("-~+"))
    ends = last[-1][0] == "(" or (len(last) == 1 and last[-1][0] in "[{")
    return (ends and len(last[-1]) > 2) or (mask[0] in "([{" and mask[1] == "_")


def _is_fluent(text: str) -> bool:
    """Whether several attributes are read of calls, subscripts or brackets: `f(x).g().h()`."""
    return not _operators(text) and len(re.findall(r"[)\]}]\.", _mask(text))) > 1


def _expression(text: str, nested: bool = True, outer: bool = False) -> tuple[Doc, ...]:
    """One expression; broken at its operators only where it is nested in brackets."""
    mask = _mask(text)
    line = Line(" ") if nested else " "
    if choice := re.match(r"(.*?) if (.*?) else (.*)", mask):
        first, second, third = (text[choice.start(i) : choice.end(i)] for i in (1, 2, 3))
        a, b, c = (_expression(part, nested, outer) for part in (first, second, third))
        return _grouped((*a, line, "if ", *b, line, "else ", *c), nested)
    operators = _operators(text)
    if text.startswith("not ") and not {"and", "or"} & set(operators):
        return ("not ", *_expression(text[4:], nested, outer))
    if not operators:
        return _operand(text, nested, outer)
    weakest = min(_RANK[o] for o in operators)
    parts: list[Doc] = []
    start = 0
    for match in _OPERATOR.finditer(mask):
        if _RANK[match[1]] == weakest:
            parts += [
                *_expression(text[start : match.start()], nested, outer),
                line,
                match[1] + " ",
            ]
            start = match.end()
    parts += _expression(text[start:], nested, outer)
    return _grouped(tuple(parts), nested)


def _operand(text: str, nested: bool, outer: bool) -> tuple[Doc, ...]:
    """A name or a bracket with what is called on it, read from it or subscripted."""
    bare = text.lstrip("-~+")
    result: list[Doc] = [text[: len(text) - len(bare)]]
    chain, start = _PIECE.findall(_mask(bare)), 0
    attributes = [
        i for i, piece in enumerate(chain) if piece[0] == "." and chain[i - 1][-1] in ")]}"
    ]
    fluent = len(attributes) > 1 and (nested or outer)
    for i, piece in enumerate(chain):
        if fluent and i in attributes:
            result.append(Line())
        code = bare[start : start + len(piece)]
        start += len(piece)
        result.append(_bracket(code, i > 0, outer) if piece[0] in "([{" else code)
    return _grouped(tuple(result), fluent)


def _bracket(text: str, called: bool, outer: bool) -> Doc:
    if len(text) == 2:
        return text
    body = _separated(text[1:-1])
    if called:
        body = (Group(body),)
    return Group((text[0], Indent((Line(), *body)), Line(), text[-1]), outer)


def _separated(text: str) -> tuple[Doc, ...]:
    """Arguments or elements; one alone gets no comma."""
    if text.endswith(","):
        return (*_expression(text[:-1]), ",")
    first, *others = (_element(element) for element in _split(text, ", "))
    result = (*first, *(doc for element in others for doc in (",", Line(" "), *element)))
    return (*result, Broken(",")) if others else result


def _element(text: str) -> tuple[Doc, ...]:
    clauses = _split(text, r" (?=for )")
    if len(clauses) > 1:
        clauses[1:] = [part for clause in clauses[1:] for part in _split(clause, r" (?=if )")]
        result: list[Doc] = [Group(_expression(clauses[0]))]
        for clause in clauses[1:]:
            head = re.match(r"for [\w, ]+ in |if ", clause)
            assert head is not None
            result += [Line(" "), head[0], *_expression(clause[head.end() :])]
        return (Group(tuple(result)),)
    if ":" in _mask(text):
        return (text,)  # a slice, or an entry of a dictionary
    head = re.match(r"\*\*?|\w+=(?!=)|", text)
    assert head is not None
    return (head[0], *_expression(text[head.end() :]))


def _grouped(body: tuple[Doc, ...], group: bool) -> tuple[Doc, ...]:
    return (Group(body),) if group else body


def _operators(text: str) -> list[str]:
    """The operators outside of brackets."""
    return _OPERATOR.findall(_mask(text))


def _split(text: str, separator: str) -> list[str]:
    """The text between separators outside of brackets."""
    cuts = [(m.start(), m.end()) for m in re.finditer(separator, _mask(text))]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


@lru_cache(maxsize=8192)
def _mask(text: str) -> str:
    """The text with what is in brackets or quotes made underscores."""
    text = _STRING.sub(lambda string: "_" * len(string[0]), text)
    depth, result = 0, ""
    for character in text:
        depth -= character in ")]}"
        result += "_" if depth else character
        depth += character in "([{"
    return result

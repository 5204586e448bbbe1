"""unpacking: the assignments that read, ahead of a function's body, its tuples and aggregates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from flashgen.codegen.folding import fold

#: Names that are read: behind no dot, before no `=`.
_READ = re.compile(r"(?<!\.)\b\w+\b(?!=[^=])")


class Fields(tuple[str, ...]):
    """The names of an aggregate's fields."""

    __slots__ = ()


def unpacking(
    body: str, views: Mapping[str, object] | None = None, /, **tuples: Iterable[str]
) -> str:
    """The body after a line for each tuple that it reads something of: ``_, q_len = call``.

    Of an aggregate, whose names are `Fields`, it is a line for each field: ``q_len = call.q_len``.

    What is known at compile time would not be so behind an assignment. Such elements have names in
    capitals and come first, and the others are a tuple behind them: ``PACKED: gl.constexpr =
    call[0]``, ``_, q_len = call[1]``.

    Args:
        body: statements of a function.
        views: variables that the body reads in place of elements of the same names, and what they
            are, as text in terms of other elements.
        tuples: for each variable that holds one, the names of its elements; one that is itself an
            element of another comes after it.
    """
    indent = body[: len(body) - len(body.lstrip())].split("\n")[-1]
    in_body = _READ.findall(re.sub(r"#.*", "", body)) if views else ()
    viewed = [name for name in views or {} if name in in_body]
    body = "".join(fold(f"{indent}{name} = {(views or {})[name]}") for name in viewed) + body
    for variable, elements in reversed(tuples.items()):
        code = re.sub(r"#.*", "", body)  # in which `name=` is a keyword
        read = set(elements).intersection(_READ.findall(code)).difference(viewed)
        if isinstance(elements, Fields):
            lines = [_field(variable, name) for name in elements if name in read]
            body = "".join(fold(f"{indent}{line}") for line in lines) + body
            continue
        known = [name for name in elements if name.isupper()]
        names = [name if name in read else "_" for name in elements if name not in known]
        held = f"{variable}[{len(known)}]" if known else variable
        if len(names) == 1 and read - {*known}:
            body = f"{indent}{names[0]} = {held}[0]\n{body}"
        elif read - {*known}:
            body = fold(f"{indent}{', '.join(names)} = {held}") + body
        for i, name in enumerate(known):
            if name in read:
                body = f"{indent}{name}: gl.constexpr = {variable}[{i}]\n{body}"
    return body


def _field(variable: str, name: str) -> str:
    return f"{name}{': gl.constexpr' * name.isupper()} = {variable}.{name}"

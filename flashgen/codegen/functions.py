"""laid_out: rendered functions with unpacked fields, folded statements and no empty lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from flashgen.codegen.folding import folded
from flashgen.codegen.unpacking import Fields, unpacking

#: A function at the top of a module: up to its body, its parameters, its body.
_FUNCTION = re.compile(
    r'^(def \w+\(([^)]*)\):\n(?: {4}"""(?:(?!""").)*"""\n)?)((?:(?: [^\n]*)?\n)*)',
    re.MULTILINE | re.DOTALL,
)


def laid_out(text: str, aggregates: Mapping[str, Iterable[str]]) -> str:
    """The functions of a kernel, with three things done that templates leave out.

    A function that reads fields of its parameters gets lines ahead of its body that unpack them.
    Long statements are folded. Empty lines in a body are dropped, such as those of a statement that
    this kernel does without.

    Args:
        text: the functions, which have no defaults.
        aggregates: the fields of each parameter that is an aggregate; one that is itself a field
            of another comes after it.
    """

    def whole(function: re.Match[str]) -> str:
        head, parameters, body = function.groups()
        given = {name.split(":")[0].strip() for name in parameters.split(",")}
        body = "".join(line for line in body.splitlines(keepends=True) if line.strip())
        return head + unpacking(body, **_held(given, aggregates)) + "\n\n"

    text = re.sub(r"\n{4,}", "\n\n\n", _FUNCTION.sub(whole, text))
    return folded(text.strip("\n")) + "\n"


def _held(given: set[str], aggregates: Mapping[str, Iterable[str]]) -> dict[str, Fields]:
    """The fields of parameters, and fields of these fields, except those that are parameters."""
    held: dict[str, Fields] = {}
    known = set(given)
    for name, fields in aggregates.items():
        if name in known:
            held[name] = Fields(field for field in fields if field not in given)
            known |= {*held[name]}
    return held

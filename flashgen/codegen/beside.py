"""beside: functions of a kernel for a module that holds a similar kernel, which it shares."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping

from flashgen.codegen.folding import folded


def beside(text: str, other: str, suffix: str, renamed: Collection[str] = ()) -> str:
    """The functions, classes and constants of a text that another text lacks, with new names.

    What both texts define alike is left out, unless it uses something that differs. What they
    define otherwise gets the suffix, as do its uses.

    Args:
        text: the source of a kernel.
        other: the source of the kernel that precedes it in the module.
        suffix: the end of the new names.
        renamed: names of functions elsewhere that the text uses, which have got the suffix too.
    """
    own = _definitions(text)
    different = _different(own, _definitions(other), renamed)
    taken = [*_taken(text, other, renamed), *renamed]
    pattern = re.compile(rf"(?<![.\w])({'|'.join(map(re.escape, taken))})\b")
    kept = [source for name, source in own.items() if name in different]
    parts = [pattern.sub(rf"\1{suffix}", source) for source in kept]
    return folded("\n\n\n".join(parts)) + "\n"


def names_beside(text: str, other: str) -> list[str]:
    """The names in a text that get the suffix."""
    return _taken(text, other, ())


def _taken(text: str, other: str, renamed: Collection[str]) -> list[str]:
    known = _definitions(other)
    return sorted(_different(_definitions(text), known, renamed) & known.keys())


def _different(
    own: Mapping[str, str], known: Mapping[str, str], renamed: Collection[str]
) -> set[str]:
    """The names that are defined otherwise, or use one that is, or one of a text elsewhere."""
    words = {name: set(re.findall(r"\w+", source)) for name, source in own.items()}
    different = {name for name, source in own.items() if known.get(name) != source}
    while users := {n for n in own if n not in different and words[n] & {*different, *renamed}}:
        different |= users
    return different


def _definitions(text: str) -> dict[str, str]:
    """The source of each definition by its name, with the comments ahead of it."""
    lines, found, done = text.split("\n"), {}, 0
    for node in ast.parse(text).body:
        assert node.end_lineno is not None
        source = "\n".join(lines[done : node.end_lineno]).strip("\n")
        done = node.end_lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = source
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = source
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = source
        else:
            raise TypeError(f"no definition: {source}")
    return found

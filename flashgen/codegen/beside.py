"""beside: functions of a kernel for a module that holds a similar kernel, which it shares."""

from __future__ import annotations

import ast
import re

from flashgen.codegen.folding import folded


def beside(text: str, other: str, suffix: str) -> str:
    """The functions, classes and constants of a text that another text lacks, with new names.

    What both texts define alike is left out, unless it uses something that differs. What they
    define otherwise gets the suffix, as do its uses.

    Args:
        text: the source of a kernel.
        other: the source of the kernel that precedes it in the module.
        suffix: the end of the new names.
    """
    own, known = _definitions(text), _definitions(other)
    words = {name: set(re.findall(r"\w+", source)) for name, source in own.items()}
    different = {name for name, source in own.items() if known.get(name) != source}
    while users := {n for n in own if n not in different and words[n] & different}:
        different |= users
    taken = sorted(different & known.keys())
    pattern = re.compile(rf"(?<![.\w])({'|'.join(map(re.escape, taken))})\b")
    kept = [source for name, source in own.items() if name in different]
    parts = [pattern.sub(rf"\1{suffix}", source) for source in kept]
    return folded("\n\n\n".join(parts)) + "\n"


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
        else:
            raise TypeError(f"no definition: {source}")
    return found

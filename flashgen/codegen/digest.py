"""source_digest: sha256 of a kernel's code, the key of its measurements."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256


@lru_cache(maxsize=128)  # a build asks for the same ones at several steps
def source_digest(text: str, functions: tuple[str, ...] = ()) -> str:
    """sha256 over a kernel's code without comments and docstrings.

    Args:
        text: the source, or that of several kernels.
        functions: the functions of the kernel: the digest covers them and the functions that they
            call; without any, it covers the whole source.
    """
    tree = ast.parse(text)
    if functions:
        tree.body = _called_by(functions, tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(function):
            function.body = function.body[1:]
    return sha256(ast.unparse(_Quoted(text).visit(tree)).encode()).hexdigest()


def _called_by(names: Iterable[str], tree: ast.Module) -> list[ast.stmt]:
    """Functions of a source and the functions that they call, in the source's order."""
    kinds = ast.FunctionDef | ast.ClassDef
    functions = {f.name: f for f in tree.body if isinstance(f, kinds)}
    called, waiting = set(), list(names)
    while waiting:
        at = waiting.pop()
        if at in functions and at not in called:
            called.add(at)
            waiting += [n.id for n in ast.walk(functions[at]) if isinstance(n, ast.Name)]
    return [function for at, function in functions.items() if at in called]


class _Quoted(ast.NodeTransformer):
    """F-strings as strings of their own source: Pythons do not unparse them alike."""

    def __init__(self, text: str) -> None:
        self.text = text

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        """The source of one."""
        return ast.Constant(ast.get_source_segment(self.text, node))

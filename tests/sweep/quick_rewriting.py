"""Kernels as Triton's interpreter rewrites them, once for each text that a function has."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter

from support.source_lines import lines_of


def keep_rewritten() -> None:
    """Functions of one text, in however many modules, are parsed and compiled once.

    Triton reads each back by `inspect`, twice. The options of `triton.jit`, which it holds beside a
    function, are nothing that the function reads.
    """
    rewrite = FunctionRewriter.rewrite_ast

    def rewrite_ast(self: Any) -> Any:
        if (text := _text(self.fn)) is None:
            return rewrite(self)
        for name, value in vars(interpreter).items():
            self.fn.__globals__.setdefault(name, value)
        before, first = self.fn.__code__, text[1]
        code = _compiled(text[0], self.fn.__name__)
        code = code.replace(co_filename=before.co_filename, co_firstlineno=first)
        made = FunctionType(code, self.fn.__globals__, None, self.fn.__defaults__)
        made.__annotations__ = self.fn.__annotations__
        return made

    FunctionRewriter.rewrite_ast = rewrite_ast


def _text(function: Any) -> tuple[str, int] | None:
    """A function at the top of its file without its decorators, and the number of its line."""
    if function.__kwdefaults__ or (found := lines_of(function)) is None:
        return None
    lines, first = found
    begin = next(i for i, line in enumerate(lines) if line.startswith("def "))
    return "".join(lines[begin:]), first + begin


@functools.cache
def _compiled(text: str, name: str) -> CodeType:
    tree = FunctionRewriter.ast_transformer.visit(interpreter.ast.parse(text))
    module = compile(interpreter.ast.fix_missing_locations(tree), "<kernel>", "exec")
    (code,) = (one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == name)
    return code

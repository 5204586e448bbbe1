"""Renders a plan through the Jinja templates. Pure: no clock, no device, no output folder."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Mapping

import jinja2

from flashgen.budget.targets import get_target
from flashgen.config import ChosenConfig
from flashgen.paths import template_dir
from flashgen.plan import KernelPlan

LINE_LENGTH = 100

_OPENING = re.compile(r"[(\[]")


def render_kernel(plan: KernelPlan) -> str:
    """The Triton functions of the forward kernel, `_attention_forward` last."""
    return _environment().get_template("forward.triton.py.jinja").render(plan=plan)


def kernel_digest(plan: KernelPlan) -> str:
    """sha256 over the kernel's code without comments and docstrings: what a measurement is of."""
    tree = ast.parse(render_kernel(plan))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function):
            function.body = function.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def render_module(
    plan: KernelPlan, chosen: Mapping[str, ChosenConfig], package: str = "generated"
) -> str:
    """The published module's source.

    Args:
        plan: the kernel.
        chosen: a configuration for each target, in the order that the module lists them.
        package: the folder that users import the module from.
    """
    template = _environment().get_template("module.py.jinja")
    return template.render(
        plan=plan,
        chosen=chosen,
        targets={name: get_target(name) for name in chosen},
        digest=kernel_digest(plan),
        kernel=render_kernel(plan),
        package=package,
    )


def fold(line: str) -> str:
    """A call over 100 columns wide, broken as a formatter does: arguments on one line or one each.

    They are taken apart at every comma outside brackets; one that is still too wide is broken in
    the same way.
    """
    return _folded(line.rstrip("\n"), "") + "\n"


def _folded(text: str, end: str) -> str:
    if len(text) + len(end) <= LINE_LENGTH or not (bracket := _OPENING.search(text)):
        return text + end
    head, inner, closing = text[: bracket.end()], text[bracket.end() : -1], text[-1]
    indent = re.match(" *", text)[0]  # type: ignore[index]
    if len(indent) + 4 + len(inner) <= LINE_LENGTH:
        body = f"{indent}    {inner}\n"
    else:
        arguments = _split_arguments(inner)
        body = "".join(_folded(f"{indent}    {argument}", ",") + "\n" for argument in arguments)
    return f"{head}\n{body}{indent}{closing}{end}"


def _split_arguments(text: str) -> list[str]:
    arguments, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += character
    return [argument.strip() for argument in arguments]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Python that is rendered
    )
    environment.filters["fold"] = fold
    environment.filters["prefix"] = lambda text, prefix: prefix + text
    return environment

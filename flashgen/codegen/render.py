"""Renders a plan through the Jinja templates. Pure: no clock, no device, no output folder."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from hashlib import sha256

import jinja2

from flashgen.budget.targets import get_target
from flashgen.codegen.folding import fold, wrap
from flashgen.config import ChosenConfig
from flashgen.paths import template_dir
from flashgen.plan import KernelPlan


def render_kernel(plan: KernelPlan) -> str:
    """The Triton functions of the forward kernel, `_attention_forward` last."""
    return _environment().get_template("forward.triton.py.jinja").render(plan=plan)


def kernel_digest(plan: KernelPlan) -> str:
    """sha256 over the kernel's code without comments and docstrings: what a measurement is of."""
    tree = ast.parse(render_kernel(plan))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function):
            function.body = function.body[1:]
    return sha256(ast.unparse(tree).encode()).hexdigest()


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
        op_digest=_op_digest(plan),
        kernel=render_kernel(plan),
        package=package,
    )


def _op_digest(plan: KernelPlan) -> str:
    """The kernel's; with constants another one: modules that compute unlike have unlike ops."""
    digest = kernel_digest(plan)
    elements = [constant.elements.digest for constant in plan.spec.constants]
    return sha256(repr((digest, elements)).encode()).hexdigest() if elements else digest


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
    environment.filters["wrap"] = wrap
    environment.filters["prefix"] = lambda text, prefix: prefix + text
    return environment

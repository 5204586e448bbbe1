"""render_module: a plan and its chosen configurations -> the published module's source.

A kernel provides its functions and, in its folder of templates, three parts of the module: its
``configuration``, its launcher (``launch``), and the statement that decides whether it runs a call
(``dispatch``). A form besides the dense one provides functions too, and a template for each part of
the module: see `flashgen.forms.base`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import TypeVar

from flashgen.budget.targets import get_target
from flashgen.codegen.environment import environment
from flashgen.codegen.merging import merging
from flashgen.codegen.operator import operator_digest
from flashgen.config import NO_CHOICE, KernelChoice
from flashgen.forms.base import PARTS
from flashgen.forms.registry import forms_of
from flashgen.kernels.base import Kernel, Needs
from flashgen.kernels.linear_triton.maps import names_of_maps, render_maps
from flashgen.kernels.registry import kernels_of, module_order
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.plan.quadratic import QuadraticPlan

_T = TypeVar("_T")


def render_module(
    plan: KernelPlan, choices: Mapping[str, KernelChoice], package: str | None = "generated"
) -> str:
    """The published module's source.

    Args:
        plan: what it computes.
        choices: by kernel key, the kernel's configurations, or why the module lacks it. Kernels for
            every plan are always in the module; where they have no configuration for a target, the
            reference computes its gradients.
        package: the folder that users import the module from; None: `flashgen.compile` returns it.
    """
    kernels = kernels_of(plan)
    chosen = {key: choices.get(key, NO_CHOICE) for key in kernels}
    listed = {key: kernels[key] for key in module_order() if key in kernels}
    held = {key: k for key, k in listed.items() if k.fallback or chosen[key].configs}
    needs = {key: kernel.needs(plan) for key, kernel in held.items()}
    sources = _sources(plan, held)
    everywhere = [kernel for kernel in listed.values() if kernel.fallback]
    special = [kernel for kernel in listed.values() if not kernel.fallback]
    dense = [k for key, k in kernels.items() if key in held and k.form == "dense"]
    names = {
        name: value
        for key, kernel in listed.items()
        for name, value in kernel.names(plan, chosen[key]).items()
    }
    names |= merging(plan)
    if plan.products:
        names |= names_of_maps(QuadraticPlan(plan), plan.targets)
    forms = forms_of(plan)
    configured = {key: chosen[key] for key in held}
    names |= {n: value for form in forms for n, value in form.names(plan, configured).items()}
    folders = tuple(dict.fromkeys(k.templates for k in listed.values()))
    folder = "linear" if plan.linear else "module"
    template = environment(folders=folders).get_template(f"{folder}/module.py.jinja")
    backward = backward_plan(plan)
    quadratic = QuadraticPlan(plan) if plan.products else None
    return template.render(
        plan=plan,
        backward=backward,
        quadratic=quadratic,
        targets={name: get_target(name) for name in plan.targets},
        sizing=plan.sizing_numbers,
        op_digest=operator_digest(plan, backward),
        package=package,
        needs=reduce(
            or_, (*needs.values(), *(form.needs(plan, configured) for form in forms)), Needs()
        ),
        further={
            part: [f"{form.name}/{part}.py.jinja" for form in forms if part in form.parts]
            for part in PARTS
        },
        sources=_distinct(
            [
                *(text for key, text in sources.items() if not needs[key].gluon),
                *([render_maps(quadratic)] if quadratic is not None and quadratic.mapped else []),
                *filter(None, (form.source(plan, configured) for form in forms)),
            ]
        ),
        gluon_sources=_distinct(
            [
                *(text for key, text in sources.items() if needs[key].gluon),
                *filter(None, (form.gluon_source(plan, configured) for form in forms)),
            ]
        ),
        configurations=_distinct(_part(k, "configuration") for k in (*everywhere, *special[::-1])),
        launchers=_distinct((_part(k, "launch"), needs[key].gluon) for key, k in held.items()),
        forward_dispatch=_distinct(_part(k, "dispatch") for k in dense if not k.gradients),
        backward_dispatch=_distinct(_part(k, "dispatch") for k in dense if k.gradients),
        **names,
    )


def _sources(plan: KernelPlan, held: Mapping[str, Kernel]) -> dict[str, str]:
    """The functions of each kernel, in the module's order: those for every plan come first."""
    sources: dict[str, str] = {}
    for key in sorted(held, key=lambda key: not held[key].fallback):
        sources[key] = held[key].source(plan, tuple(sources))
    return sources


def _part(kernel: Kernel, part: str) -> str:
    """The template of a kernel's part of the module."""
    return f"{kernel.launchers}/{part}.py.jinja"


def _distinct(items: Iterable[_T]) -> list[_T]:
    """The templates without duplicates: kernels of one folder share their parts."""
    return list(dict.fromkeys(items))

"""VarlenLinear: packed sequences in linear attention, ``varlen_attention`` of a module.

Kernels and launchers are of the dense templates. What both have alike, a module has once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flashgen.codegen.beside import beside, names_beside
from flashgen.codegen.environment import render
from flashgen.forms.base import Form, Held
from flashgen.forms.varlen import dense_kernels, packed_arguments, packed_tensors, view_of
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan


class VarlenLinear(Form):
    """Packed sequences, each with a state of its own. The module's template has its parts."""

    name = "varlen"
    parts = ()

    def serves(self, plan: KernelPlan) -> bool:
        """Linear attention."""
        return plan.linear

    def why_not(self, plan: KernelPlan) -> str:
        """Why a plan cannot have the form, as a clause; ``""`` where it can."""
        linear = LinearPlan(plan)
        if linear.random:
            return (
                "'varlen' has no random features: those of keys are divided by the largest one of "
                "a head, which would be that of all sequences"
            )
        if linear.by_features:
            return "'varlen' has no decays of features yet: give one for each key"
        if linear.runs is not None:
            return "'varlen' has no runs within sequences: pass each run as a sequence"
        return ""

    def source(self, plan: KernelPlan, held: Held) -> str:
        """The kernel that lists chunks, and those of both passes."""
        listing = render("varlen/tiles.py.jinja", plan=plan)
        return "\n\n".join([listing, beside(*_sources(plan, held), "_varlen")])

    def names(self, plan: KernelPlan, held: Held) -> Mapping[str, Any]:
        """Arguments as they are packed, and the kernels that are others than the dense ones."""
        return packed_arguments(plan) | {"packed_kernels": names_beside(*_sources(plan, held))}


def _sources(plan: KernelPlan, held: Held) -> tuple[str, str]:
    """The kernels for packed sequences, and the dense ones."""
    kernels = dense_kernels(plan, held)
    view = partial(view_of, packed_tensors(plan))
    packed = "\n\n".join(kernel.packed_source(plan, view) for kernel in kernels)
    return packed, "\n\n".join(kernel.source(plan) for kernel in kernels)

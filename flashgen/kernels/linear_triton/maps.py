"""render_maps: the kernels that map q and k before dense kernels multiply their features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flashgen.budget.targets import get_target
from flashgen.codegen.environment import render
from flashgen.codegen.folding import folded
from flashgen.kernels.linear_triton.shared_memory import width_of_features
from flashgen.plan.quadratic import QuadraticPlan


def render_maps(quadratic: QuadraticPlan) -> str:
    """The functions that make features of q and k, and the gradients of q and k of theirs."""
    maps = quadratic.maps
    return folded(render("linear_triton/maps.py.jinja", plan=maps.plan, linear=maps))


def names_of_maps(quadratic: QuadraticPlan, targets: Iterable[str]) -> Mapping[str, Any]:
    """What launchers of random features print: how many a program makes at once, by target."""
    if not quadratic.random:
        return {}
    plan = quadratic.maps.plan
    return {"widths_of_features": {x: width_of_features(plan, get_target(x)) for x in targets}}

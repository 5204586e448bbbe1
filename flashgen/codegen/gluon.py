"""Triton source as Gluon's, and under one name each what Tritons call differently."""

from __future__ import annotations

import re

from flashgen.codegen.environment import environment

#: How scores that have keys as columns, or queries as rows, print what they read most: Gluon
#: kernels have functions for it, cheaper than converting every position.
DISTANCES = "gl.cast(kv_idx - q_first, gl.float32)"


def as_gluon(text: str) -> str:
    """Triton source as Gluon's, for expressions and for functions without layouts of their own."""
    text = re.sub(r"\btl\.(?:math\.)?", "gl.", text).replace("@triton.jit", "@gluon.jit")
    text = re.sub(r"\b(_at_\d+d|_tanh|_swap_if)\(", r"\1_hopper(", text)
    return text.replace(", APPROX)", ", True)")


def render_names(*, adds: bool, clears: bool) -> str:
    """Under one name each what Tritons call differently: it stands before the Gluon kernels.

    Args:
        adds: whether one of them has TMA add tiles.
        clears: whether they clear hidden rows.
    """
    template = environment().get_template("module/names.py.jinja")
    return template.render(adds=adds, clears=clears)

"""What bounds say to the user about a part of a mask that they could not follow exactly."""

from __future__ import annotations

from typing import Any

from flashgen.symbolic.blocks import block_table
from flashgen.symbolic.context import Context
from flashgen.symbolic.logic import Conjunction
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.roles import ROWS_OF_KEYS
from flashgen.symbols import Load


def why_opaque(part: Any, context: Context) -> str:
    """Why a condition takes no part in the bounds."""
    shown = plain_source(part)
    elements = sorted(part.atoms(Load), key=str)
    if not elements:
        return f"not affine in q_idx and kv_idx: {shown}"
    names = ", ".join(dict.fromkeys(str(element.args[0]) for element in elements))
    if block_table(part, context.known):
        return f"the tiles to visit are listed once a call, by the blocks of {names}: {shown}"
    if _could_be_sorted(part, context):
        return f"if {names} never falls, declare it with sorted=True to have bounds from: {shown}"
    return f"only the elements of {names} tell: {shown}"


def _could_be_sorted(part: Any, context: Context) -> bool:
    """Whether it compares two elements as in ``doc[b, q_idx] == doc[b, kv_idx]``."""
    if not all(isinstance(side, Load) for side in part.args):
        return False
    positions = {context.roles.tile, context.roles.solved}
    whole = all(not context.known.is_condition(side.args[0]) for side in part.args)
    return whole and all(
        [i for i in side.args[1:] if positions & i.free_symbols] == [side.args[-1]]
        for side in part.args
    )


def why_too_wide(case: Conjunction, context: Context) -> str:
    """Why an interval may hold keys that no row of the tile sees, or rows that see none of it."""
    sources = context.read.sources
    found = [sources[atom] for atom in case.atoms if atom in sources]
    parts = dict.fromkeys(context.origins.get(part, part) for part in found)
    shown = " & ".join(f"({plain_source(part)})" for part in parts)
    if context.roles == ROWS_OF_KEYS:
        return f"queries between those that see keys of one tile are visited too: {shown}"
    return f"keys between those that rows of one tile see are visited too: {shown}"

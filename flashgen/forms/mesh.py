"""Mesh: parts of sequences whose whole is on several GPUs.

The kernels are those of the dense form: the offsets of a part are numbers that masks and scores
read, see `flashgen.offsets`. The form adds what a plan of the whole needs, without sympy, and
gradients by the log-sum-exp of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.config import FORMS
from flashgen.forms.base import PARTS, Form, Held
from flashgen.offsets import KV_OFFSET, Q_OFFSET, WHOLE_LENGTHS
from flashgen.params import Tensor
from flashgen.plan import KernelPlan
from flashgen.plan.visible_pairs import of_one_row
from flashgen.symbolic.printer import torch_source
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import BATCH, KV_LEN, Q_HEADS, Q_IDX, Q_LEN, B, H


@dataclass(frozen=True)
class QueryRuns:
    """The runs of keys that each query of the whole sees, for eager torch.

    Attributes:
        runs: each ``(begin, end, condition)`` as text; ``""`` for no condition.
        searches: the searches for the tables that they read: each the names of its keys and
            values, ``cyclic``, ``hidden``, and the names of its two tables, ``"_"`` for one that
            is not read.
        numbers: the parameters that they read.
        tensors: likewise.
        constants: likewise.
        indices: the indices that they read: ``"b"``, ``"h"``, ``"q_idx"``.
        sizes: what tensors say of the batch and of the heads: a name, a tensor and its dimension.
    """

    runs: tuple[tuple[str, str, str], ...]
    searches: tuple[tuple[str, str, bool, int | None, str, str], ...]
    numbers: tuple[str, ...]
    tensors: tuple[str, ...]
    constants: tuple[str, ...]
    indices: tuple[str, ...]
    sizes: tuple[tuple[str, str, int], ...]


def query_runs(plan: KernelPlan) -> QueryRuns:
    """Those that a plan's bounds say of tiles of one query."""
    whole: dict[Any, Any] = {Q_OFFSET.sym: sympy.Integer(0), KV_OFFSET.sym: sympy.Integer(0)}
    whole |= {length.sym: symbol for symbol, length in WHOLE_LENGTHS.items()}
    exprs = [
        tuple(of_one_row(x).xreplace(whole) for x in (run.begin, run.end, run.condition))
        for run in plan.bounds.intervals
    ]
    read = {symbol.name for run in exprs for expr in run for symbol in expr.free_symbols}
    searches = _searches([t for t in plan.every_row_table if t.name in read])
    read |= {name for keys, values, *_ in searches for name in (keys, values)}
    tensors = [p for p in plan.params if p.name in read and isinstance(p, Tensor)]
    sizes = {
        dim.sym.name: (dim.sym.name, tensor.name, i)
        for tensor in tensors
        for i, dim in enumerate(tensor.dims)
        if dim is not None and dim.sym in (BATCH, Q_HEADS)
    }
    return QueryRuns(
        runs=tuple(
            (
                torch_source(begin),
                torch_source(end),
                "" if condition is sympy.true else torch_source(condition),
            )
            for begin, end, condition in exprs
        ),
        searches=searches,
        numbers=tuple(p.name for p in plan.params if p.name in read and not isinstance(p, Tensor)),
        tensors=tuple(tensor.name for tensor in tensors),
        constants=tuple(c.name for c in plan.spec.constants if c.name in read),
        indices=tuple(index.name for index in (B, H, Q_IDX) if index.name in read),
        sizes=tuple(sizes.values()),
    )


def _searches(
    tables: list[RowTable],
) -> tuple[tuple[str, str, bool, int | None, str, str], ...]:
    found: dict[tuple[str, str, bool, int | None], dict[str, str]] = {}
    for table in tables:
        found.setdefault(table.search, {})[table.side] = table.name
    return tuple(
        (*search, names.get("left", "_"), names.get("right", "_"))
        for search, names in found.items()
    )


def _sizes(plan: KernelPlan) -> list[set[Any]]:
    """The symbols in each size of a declared tensor."""
    tensors = (param for param in plan.params if isinstance(param, Tensor))
    return [dim.sym.free_symbols for x in tensors for dim in x.dims if dim is not None]


class Mesh(Form):
    """Parts of sequences, of any lengths, at any offsets."""

    name = "mesh"
    parts = PARTS[:1]

    def why_not(self, plan: KernelPlan) -> str:
        """Why a plan cannot have the form, as a clause; ``""`` where it can."""
        others = [form for form in plan.spec.forms if form not in (FORMS[0], self.name)]
        if others:
            return f"calls of the form {others[0]!r} have no offsets"
        sink = plan.spec.normaliser.traced_sink
        if sink is not None and sink.sym.free_symbols & {Q_LEN, KV_LEN}:
            return "'mesh' has no sink that depends on a length"
        for constant in plan.spec.constants:
            if any(length in ("q_len", "kv_len") for length, _ in constant.limits):
                return f"the constant {constant.name} has the length of a whole, which no part has"
        try:
            query_runs(plan)
        except TypeError as error:
            return f"its ranges of keys cannot be computed in torch: {error}"
        return ""

    def source(self, plan: KernelPlan, held: Held) -> str:
        """No kernel besides the dense ones."""
        return ""

    def names(self, plan: KernelPlan, held: Held) -> Mapping[str, Any]:
        """The runs of keys of the whole, and the lengths of the whole that calls name."""
        lengths = [length.name for length in WHOLE_LENGTHS.values()]
        return {
            "query_runs": query_runs(plan),
            "by_head": plan.reads_torch("h") or any(Q_HEADS in size for size in _sizes(plan)),
            "whole_lengths": [name for name in lengths if name in {p.name for p in plan.params}],
        }

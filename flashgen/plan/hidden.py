"""HiddenRows: rows of tensors that a kernel replaces by 0, since they may be NaN or infinite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.params import Int
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.spec import AttentionSpec
from flashgen.symbolic.logic import conditions, negation_normal_form
from flashgen.symbolic.printer import torch_source, triton_code
from flashgen.symbolic.printer.code import Code, gathered_by
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_IDX, Q_IDX, B, H

#: What a tile's place says.
POSITIONS = tuple(symbol.name for symbol in (B, H, Q_IDX, KV_IDX))


@dataclass(frozen=True)
class HiddenRows:
    """Rows of k, v, q and the output's gradient that a mask hides by their position alone.

    Their weights are 0, but 0 times NaN is NaN.

    Attributes:
        keys: conditions on ``key_rows``, (BLOCK_N, 1) positions: all hold for a key that some query
            may see; empty if the mask has no condition on keys alone.
        queries: the same for ``query_rows``, (BLOCK_M, 1) positions.
        keys_by_head: whether the conditions on keys differ between heads of queries.
        names: the names that the conditions read.
    """

    keys: tuple[Code, ...]
    queries: tuple[Code, ...]
    keys_by_head: bool
    names: frozenset[str]

    @property
    def keys_torch(self) -> tuple[str, ...]:
        """Those of keys as text for the index tensors of torch."""
        return tuple(torch_source(code.expr) for code in self.keys)

    @property
    def queries_torch(self) -> tuple[str, ...]:
        """Those of queries."""
        return tuple(torch_source(code.expr) for code in self.queries)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Of what they read, parameters and lengths."""
        return tuple(sorted(self.names.difference(POSITIONS)))

    @property
    def gathers(self) -> tuple[int, ...]:
        """The numbers of dimensions that tensors are indexed by."""
        return gathered_by((*self.keys, *self.queries))


def hidden_rows(spec: AttentionSpec, predicate: Predicate) -> HiddenRows:
    """The hidden rows of a spec's mask, traced as ``predicate``."""
    nonnegative = [p.name for p in spec.params if isinstance(p, Int) and p.min >= 0]
    names = KERNEL_NAMES | {"kv_idx": "key_rows", "q_idx": "query_rows"}
    keys, queries = (conditions_alone(predicate, position) for position in (KV_IDX, Q_IDX))
    return HiddenRows(
        keys=tuple(triton_code(term, names, nonnegative) for term in keys),
        queries=tuple(triton_code(term, names, nonnegative) for term in queries),
        keys_by_head=any(H in term.free_symbols for term in keys),
        names=frozenset(s.name for term in (*keys, *queries) for s in term.free_symbols),
    )


def conditions_alone(predicate: Predicate, position: Any) -> tuple[Any, ...]:
    """The conditions of a mask that read this position and not the other.

    A key for which one of them does not hold is hidden from every query of its batch entry and
    head, and a query sees no key.

    Args:
        predicate: the user's own, which trusts nothing.
        position: `KV_IDX` or `Q_IDX`.
    """
    terms = conditions(negation_normal_form(predicate.expr))
    pairs = [term.args for term in terms if isinstance(term, sympy.Eq)]
    same = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    # Of two elements that are equal, what holds for one holds for the other.
    others = (term.xreplace(same) for term in terms if not isinstance(term, sympy.Eq))
    every = dict.fromkeys((*terms, *others))
    return tuple(term for term in every if {KV_IDX, Q_IDX} & term.free_symbols == {position})

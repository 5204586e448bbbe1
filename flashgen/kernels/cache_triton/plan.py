"""CachePlan: what the template of the cache kernel prints besides the dense plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy

from flashgen.kernels.cache_triton.deciding import (
    DecidedTiles,
    bounds_are_wide,
    decided_tiles,
)
from flashgen.params import Int
from flashgen.plan.arguments import KernelArguments, kernel_arguments
from flashgen.plan.code import KernelCode, code_with, codes_of
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.symbolic.bounds import derive_bounds
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code, gathered_by, read_by
from flashgen.symbolic.printer.dialects import Triton
from flashgen.symbols import KV_IDX, KV_LEN, Q_FIRST, Q_LAST, Q_LEN, H, Load, RowMax, RowMin

_LENGTHS = ("batch", "head", "q_len", "kv_len", "q_first", "q_last", "num_q_heads")


class VectorTriton(Triton):
    """Triton in which each number may be a vector: one function has a sequence, or several."""

    def extreme(self, name: str, a: str, b: str, tensors: tuple[bool, bool], real: bool) -> str:
        """``tl.minimum`` and ``tl.maximum``."""
        return f"tl.{name}imum({a}, {b})"


VECTORS = VectorTriton()

#: Results of `_cache_runs` for each run: begin, end, first, visits, full_begin and full_end.
OF_A_RUN = 6


@dataclass(frozen=True)
class CacheRun:
    """A run of keys that a tile of queries visits, in positions: see `flashgen.plan.loops.Run`.

    An end that differs between the heads of a tile is a vector, and the widest counts.

    Attributes:
        begin, end, full_begin, full_end: the ends.
        condition: when the run exists; None for always.
        by_head: the names of those of the five that are vectors.
        suffix: of its variables.
    """

    begin: Code
    end: Code
    full_begin: Code
    full_end: Code
    condition: Code | None
    by_head: tuple[str, ...]
    suffix: str


@dataclass(frozen=True)
class CachePlan:
    """The cache kernel of a plan.

    A row of a tile is a query of one head: the heads that share keys have rows in one tile. So the
    head is a vector, as q_idx is.
    """

    plan: KernelPlan

    @cached_property
    def derived(self) -> bool:
        """Whether the visited keys follow from bounds; otherwise all keys are visited and masked.

        Tables of rows and of blocks are made for whole tensors, which a step of decoding with its
        few queries would not repay.
        """
        plan = self.plan
        return plan.promise is None and plan.listing is None and not plan.every_row_table

    @cached_property
    def deciding(self) -> DecidedTiles | None:
        """What decides which tiles of the runs are visited; None where all of them are.

        Masks that hide nothing between a sequence's first visible key and its last q_len keys do
        without: there is at most a tile to save.
        """
        if not self._may_have_gaps or (self.derived and not bounds_are_wide(self.plan)):
            return None
        return decided_tiles(self.plan)

    @cached_property
    def conditions(self) -> tuple[Any, ...]:
        """The conditions that a masked tile evaluates."""
        if self.derived and self.deciding is None:
            return self.plan.conditions
        return conditions(self.plan.predicate.expr)

    @property
    def checks_kv_len(self) -> bool:
        """Whether a masked tile compares its keys with kv_len, too."""
        return self.deciding is not None or not self.derived or self.plan.checks_kv_len

    @cached_property
    def code(self) -> KernelCode:
        """Mask, score and sink."""
        return code_with(self.plan.spec, self.conditions, promise=None, by_blocks=False)[0]

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """The keys to visit."""
        if self.derived:
            return self.plan.bounds.intervals
        zero = sympy.Integer(0)
        return (Interval(zero, KV_LEN, zero, zero),)

    @cached_property
    def runs(self) -> tuple[CacheRun, ...]:
        """The same as code."""
        several = len(self.intervals) > 1
        return tuple(self._run(x, f"_{i}" * several) for i, x in enumerate(self.intervals))

    def _run(self, interval: Interval, suffix: str) -> CacheRun:
        names = ("begin", "end", "full_begin", "full_end", "condition")
        parts = dict(zip(names, interval.expressions, strict=True))
        codes: dict[str, Any] = {name: self._code(expr) for name, expr in parts.items()}
        if parts["condition"] is sympy.true:
            codes["condition"] = None
        by_head = tuple(name for name, expr in parts.items() if _differs_by_head(expr))
        return CacheRun(**codes, by_head=by_head, suffix=suffix)

    def _code(self, expr: Any) -> Code:
        return triton_code(expr, KERNEL_NAMES, self._nonnegative, _LENGTHS)

    @property
    def _nonnegative(self) -> list[str]:
        return [p.name for p in self.plan.spec.params if isinstance(p, Int) and p.min >= 0]

    @property
    def sorted(self) -> bool:
        """Whether the runs come in the order of their first keys."""
        return self.plan.bounds.sorted or len(self.runs) == 1

    @cached_property
    def reduces_rows(self) -> bool:
        """Whether the runs' ends are extremes over a tile's rows, ``q_rows``."""
        return any(expr.has(RowMin, RowMax) for expr in self._ends)

    @cached_property
    def reads_head(self) -> bool:
        """Whether the runs differ between heads."""
        return any(H in expr.free_symbols for expr in self._ends)

    @cached_property
    def sees_all_keys(self) -> bool:
        """Whether a sequence's last query sees all of its keys, so that each page has to be there.

        All but its last q_len keys count, whose pages have to be there anyway.
        """
        if self.has_gaps or len(self.intervals) != 1:
            return False
        [interval] = self.intervals
        end = interval.end.subs({Q_FIRST: Q_LEN - 1, Q_LAST: Q_LEN - 1})
        return interval.begin == 0 and end in (KV_LEN, sympy.Max(0, KV_LEN))

    @cached_property
    def has_gaps(self) -> bool:
        """Whether the runs of a tile may hold keys before the queries' own that none of them sees.

        Their pages may have been given back, so they are neither missed nor multiplied by 0. The
        last q_len keys are those of the queries: their pages are there.
        """
        return self._may_have_gaps

    @cached_property
    def _may_have_gaps(self) -> bool:
        if not self.derived or self.reads_head or self.reduces_rows:
            return True
        if self.plan.hidden.keys_by_head:
            return True
        if self.plan.bounds.exact:
            return False
        predicate = self.plan.predicate
        earlier = sympy.And(predicate.expr, KV_IDX < KV_LEN - Q_LEN)
        return not derive_bounds(replace(predicate, expr=earlier)).exact

    @cached_property
    def clears_values(self) -> bool:
        """Whether values of keys that no row of a tile sees are replaced by 0 in registers.

        So are those of pages in gaps. Otherwise conditions on keys alone are those of the load:
        they cannot be where heads differ, and what they load themselves delays it.
        """
        hidden = self.plan.hidden
        return hidden.keys_by_head or (self.deciding is not None and bool(hidden.keys))

    @property
    def hidden_keys(self) -> tuple[Code, ...]:
        """The conditions of these loads, for all heads alike."""
        return () if self.clears_values else self.plan.hidden.keys

    @cached_property
    def loads_elements(self) -> bool:
        """Whether a masked tile loads something for each row, a query of one head, and key."""
        loads = {load for condition in self.conditions for load in condition.atoms(Load)}
        by_head = any({H, KV_IDX} <= load.free_symbols for load in loads)
        return by_head or self.code.loads_elements

    @property
    def keeps_conditions(self) -> bool:
        """Whether each tile has a tile of conditions, all true where it evaluates no mask.

        Which keys are shown is then known in one basic block with the product of the values, so
        that these need no way through shared memory when they are replaced.
        """
        return self.deciding is not None or self.loads_elements

    @cached_property
    def counts_tiles(self) -> bool:
        """Whether the tiles of many sequences are counted at once, a vector with one for each.

        Otherwise a sequence counts by its length. This only decides how work is shared out.
        """
        vector = not (self.reduces_rows or self.reads_head)
        return self.derived and vector and not any(expr.has(Load) for expr in self._ends)

    @property
    def _ends(self) -> Iterator[Any]:
        return (expr for interval in self.intervals for expr in interval.expressions)

    @cached_property
    def arguments(self) -> KernelArguments:
        """The parameters that the kernel takes."""
        plan, hidden = self.plan, self.plan.hidden
        score_and_sink = plan._score_and_sink
        ends = () if self.deciding else self._ends
        exprs = (*self.conditions, *score_and_sink, *ends)
        names = {s.name for expr in exprs for s in expr.free_symbols}
        names |= {s.name for code in hidden.keys for s in code.expr.free_symbols}
        return kernel_arguments(plan.arguments, plan.constants, (), names)

    @cached_property
    def deciding_arguments(self) -> KernelArguments:
        """The parameters that the kernel takes which decides tiles."""
        names = self._names_of_ends | (self.deciding.names if self.deciding else frozenset())
        return kernel_arguments(self.plan.arguments, self.plan.constants, (), names)

    @cached_property
    def of_runs(self) -> tuple[str, ...]:
        """The parameters that the ends of the runs read."""
        arguments = self.deciding_arguments if self.deciding else self.arguments
        return tuple(name for name in arguments.names if name in self._names_of_ends)

    @cached_property
    def _names_of_ends(self) -> frozenset[str]:
        return frozenset(s.name for expr in self._ends for s in expr.free_symbols)

    @cached_property
    def of_finish(self) -> tuple[str, ...]:
        """The parameters that the end of a row reads: its sink, and its score's shift."""
        codes = [code for code in (self.code.sink, self.code.shift) if code is not None]
        names = {s.name for code in codes for s in code.expr.free_symbols}
        return tuple(name for name in self.arguments.names if name in names)

    def finish_reads(self, name: str) -> bool:
        """Whether the end of a row reads a name."""
        return name in read_by((self.code.sink, self.code.shift))

    def steps_read(self, name: str) -> bool:
        """Whether the loop, or what is computed once for it, reads a name."""
        return name in self._read_by_steps

    @cached_property
    def _read_by_steps(self) -> frozenset[str]:
        code = self.code
        lines = codes_of(code.scalars, code.rows, code.columns, code.elements, code.masked)
        return read_by((*lines, code.score, *code.conditions, *self.hidden_keys))

    @property
    def of_tile(self) -> tuple[str, ...]:
        """What the loop reads of a tile's rows: the kernel's variables."""
        names = {"head": "head_rows", "q_idx": "q_rows", "q_first": "q_first", "q_last": "q_last"}
        return tuple(names[name] for name in names if self.steps_read(name))

    @property
    def of_steps(self) -> tuple[str, ...]:
        """The parameters that the loop reads."""
        return tuple(name for name in self.arguments.names if self.steps_read(name))

    @property
    def in_phases(self) -> bool:
        """Whether tiles that hide nothing have a loop of their own.

        A mask that loads something for each score brings the scores into another layout, which
        would cost as much in a tile that does not evaluate it.
        """
        one_run = self.derived and self.deciding is None and len(self.runs) == 1
        return one_run and self.loads_elements

    @property
    def visits_at(self) -> int:
        """The place of the number of all visits among the results of `_cache_runs`."""
        return OF_A_RUN * (len(self.runs) - 1) + OF_A_RUN - 3

    @cached_property
    def gathers(self) -> tuple[int, ...]:
        """The numbers of dimensions that tensors are indexed by."""
        ends = [code for run in self.runs for code in (run.begin, run.end, run.full_begin)]
        ends += [code for run in self.runs for code in (run.full_end, run.condition) if code]
        lines = codes_of(self.code.scalars, self.code.rows, self.code.columns, self.code.elements)
        found = gathered_by((*ends, *lines, *codes_of(self.code.masked), *self.plan.hidden.keys))
        return tuple(sorted({*found, *self.code.gathers}))

    @property
    def reads_halves(self) -> bool:
        """Whether some tensors hold 16-bit numbers."""
        return any(tensor.halves for tensor in self.arguments.tensors)

    @property
    def can_be_empty(self) -> bool:
        """Whether the sum of a row's weights may be 0: a cache may hold no key."""
        return not self.plan.sink_torch or self.plan.sink_can_be_infinite


def _differs_by_head(expr: Any) -> bool:
    """Whether an end is a vector: extremes over a tile's rows are over its heads already."""
    extremes = {extreme: sympy.Integer(0) for extreme in expr.atoms(RowMin, RowMax)}
    return H in expr.xreplace(extremes).free_symbols

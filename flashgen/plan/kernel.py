"""KernelPlan: everything that a template prints, computed beforehand; `lower` makes it from a spec.

Templates do no arithmetic: what is symbolic in a plan is either a sympy expression that the budget
evaluates, or `Code`, which the templates have printed in their dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy

from flashgen.budget.targets import get_target
from flashgen.declared import Param
from flashgen.offsets import DROPOUT_OFFSETS
from flashgen.params import Tensor
from flashgen.plan.arguments import (
    Argument,
    KernelArguments,
    argument,
    kernel_arguments,
    sizing_numbers,
)
from flashgen.plan.classified import (
    ClassifiedTiles,
    finds_ranges,
    hints_to_sort,
    listing_of,
)
from flashgen.plan.code import KernelCode, finite_score, kernel_code, with_hidden_by_score
from flashgen.plan.constants import PrintedConstant, printed_constant
from flashgen.plan.dtypes import TRITON_DTYPES
from flashgen.plan.eager_keys import EagerKeys, eager_keys
from flashgen.plan.head_dims import Heads
from flashgen.plan.hidden import HiddenRows, hidden_rows
from flashgen.plan.int32_overflow import SIZES, LargeInteger, printed_integers
from flashgen.plan.keywords import Keywords, with_free_names
from flashgen.plan.listing import TileListing
from flashgen.plan.loops import KeyTiles, key_tiles
from flashgen.plan.outside import left_by
from flashgen.plan.pairs import Products, is_quadratic, over_pairs
from flashgen.plan.promise import Promise, promise_of
from flashgen.plan.visible_pairs import VisiblePairs, visible_pairs
from flashgen.plan.wide_bounds import LENGTH, excess_of_bounds
from flashgen.spec import AttentionSpec
from flashgen.symbolic.bounds import TileBounds, derive_bounds, derive_q_bounds
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.nodes import Spread
from flashgen.symbolic.printer import torch_source
from flashgen.symbolic.residual_conditions import residual_conditions
from flashgen.symbolic.score import may_be_infinite
from flashgen.symbolic.tables import RangeTable, RowTable
from flashgen.symbolic.trace import KEYS_OF_ROWS, ROWS_OF_KEYS, Predicate, trace
from flashgen.symbols import KV_IDX, Q_IDX, SCORE, B, H, Load


@dataclass(frozen=True)
class KernelPlan(Heads):
    """One kernel, ready to budget and to print; its head dimensions by the names of `Heads`.

    Attributes:
        name: the variant's, and the generated module's.
        spec: what the user declared, with names that are free in the module.
        predicate: the mask as sympy sees it.
        bounds: the KV ranges derived from it.
        keywords: of parameters that have another name in the module, this name and their keyword.
        derived: what later steps keep with the plan, by a name of their own: they ask for it often.
    """

    name: str
    spec: AttentionSpec
    predicate: Predicate
    bounds: TileBounds
    keywords: Keywords = ()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def torch_dtype(self) -> str:
        """The dtype by torch's name, ``bfloat16``."""
        return self.spec.dtype

    @property
    def triton_dtype(self) -> str:
        """The dtype by Triton's name, ``bf16``."""
        return TRITON_DTYPES[self.spec.dtype]

    @property
    def input_precision(self) -> str | None:
        """How float32 enters the matrix units, ``"ieee"`` or ``"tf32"``; None for 16-bit types."""
        if self.spec.dtype != "float32":
            return None
        return self.spec.input_precision or "ieee"

    @property
    def scale(self) -> float:
        """The factor on q·k that a call without ``scale=`` gets."""
        scale = self.spec.scale
        return self.spec.qk_head_dim**-0.5 if scale is None else float(scale)

    @property
    def params(self) -> tuple[Param, ...]:
        """The call's parameters: of mask, score, sink in the order of first use; then dropout."""
        return self.spec.params

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The parameters as the module prints them."""
        return tuple(argument(param, self.keyword(param.name)) for param in self.params)

    def keyword(self, name: str) -> str:
        """What ``attention`` calls a parameter, by its name in the module."""
        return dict(self.keywords).get(name, name)

    def by_keyword(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ``attention`` for values of parameters by their names in the module."""
        return {self.keyword(name): value for name, value in params.items()}

    @cached_property
    def constants(self) -> tuple[PrintedConstant, ...]:
        """The tensors that the module holds."""
        return tuple(map(printed_constant, self.spec.constants))

    @cached_property
    def large_integers(self) -> tuple[LargeInteger, ...]:
        """The integers that `attention` checks for overflow of 32 bits."""
        return self.large_integers_with(SIZES)

    def large_integers_with(self, sizes: Mapping[str, str]) -> tuple[LargeInteger, ...]:
        """The same, for calls with these expressions for lengths, heads and the batch."""
        score = self.spec.score
        exprs = [self.predicate.expr] + ([finite_score(score)[0]] if score is not None else [])
        found = printed_integers(exprs, self.params, sizes)
        return tuple(replace(x, argument=self.keyword(x.argument)) for x in found)

    @property
    def sizing_numbers(self) -> tuple[str, ...]:
        """Names of the numbers with which `attention` checks sizes."""
        return sizing_numbers(self.params, self.spec.constants, self.large_integers)

    @property
    def dropout(self) -> bool:
        """Whether weights may be dropped."""
        return self.spec.dropout

    @property
    def dropout_offsets(self) -> frozenset[str]:
        """Names of what is added to positions and heads to number a weight; none for a whole."""
        moved = self.spec.moves_dropout
        return frozenset(offset.name for offset in DROPOUT_OFFSETS if moved)

    @property
    def launched_constants(self) -> tuple[PrintedConstant, ...]:
        """The constants that kernels take, or from which row tables are made."""
        listing = () if self.classifies else self.listing_arguments.tensors
        names = {tensor.name for tensor in (*self.kernel_arguments.tensors, *listing)}
        names |= {tensor.name for table in self.row_tables for tensor in table.tensors}
        names |= {table.keys.name for table in self.every_range_table}
        return tuple(constant for constant in self.constants if constant.name in names)

    @property
    def equal_lengths(self) -> bool:
        """Whether the mask has a meaning only for ``q_len == kv_len``."""
        return self.spec.equal_lengths or (self.linear and self.masks)

    @property
    def refuses_lengths(self) -> str:
        """What is for these only, as it was written, and what to do about it."""
        unaligned = self.spec.unaligned or (self.spec.mask.label,)
        shown = " and ".join(unaligned) + (" are" if len(unaligned) > 1 else " is")
        remedy = "pass as many keys as queries"
        if self.spec.can_be_aligned and not self.linear:
            remedy = "rebuild the spec with align='top_left' or align='bottom_right'"
        return f"{shown} for equal lengths only; {remedy}"

    @property
    def targets(self) -> tuple[str, ...]:
        """The GPU architectures to choose a configuration for."""
        return self.spec.targets

    def uses_tma(self, target: str) -> bool:
        """Whether tiles come through tensor descriptors (TMA) on this target.

        TMA brings hidden rows, too, and what is zeroed in registers lies in shared memory late:
        where a mask hides rows by their position, pointers leave them out.
        """
        return get_target(target).has_tma and not (self.hidden.keys or self.hidden.queries)

    @cached_property
    def masks(self) -> bool:
        """Whether the mask hides anything beyond the ends of the sequence."""
        return self.predicate.expr is not sympy.true

    @cached_property
    def mask_torch(self) -> tuple[str, ...]:
        """The conditions, all of which hold for a visible key, for the index tensors of torch."""
        return tuple(map(torch_source, conditions(self.predicate.expr)))

    @cached_property
    def mask_is_tensor(self) -> bool:
        """Whether the conditions make a tensor; a mask of lengths and numbers is a plain bool."""
        expr = self.predicate.expr
        return bool({Q_IDX, KV_IDX, B, H} & expr.free_symbols) or bool(expr.has(Load))

    @cached_property
    def score_torch(self) -> str:
        """The score function of ``scores`` for torch; ``""`` where there is none."""
        if self.spec.score is None:
            return ""
        score = finite_score(self.spec.score)[0]
        score = score if SCORE in score.free_symbols else Spread(score)
        return torch_source(score, {"score": "scores"})

    @property
    def normaliser(self) -> str:
        """``"softmax"``, ``"sigmoid"``, ``"products"`` or ``"linear"``."""
        return self.spec.normaliser.kind

    @property
    def products(self) -> bool:
        """Whether weights are products: `flashgen.plan.quadratic` has what is printed besides."""
        return self.normaliser == "products"

    @property
    def divides(self) -> bool:
        """Whether such weights are divided by their sum, which a query's gradients need."""
        normaliser = self.spec.normaliser
        return isinstance(normaliser, Products) and normaliser.of.normalise

    @property
    def merges(self) -> bool:
        """Whether modules merge results of parts of the keys, by their log-sum-exp alone."""
        return not (self.sink_torch or self.products)

    @property
    def linear(self) -> bool:
        """Whether weights are products of features: `flashgen.plan.linear` has what is printed."""
        return self.normaliser == "linear"

    @cached_property
    def sink_torch(self) -> str:
        """The sink's logit for torch; ``""`` where there is none."""
        sink = self.spec.normaliser.traced_sink
        return "" if sink is None else torch_source(sink.sym)

    @property
    def sink_is_tensor(self) -> bool:
        """Whether the sink's logit differs between heads or batch entries."""
        sink = self.spec.normaliser.traced_sink
        return sink is not None and bool({B, H} & sink.sym.free_symbols)

    @cached_property
    def keys_can_be_hidden(self) -> bool:
        """Whether a query may see no key: by the mask, or by a bias of -inf."""
        score = self.spec.score
        biased = score is not None and may_be_infinite(score.traced.sym)
        return self.bounds.rows_can_be_empty or biased

    @property
    def rows_can_be_empty(self) -> bool:
        """Whether the sum of a query's weights may be 0."""
        return self.keys_can_be_hidden and (not self.sink_torch or self.sink_can_be_infinite)

    @cached_property
    def sink_can_be_infinite(self) -> bool:
        """Whether a sink's logit may be -inf: that of an argument's element, as numbers are not."""
        sink = self.spec.normaliser.traced_sink
        constants = {constant.sym for constant in self.spec.constants}
        loads = sink.sym.atoms(Load) if sink is not None else ()
        return any(load.args[0] not in constants for load in loads)

    @cached_property
    def code(self) -> KernelCode:
        """Mask, score and sink as the kernel computes them."""
        return kernel_code(self.spec, self.conditions, self.promise)

    @cached_property
    def hidden(self) -> HiddenRows:
        """Rows of q, k, v and the output's gradient that are hidden by their position alone."""
        if self.linear:  # whose states do without what they hide
            return HiddenRows((), (), False, frozenset())
        return hidden_rows(self.spec, self.predicate)

    @cached_property
    def promise(self) -> Promise | None:
        """The promise about the call's tensors that mask and bounds trust."""
        return promise_of(self.predicate, KEYS_OF_ROWS)

    @cached_property
    def visible_pairs(self) -> VisiblePairs:
        """How the module counts the pairs that the mask shows."""
        return visible_pairs(self.bounds, self.params)

    @cached_property
    def eager_keys(self) -> EagerKeys:
        """The keys of a tile of queries in eager torch."""
        return eager_keys(self.bounds, self.params)

    @property
    def conditions(self) -> tuple[Any, ...]:
        """The conditions of the mask that a masked tile evaluates."""
        return self._evaluated[0]

    @property
    def checks_kv_len(self) -> bool:
        """Whether a masked tile compares its keys with kv_len: no condition implies it."""
        return self._evaluated[1]

    @cached_property
    def _evaluated(self) -> tuple[tuple[Any, ...], bool]:
        return residual_conditions(self.predicate)

    @cached_property
    def tiles(self) -> KeyTiles:
        """The key tiles that a query tile visits."""
        listed, separated = self.listing is not None, self.classifies
        return key_tiles(self.bounds, self.promise, listed=listed, separated=separated)

    @cached_property
    def listing(self) -> TileListing | ClassifiedTiles | None:
        """What lists the tiles to visit: by block tables, or where bounds are too wide."""
        return listing_of(self.spec, self.predicate)

    @property
    def classifies(self) -> bool:
        """Whether a kernel decides tiles, which calls may pass: see `ClassifiedTiles`."""
        return self.listing is not None and self.listing.classified

    @cached_property
    def block_lists(self) -> tuple[Argument, ...]:
        """The arguments that are lists of blocks, of which calls make tables."""
        return tuple(argument for argument in self.arguments if argument.lists is not None)

    @cached_property
    def notes_of_tiles(self) -> tuple[str, ...]:
        """Which parts of the mask are solved by algebra, and which by lists of tiles, if any."""
        if self.listing is None:
            return ()
        # Packed sequences have no ranges by sorted ids.
        hints = hints_to_sort(self.predicate) if self.spec.forms == ("dense",) else ()
        return (self.listing.note, *(hints if self.classifies else ()))

    @cached_property
    def notes_of_bounds(self) -> tuple[str, ...]:
        """Why bounds of keys are not exact, and what that costs, where numbers alone tell."""
        notes = tuple(f"no exact range of keys: {note}" for note in self.bounds.diagnostics)
        if not notes or self.linear or self.predicate.expr.has(Load):
            return notes
        excess = excess_of_bounds(self.predicate)
        counted = f"bounds visit {excess} the tiles that are needed, counted at {LENGTH:,} tokens"
        return (*notes, counted)

    @cached_property
    def mask_loads_keys(self) -> bool:
        """Whether a masked tile loads elements by key, of a mask whose tiles a kernel decides."""
        loads = {load for condition in self.conditions for load in condition.atoms(Load)}
        return self.classifies and any(KV_IDX in load.free_symbols for load in loads)

    @cached_property
    def mask_arguments(self) -> tuple[str, ...]:
        """The call's arguments that the kernel reads which decides tiles; none without one."""
        constants = {constant.name for constant in self.constants}
        names = self.listing_arguments.names if self.classifies else ()
        return tuple(name for name in names if name not in constants)

    @property
    def arguments_of_tiles(self) -> tuple[str, ...]:
        """What tiles depend on: those, and how many entries of lists count."""
        counts = (x.lists.counts for x in self.block_lists if x.lists is not None)
        return (*self.mask_arguments, *filter(None, counts))

    @cached_property
    def tiles_arguments(self) -> tuple[str, ...]:
        """The arguments of `tiles`: these, and numbers that sizes of their tensors depend on."""
        read = [x for x in self.params if x.name in self.mask_arguments]
        sizes = [d.sym for x in read if isinstance(x, Tensor) for d in x.dims if d is not None]
        names = {*self.arguments_of_tiles, *_symbols(*sizes)}
        return tuple(param.name for param in self.params if param.name in names)

    @cached_property
    def kernel_arguments(self) -> KernelArguments:
        """The parameters that the kernel takes."""
        names = self._kernel_names
        tables: tuple[RowTable | RangeTable, ...] = (*self.row_tables, *self.range_tables)
        return kernel_arguments(self.arguments, self.constants, tables, names)

    @cached_property
    def listing_arguments(self) -> KernelArguments:
        """The parameters that the kernel that lists tiles takes."""
        names = self.listing.names if self.listing else ()
        return kernel_arguments(self.arguments, self.constants, self.row_tables, names)

    @property
    def reads_halves(self) -> bool:
        """Whether some tensors hold 16-bit numbers."""
        tensors = self.kernel_arguments.tensors + self.listing_arguments.tensors
        return any(tensor.halves for tensor in tensors)

    @property
    def gathers(self) -> tuple[int, ...]:
        """The numbers of dimensions that tensors are indexed by."""
        listed = self.listing.gathers if self.listing else ()
        return tuple(sorted({*self.code.gathers, *self.hidden.gathers, *listed}))

    @cached_property
    def row_tables(self) -> tuple[RowTable, ...]:
        """Tensors that the launcher makes for the kernels."""
        names = self._kernel_names | (self.listing.names if self.listing else frozenset())
        return tuple(table for table in self.every_row_table if table.name in names)

    @cached_property
    def range_tables(self) -> tuple[RangeTable, ...]:
        """Tensors that the launcher makes of conditions on keys alone."""
        return self.bounds.ranges

    @cached_property
    def every_range_table(self) -> tuple[RangeTable, ...]:
        """Those of both passes."""
        if not finds_ranges(self.spec, self.predicate):
            return ()
        return (*self.bounds.ranges, *derive_q_bounds(self.predicate, ranges=True).ranges)

    @cached_property
    def every_row_table(self) -> tuple[RowTable, ...]:
        """All row tables that the mask can be written with, used by a kernel or not."""
        made = with_row_tables(self.predicate)
        return (*made.tables, *made.flags)

    @cached_property
    def looks_rows_up(self) -> bool:
        """Whether there are any, in the backward pass included."""
        return bool(self._looked_up)

    @property
    def hides_ids(self) -> bool:
        """Whether some of them match an id with no key."""
        return any(table.hidden is not None for table in self._looked_up)

    @cached_property
    def _looked_up(self) -> tuple[RowTable, ...]:
        of_keys = with_row_tables(self.predicate, ROWS_OF_KEYS)
        return (*self.every_row_table, *of_keys.tables, *of_keys.flags)

    @cached_property
    def read_outside(self) -> tuple[str, ...]:
        """Tensors that an index of mask, score or sink may lie outside of."""
        spec = self.spec
        tensors = [x for x in (*self.params, *spec.constants) if isinstance(x, Tensor)]
        exprs = (self.predicate.expr, *self._score_and_sink)
        return left_by(exprs, tensors, equal_lengths=self.equal_lengths)

    @property
    def loop_bounds(self) -> tuple[Any, ...]:
        """The expressions of the visited keys' bounds; none if a list has them."""
        intervals = () if self.listing else self.bounds.intervals
        return tuple(e for interval in intervals for e in interval.expressions)

    @property
    def reads_scale(self) -> bool:
        """Whether the kernel takes the scale itself, not its product with log2(e)."""
        return self.spec.score is not None or self.products

    def reads_torch(self, *names: str) -> bool:
        """Whether mask, score or sink depend on any of these symbols: q_idx, b, q_len..."""
        return not self._names.isdisjoint(names)

    @cached_property
    def _names(self) -> frozenset[str]:
        return _symbols(self.predicate.expr, *self._score_and_sink)

    @cached_property
    def _kernel_names(self) -> frozenset[str]:
        names = _symbols(*self.conditions, *self._score_and_sink, *self.loop_bounds)
        names |= self.hidden.names | self.dropout_offsets
        return names if self.promise is None else names | self.promise.names

    @property
    def _score_and_sink(self) -> tuple[Any, ...]:
        sink = self.spec.normaliser.traced_sink
        score = (finite_score(self.spec.score)[0],) if self.spec.score is not None else ()
        return score if sink is None else (*score, sink.sym)


def lower(spec: AttentionSpec, name: str) -> KernelPlan:
    """Traces mask, score and sink, and derives the plan from them.

    Linear attention that goes over all pairs has the plan of dense kernels for features.
    """
    spec = over_pairs(spec) if is_quadratic(spec) else spec
    spec, keywords = with_free_names(spec)
    predicate = trace(with_hidden_by_score(spec))
    bounds = derive_bounds(predicate, ranges=finds_ranges(spec, predicate))
    return KernelPlan(name, spec, predicate, bounds, keywords)


def _symbols(*exprs: Any) -> frozenset[str]:
    return frozenset(symbol.name for expr in exprs for symbol in expr.free_symbols)

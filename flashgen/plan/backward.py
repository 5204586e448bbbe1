"""BackwardPlan: what the kernels of the backward pass do, derived from the forward's plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import sympy

from flashgen.params import Tensor
from flashgen.plan.arguments import KernelArguments, kernel_arguments
from flashgen.plan.backward_code import BackwardCode
from flashgen.plan.classified import finds_ranges
from flashgen.plan.code import code_with, finite_score
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.loops import KeyTiles, key_tiles
from flashgen.plan.promise import Promise, promise_of
from flashgen.plan.score_gradient import (
    InputElement,
    InputGradient,
    derivative,
    has_element_gradients,
    input_elements,
    inputs_of_sink,
    is_finite,
)
from flashgen.symbolic.bounds import TileBounds, derive_q_bounds
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code, gathered_by
from flashgen.symbolic.residual_conditions import residual_conditions
from flashgen.symbolic.tables import RangeTable, RowTable
from flashgen.symbolic.trace import KEYS_OF_ROWS, ROWS_OF_KEYS
from flashgen.symbolic.varies_over import SCALE, SCORES, Axes
from flashgen.symbols import KV_LAST, KV_LEN, SCORE

#: What the kernels read of rows of queries is padded to a multiple of it, which all tiles divide:
#: a load without a mask takes no registers for one.
ROWS = 128

#: A tensor with an element for each pair, and the indices of a pair, in the kernels' names.
DIMS_OF_PAIRS = ("batch", "num_q_heads", "q_len", "kv_len")
PAIR = ("batch", "head", "q_idx", "kv_idx")


@dataclass(frozen=True)
class BackwardPlan:
    """The backward pass of a plan, ready to print.

    Two kernels recompute the weights from the log-sum-exp: one goes over tiles of keys, for the
    gradients of k, v and elements that are a key's own, and one over tiles of queries, for those
    of q and of other elements of tensors that have gradients.

    Attributes:
        plan: the forward's.
        q_bounds: the rows that a tile of keys is visited by.
        packed: whether it is for packed sequences, whose kernels add input gradients to the
            elements themselves.
    """

    plan: KernelPlan
    q_bounds: TileBounds
    packed: bool = False

    rows_multiple = ROWS

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Why hidden tiles are visited: in the forward pass, then in the backward pass.

        A diagnostic of both passes occurs once.
        """
        if self.plan.notes_of_tiles:
            return self.plan.notes_of_tiles
        of_keys = self.plan.bounds.diagnostics
        of_queries = [note for note in self.q_bounds.diagnostics if note not in of_keys]
        return (
            *self.plan.notes_of_bounds,
            *(f"for gradients, no exact range of queries: {note}" for note in of_queries),
        )

    @cached_property
    def of_keys(self) -> BackwardCode:
        """The kernel that goes over tiles of keys."""
        held = [item for item in self._inputs if item.kernel == "keys"]
        return self._code_with(held, self.plan.conditions, self.promise)

    @cached_property
    def of_queries(self) -> BackwardCode:
        """The kernel that goes over tiles of queries."""
        held = [item for item in self._inputs if item.kernel == "queries"]
        return self._code_with(held, self.plan.conditions, self.plan.promise, by_blocks=True)

    @cached_property
    def of_both(self) -> BackwardCode:
        """A kernel over tiles of keys that computes all gradients."""
        held = () if self.by_features else self._inputs
        return self._code_with(held, self.conditions_of_keys, self.promise, along=Axes.ROW)

    @cached_property
    def of_grad_kv(self) -> BackwardCode:
        """A kernel over tiles of keys that leaves dq, and its input gradients, to `of_queries`."""
        held = [item for item in self._inputs if item.kernel == "keys"]
        return self._code_with(held, self.conditions_of_keys, self.promise, along=Axes.ROW)

    @cached_property
    def of_grad_q(self) -> BackwardCode:
        """A kernel over tiles of queries that computes the gradient of q alone."""
        return self._code_with((), self.plan.conditions, self.plan.promise, along=Axes.COLUMN)

    @cached_property
    def of_grad_q_and_inputs(self) -> BackwardCode:
        """A kernel over tiles of queries that computes dq, and all input gradients but of keys."""
        held = [item for item in input_elements(self.plan) if item.kernel == "queries"]
        return self._code_with(held, self.plan.conditions, self.plan.promise, along=Axes.COLUMN)

    @cached_property
    def input_gradients(self) -> tuple[InputGradient, ...]:
        """The input gradients of both kernels."""
        return (*self.of_queries.input_gradients, *self.of_keys.input_gradients)

    @property
    def by_features(self) -> tuple[InputGradient, ...]:
        """Input gradients that the kernel of `of_both` has of features, and sums over no pairs.

        These are of decays. A weight is linear in its query's features, and in the decays up to
        the query: to all pairs of the query these are worth the product of its features and their
        gradient. Those up to a key divide its weights: they are worth minus its product.
        """
        return self.input_gradients if self.plan.products else ()

    @property
    def _inputs(self) -> tuple[InputElement, ...]:
        inputs = input_elements(self.plan)
        return tuple(replace(x, addressed=True) for x in inputs) if self.packed else inputs

    def _code_with(
        self,
        held: Sequence[InputElement],
        conditions: tuple[Any, ...],
        promise: Promise | None,
        *,
        by_blocks: bool = False,
        along: Axes | None = None,
    ) -> BackwardCode:
        parts = [tuple(map(_by_products, item.by_kernel)) for item in held]
        others = (*self._element_derivative, *(expr for part in parts for expr in part))
        code, further = code_with(
            self.plan.spec,
            conditions,
            others,
            promise=promise,
            by_blocks=by_blocks,
            along=along,
            distances=along is not None,
        )
        rest = iter(further)
        score_gradient = next(rest) if self._element_derivative else None
        pairs = zip(held, parts, strict=True)
        gradients = tuple(item.with_code(tuple(islice(rest, len(part)))) for item, part in pairs)
        derivatives = (self._derivative, *(item.derivative.partial for item in held))
        return BackwardCode(code, score_gradient, not all(map(is_finite, derivatives)), gradients)

    @property
    def conditions_of_keys(self) -> tuple[Any, ...]:
        """The conditions that a masked tile evaluates in the kernel of `of_both`."""
        return self._evaluated[0]

    @property
    def checks_kv_len(self) -> bool:
        """Whether a masked tile compares its keys with kv_len: no condition implies it."""
        return self._evaluated[1]

    @cached_property
    def _evaluated(self) -> tuple[tuple[Any, ...], bool]:
        return residual_conditions(self.plan.predicate, ROWS_OF_KEYS)

    @cached_property
    def promise(self) -> Promise | None:
        """The promise that kernels over tiles of keys trust, in masks and in bounds."""
        return promise_of(self.plan.predicate, KEYS_OF_ROWS, ROWS_OF_KEYS)

    @property
    def _every_table(self) -> tuple[RowTable, ...]:
        of_keys = with_row_tables(self.plan.predicate, ROWS_OF_KEYS)
        of_rows = (*self.plan.every_row_table, *self.q_bounds.tables)
        return (*of_rows, *of_keys.tables, *of_keys.flags)

    @cached_property
    def gradient_scale(self) -> Code | None:
        """The derivative where it is the same for all elements of a head; None where it is 1."""
        derivative = self._derivative
        if derivative == 1 or self._element_derivative:
            return None
        return triton_code(derivative, {"b": "batch", "h": "head"})

    @cached_property
    def q_tiles(self) -> KeyTiles:
        """The tiles of queries that a tile of keys visits."""
        listed, separated = self.plan.listing is not None, self.plan.classifies
        return key_tiles(self.q_bounds, self.promise, listed=listed, separated=separated)

    @cached_property
    def checks_q_len(self) -> bool:
        """Whether queries past the last one have to be hidden from a tile of keys.

        Their log-sum-exp is infinite, so that their weights are 0 unless scores are no numbers.
        """
        score = self.plan.spec.score
        return score is not None and not all(
            map(is_finite, (finite_score(score)[0], self._derivative))
        )

    @cached_property
    def reads_kv_last(self) -> bool:
        """Whether these bounds depend on the last key of the tile."""
        return any(KV_LAST in expr.free_symbols for expr in self._loop_bounds)

    @cached_property
    def keys_arguments(self) -> KernelArguments:
        """The parameters that the kernel over tiles of keys takes."""
        return self._arguments((*self.plan.conditions, *self._loop_bounds), self.promise)

    @cached_property
    def both_arguments(self) -> KernelArguments:
        """The parameters that the kernel of `of_both` takes."""
        return self._arguments((*self.conditions_of_keys, *self._loop_bounds), self.promise)

    @property
    def _loop_bounds(self) -> tuple[Any, ...]:
        """The expressions of the visited queries' bounds; none if a list has them."""
        intervals = () if self.plan.listing else self.q_bounds.intervals
        return tuple(e for interval in intervals for e in interval.expressions)

    @cached_property
    def queries_arguments(self) -> KernelArguments:
        """The parameters that the kernel over tiles of queries takes."""
        exprs = (*self.plan.conditions, *self.plan.loop_bounds)
        return self._arguments(exprs, self.plan.promise)

    @property
    def queries_names(self) -> tuple[str, ...]:
        """The names that the launch of that kernel reads, also for lists of tiles of keys."""
        plan = self.plan
        listing = ("bits",) if plan.classifies else plan.listing_arguments.names
        return tuple(dict.fromkeys((*self.queries_arguments.names, *listing)))

    @cached_property
    def row_tables(self) -> tuple[RowTable, ...]:
        """Tensors that the launcher makes for the kernels."""
        queries = (self.queries_arguments, self.plan.listing_arguments)
        return self._tables_for(self.keys_arguments, *queries)

    @cached_property
    def row_tables_of_both(self) -> tuple[RowTable, ...]:
        """Row tables that the launcher makes for the kernel of `of_both`."""
        return self._tables_for(self.both_arguments, self.plan.listing_arguments)

    @cached_property
    def row_tables_split(self) -> tuple[RowTable, ...]:
        """Row tables for the kernel of `of_both` and one over tiles of queries."""
        kernels = (self.both_arguments, self.queries_arguments, self.plan.listing_arguments)
        return self._tables_for(*kernels)

    def _tables_for(self, *kernels: KernelArguments) -> tuple[RowTable, ...]:
        known = {table.name: table for table in self._every_table}
        names = {tensor.name for kernel in kernels for tensor in kernel.tensors}
        return tuple(table for name, table in known.items() if name in names)

    @property
    def _ranges(self) -> tuple[RangeTable, ...]:
        return (*self.plan.range_tables, *self.q_bounds.ranges)

    @cached_property
    def range_tables(self) -> tuple[RangeTable, ...]:
        """The range tables of both passes' bounds."""
        return tuple(dict.fromkeys(self._ranges))

    @cached_property
    def range_tables_of_both(self) -> tuple[RangeTable, ...]:
        """Those that a kernel over tiles of keys alone reads."""
        return self.q_bounds.ranges

    @cached_property
    def gathers(self) -> tuple[int, ...]:
        """The numbers of dimensions that tensors are indexed by."""
        codes = (self.of_keys.code, self.of_queries.code)
        runs = () if self.plan.listing else self.q_tiles.runs
        of_runs = gathered_by(code for run in runs for code in run.codes)
        return tuple(sorted({*of_runs, *(n for code in codes for n in code.gathers)}))

    def is_of_pairs(self, item: InputGradient) -> bool:
        """Whether its tensor has an element for each batch entry, head, query and key, in order."""
        dims = {x.name: x.names for x in self.plan.spec.params if isinstance(x, Tensor)}
        read = tuple(index.text() for index in item.indices)
        return dims[item.tensor] == DIMS_OF_PAIRS and read == PAIR

    def is_stored(self, item: InputGradient) -> bool:
        """Whether what a kernel stores for it is its tensor's gradient, in the tensor's dtype.

        Otherwise its sums are added to others of the tensor, in float32.
        """
        of_tensor = [x for x in self.input_gradients if x.tensor == item.tensor]
        return item.once and len(of_tensor) == 1 and item.tensor not in self.sink_tensors

    @property
    def stored_tensors(self) -> tuple[str, ...]:
        """Tensors whose gradients kernels store in their own dtypes."""
        return tuple(x.tensor for x in self.input_gradients if self.is_stored(x))

    @property
    def sums(self) -> tuple[tuple[int, bool], ...]:
        """For tensors whose elements the kernel finds: the dimension count, and `once`."""
        summed = (item for item in self.of_queries.input_gradients if item.over == "elements")
        return tuple(sorted({(len(item.indices), item.once) for item in summed}))

    @property
    def sums_at(self) -> tuple[int, ...]:
        """For tensors to whose elements the launcher adds sums: the dimension counts."""
        return tuple(sorted({len(x.launched) for x in self.input_gradients if x.launched}))

    @cached_property
    def score_tensors(self) -> tuple[str, ...]:
        """Learned tensors that the score reads, in the arguments' order."""
        read = {item.tensor for item in self.input_gradients}
        return tuple(a.name for a in self.plan.arguments if a.name in read)

    def launcher_reads(self, name: str) -> bool:
        """Whether the indices to which the launcher adds sums read a variable."""
        return any(name in item.launcher_reads for item in self.input_gradients)

    @cached_property
    def differentiable_tensors(self) -> tuple[str, ...]:
        """Tensors with a gradient, in the same order; not those that only the mask reads."""
        found = {*self.score_tensors, *self.sink_tensors}
        return tuple(a.name for a in self.plan.arguments if a.name in found)

    @cached_property
    def sink_tensors(self) -> tuple[str, ...]:
        """Learned tensors that the sink's logit reads."""
        return inputs_of_sink(self.plan)

    @cached_property
    def sink_arguments(self) -> tuple[str, ...]:
        """The arguments of the sink's logit besides b, h, constants and q_len."""
        names = (*(a.name for a in self.plan.arguments), KV_LEN.name)
        return tuple(filter(self.sink_reads, names))

    def sink_reads(self, name: str) -> bool:
        """Whether the sink's logit depends on a symbol: b, h, a parameter or a length."""
        sink = self.plan.spec.normaliser.traced_sink
        return sink is not None and name in {symbol.name for symbol in sink.sym.free_symbols}

    @property
    def leaves_products_out(self) -> bool:
        """Whether the score function ignores the products: q and k have gradients of 0."""
        return not self.plan.code.of_products

    @cached_property
    def _derivative(self) -> Any:
        score = self.plan.spec.score
        return sympy.Integer(1) if score is None else derivative(score)

    @property
    def _element_derivative(self) -> tuple[Any, ...]:
        """The derivative, if elements differ in it."""
        return (_by_products(self._derivative),) if has_element_gradients(self.plan) else ()

    def _arguments(self, exprs: Iterable[Any], promise: Promise | None) -> KernelArguments:
        score = self.plan.spec.score
        of_score = (finite_score(score)[0], self._derivative) if score is not None else ()
        names = {s.name for e in (*exprs, *of_score) for s in e.free_symbols}
        names |= promise.names if promise is not None else set()
        names |= self.plan.hidden.names | self.plan.dropout_offsets
        tables = {table.name: table for table in self._every_table}
        made: tuple[RowTable | RangeTable, ...] = (*tables.values(), *self.range_tables)
        return kernel_arguments(self.plan.arguments, self.plan.constants, made, names)


def backward_plan(plan: KernelPlan, *, packed: bool = False) -> BackwardPlan:
    """The backward pass of a forward kernel's plan, of packed sequences if asked for.

    It is the same one each time, so that no step derives again what another one has derived.
    """
    key = BackwardPlan, packed
    found: BackwardPlan | None = plan.derived.get(key)
    if found is None:
        bounds = derive_q_bounds(plan.predicate, ranges=finds_ranges(plan.spec, plan.predicate))
        found = plan.derived[key] = BackwardPlan(plan, bounds, packed)
    return found


def _by_products(expr: Any) -> Any:
    """An expression of the score as one of the raw products."""
    return expr.xreplace({SCORE: SCALE * SCORES})

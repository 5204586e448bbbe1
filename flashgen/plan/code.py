"""KernelCode: mask, score and sink as a kernel computes them, each part hoisted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.errors import MaskError
from flashgen.masks import Mask
from flashgen.params import Float, Int
from flashgen.plan.block_tables import BlockBits, BlockLoads, block_bits, with_block_loads
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.plan.promise import UNORDERED, KeptPromise, Promise
from flashgen.scores import Score
from flashgen.spec import AttentionSpec
from flashgen.symbolic.by_distance import with_distances
from flashgen.symbolic.hoisting import Assignment, Hoisted, hoist, needed_for
from flashgen.symbolic.nodes import Spread
from flashgen.symbolic.printer import plain_source, triton_code
from flashgen.symbolic.printer.code import Code, gathered_by, read_by
from flashgen.symbolic.score import LOG2E, fold_score, split_infinite
from flashgen.symbolic.varies_over import SCALE, SCORES, Axes, varies_over
from flashgen.symbols import SCORE, Load
from flashgen.tracing.expr import Expr


@dataclass(frozen=True)
class KernelCode:
    """The code of mask, score and sink, which differs between variants of one structure.

    Attributes:
        score: the score of an element from the raw products ``scores``; None if it is the product.
        scaled: the softmax in base 2 multiplies the scores by a positive ``qk_scale``.
        of_products: whether the scores depend on products of q and k, not on positions alone.
        comment: the score function for a reader; ``""`` if there is none.
        in_base_2: whether scores are exponents of 2, and no weights themselves.
        shift: the terms left out of the score, (BLOCK_M,), in base 2; None for none.
        scalars: assignments once a program.
        rows: then once a tile of queries, (BLOCK_M, 1) vectors.
        columns: for each tile of keys, (1, BLOCK_N) vectors that the score reads.
        elements: then values that several parts of the score share.
        distances: the terms that the score reads of the distance from query to key, after what
            they share: assignments once a distance of a tile, over ``kv_minus_q``.
        masked: for each masked tile, assignments that only the conditions read.
        tables: loads of block tables for the conditions.
        bits: loads of block tables for the bitmasks.
        conditions: of the mask; all of them hold for a key that is seen.
        bitmasks: each of them as a column bitmask; None where it has none.
        own_bits: conditions of each column alone, whose bits these read.
        own_lines: what the columns' values are that they read.
        loads_elements: whether they load something for each query and key of a tile.
        reads_q_idx: whether the loop reads the rows' positions.
        score_reads_kv_idx: whether the score reads the columns' positions.
        sink: the sink's logit in base 2; None where there is none.
        gathers: the numbers of dimensions that tensors are indexed by.
        uses_tanh: whether ``_tanh`` is called.
        promise: the conditions that replace the others if the scalar ``unordered`` says that ids
            break the promised order. None where nothing is promised.
    """

    score: Code | None
    scaled: bool
    of_products: bool
    comment: str
    in_base_2: bool
    shift: Code | None
    scalars: tuple[Assignment, ...]
    rows: tuple[Assignment, ...]
    columns: tuple[Assignment, ...]
    elements: tuple[Assignment, ...]
    distances: tuple[Assignment, ...]
    masked: tuple[Assignment, ...]
    tables: tuple[BlockLoads, ...]
    bits: tuple[BlockBits, ...]
    conditions: tuple[Code, ...]
    bitmasks: tuple[Code | None, ...]
    own_bits: tuple[Assignment, ...]
    own_lines: tuple[Assignment, ...]
    loads_elements: bool
    reads_q_idx: bool
    score_reads_kv_idx: bool
    sink: Code | None
    gathers: tuple[int, ...]
    uses_tanh: bool
    promise: KeptPromise | None

    @property
    def score_loads_pairs(self) -> bool:
        """Whether the score loads a number that each query and key of a tile have of their own."""
        codes = (*codes_of(self.elements), *(() if self.score is None else (self.score,)))
        loads = (load for code in codes for load in code.expr.atoms(Load))
        return any(
            varies_over(load) == Axes.ELEMENT
            and all(varies_over(index) != Axes.ELEMENT for index in load.args)
            for load in loads
        )

    @property
    def terms_of_distance(self) -> tuple[str, ...]:
        """The names of those that the score reads, for all pairs of a tile."""
        read = read_by((self.score, *codes_of(self.elements)))
        return tuple(line.name for line in self.distances if line.name in read)


def kernel_code(
    spec: AttentionSpec, conditions: tuple[Any, ...], promise: Promise | None
) -> KernelCode:
    """A spec's mask, score and sink.

    Args:
        spec: whose score and sink they are.
        conditions: those of the mask that the kernel evaluates.
        promise: what they trust.
    """
    return code_with(spec, conditions, promise=promise, along=Axes.COLUMN, own=True)[0]


def code_with(
    spec: AttentionSpec,
    conditions: tuple[Any, ...],
    others: tuple[Any, ...] = (),
    *,
    promise: Promise | None,
    by_blocks: bool = True,
    along: Axes | None = None,
    own: bool = False,
    distances: bool = False,
) -> tuple[KernelCode, tuple[Code, ...]]:
    """What `kernel_code` returns, and other expressions beside it.

    Args:
        spec: whose score and sink they are.
        conditions: those of the mask that the kernel evaluates.
        others: expressions over raw products, `SCALE`, indices and parameters, computed of the same
            elements before the score is.
        promise: what the conditions trust.
        by_blocks: whether tables of blocks are read a block at a time, by tiles of queries x keys.
        along: what the columns of a tile are of, where conditions are computed as bits, too.
        own: whether such bits may be of conditions of each column alone.
        distances: whether costly terms of a distance are computed once for each distance.
    """
    nonnegative = [p.name for p in spec.params if isinstance(p, Int) and p.min >= 0]

    def code_of(expr: Any, **names: str) -> Code:
        return triton_code(expr, KERNEL_NAMES | names, nonnegative)

    tables: tuple[BlockLoads, ...] = ()
    as_written = promise.as_written if promise is not None else ()
    if by_blocks:
        count = len(conditions)
        conditions, tables = with_block_loads(
            (*conditions, *as_written), spec.declared, nonnegative
        )
        conditions, as_written = conditions[:count], conditions[count:]
    score, scale, shift = _softmax_parts(spec)
    of_products = SCORES in score.free_symbols
    score, terms = with_distances(score) if distances else (score, {})
    of_score = () if score == SCORES else (score,)
    exprs = (*of_score, *conditions, *others)
    bits: tuple[BlockBits, ...] = ()
    known_bits: dict[Any, Any] = {}
    if along is not None:
        bits, known_bits = block_bits(conditions, spec.declared, nonnegative, along)
    hoisted = hoist(
        exprs, KERNEL_NAMES, nonnegative=nonnegative, along=along, bits=known_bits, own=own
    )
    of_distances = _of_distances(terms, hoisted, nonnegative)
    first = len(of_score) + len(conditions)
    everywhere = {*range(len(of_score)), *range(first, len(exprs))}
    scalars = (*hoisted.scalars, *of_distances.scalars)
    if spec.score is not None and scale != 1:
        scalars = (*scalars, Assignment("qk_scale", code_of(scale)))
    printed = None
    if promise is not None:
        printed = KeptPromise(code_of(promise.broken), tuple(map(code_of, as_written)))
        scalars = (*scalars, Assignment(UNORDERED, printed.broken))
    columns = tuple(a for a in hoisted.columns if everywhere & {*a.used_by})
    inner = hoisted.results[0] if of_score else None
    if inner is not None and not of_products:
        inner = replace(inner, expr=Spread(inner.expr))
    sink = spec.normaliser.traced_sink
    sink_code = None if sink is None else code_of(sink.sym * LOG2E)
    shift_code = None if shift == 0 else code_of(shift, q_idx="offs_m")
    by_distance = (
        *of_distances.elements,
        *(Assignment(x.name, y) for x, y in zip(terms, of_distances.results, strict=True)),
    )
    lines = codes_of(scalars, hoisted.rows, hoisted.columns, hoisted.elements, by_distance)
    everything = (*lines, *hoisted.results, sink_code, shift_code)
    everything += tuple(table.entry for table in tables)
    everything += () if printed is None else printed.conditions
    code = KernelCode(
        score=inner,
        scaled=scale != 1,
        of_products=of_products,
        comment=plain_source(finite_score(spec.score)[0]) if spec.score is not None else "",
        in_base_2=spec.normaliser.kind != "products",
        shift=shift_code,
        scalars=scalars,
        rows=hoisted.rows,
        columns=columns,
        elements=hoisted.elements,
        distances=by_distance,
        masked=tuple(a for a in hoisted.columns if a not in columns),
        tables=tables,
        bits=bits,
        conditions=hoisted.results[len(of_score) : first],
        bitmasks=hoisted.bitmasks[len(of_score) : first],
        own_bits=hoisted.own_bits,
        own_lines=needed_for(hoisted.columns, read_by(codes_of(hoisted.own_bits))),
        loads_elements=any(
            varies_over(load) == Axes.ELEMENT for c in conditions for load in c.atoms(Load)
        ),
        reads_q_idx=bool(tables or printed) or "q_idx" in hoisted.carried,
        score_reads_kv_idx="kv_idx"
        in read_by((inner, *hoisted.results[first:], *codes_of(columns, hoisted.elements))),
        sink=sink_code,
        gathers=gathered_by(everything),
        uses_tanh=any(map(_calls_tanh, filter(None, everything))),
        promise=printed,
    )
    return code, hoisted.results[first:]


def _of_distances(terms: Mapping[Any, Any], beside: Hoisted, nonnegative: list[str]) -> Hoisted:
    """Terms of a distance as code, whose variables have other names than those beside them."""
    places = (beside.scalars, beside.rows, beside.columns, beside.elements)
    taken = {*beside.carried, *(line.name for of_place in places for line in of_place)}
    return hoist(tuple(terms.values()), KERNEL_NAMES, nonnegative=nonnegative, taken=taken)


def codes_of(*lines: Iterable[Assignment]) -> Iterator[Code]:
    """What assignments compute."""
    return (line.code for of_place in lines for line in of_place)


def _calls_tanh(code: Code) -> bool:
    return any(call.free_symbols for call in code.expr.atoms(sympy.tanh))  # others are numbers


def _softmax_parts(spec: AttentionSpec) -> tuple[Any, Any, Any]:
    """(score, scale, shift) of the base-2 score ``score * scale + shift``.

    The three are computed for each element, a positive scalar, and a term of the row alone. A
    sigmoid needs the whole score, and in float32 the parts would round where the whole does not.
    Products have no exponential: kernels multiply sums by the scale, which a score of them keeps.
    """
    if spec.normaliser.kind == "products":
        of = SCORE if spec.score is None else finite_score(spec.score)[0]
        return of.xreplace({SCORE: SCORES}), sympy.Integer(1), sympy.Integer(0)
    if spec.score is None:
        return SCORES, SCALE, sympy.Integer(0)
    positive = [p.name for p in spec.params if isinstance(p, Float) and _is_positive(p)]
    positive += [p.name for p in spec.params if isinstance(p, Int) and p.min > 0]
    folded = fold_score(finite_score(spec.score)[0], positive)
    if folded.factor is not None and folded.factor_is_positive:
        return SCORES, folded.factor, sympy.Integer(0)
    if spec.normaliser.kind == "sigmoid" or spec.dtype == "float32":
        return folded.expr, sympy.Integer(1), sympy.Integer(0)
    return folded.inner, folded.outer, folded.shift


def _is_positive(param: Float) -> bool:
    return param.above is not None and param.above >= 0


def with_hidden_by_score(spec: AttentionSpec) -> Mask:
    """The spec's mask and, of a score function that is -inf somewhere, the condition that it hides.

    Raises:
        MaskError: an infinity that is no mask.
    """
    if spec.score is None:
        return spec.mask
    score, mask = spec.score, spec.mask
    _, condition = finite_score(score)
    if condition is sympy.true:
        return mask

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Expr:
        return mask.traced & Expr(condition, score.params)

    return Mask(both, mask.label, mask.equal_lengths)


def finite_score(score: Score) -> tuple[Any, Any]:
    """The score function without its infinities, and where it has none.

    Raises:
        MaskError: an infinity that is no mask.
    """
    try:
        return split_infinite(score.traced.sym)
    except ValueError as error:
        raise MaskError(f"score {score.label}: {error}") from error

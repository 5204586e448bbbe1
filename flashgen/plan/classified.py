"""ClassifiedTiles: the kernels that decide each tile of a mask, where bounds are too wide.

Either only the data knows what is visible, or one range lies around what is visible in many places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy

from flashgen.block_lists import BlockLists
from flashgen.config import FORMS, HOPPER
from flashgen.params import Int, Tensor
from flashgen.plan.arguments import KernelTensor
from flashgen.plan.dtypes import ITEMSIZES
from flashgen.plan.listing import TileListing, said_apart, tile_listing
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.plan.wide_bounds import Excess, excess_of_bounds
from flashgen.spec import AttentionSpec
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code, gathered_by, read_by
from flashgen.symbolic.tile_answers import TILE, OfTile, left_to_data, tile_answers
from flashgen.symbolic.trace import POSITIONS, Predicate
from flashgen.symbolic.varies_over import Axes
from flashgen.symbols import (
    GROUP,
    KV_FIRST,
    KV_HEADS,
    KV_IDX,
    KV_LAST,
    Q_IDX,
    B,
    FloorDiv,
    FloorMod,
    H,
    Load,
)

#: The number of a tile of keys: where a table has a column for each block of keys, a row of it is
#: one run of memory, and Triton has to be told.
_KV_TILE = sympy.Symbol("kv_tile", integer=True)

#: The head of keys, as the kernel calls it.
_KV_HEAD = sympy.Symbol("kv_head", integer=True)

#: The most tiles that are decided in a tile of a kernel whose lists tell of them: 3 x 2 of 64.
MOST_PARTS = 6

#: The queries of a tile that is decided, where each query has a list of blocks of its own: those
#: of a tile with rows of eight heads. Of more queries hardly a block would be hidden.
ROWS_OF_A_LIST = 16

#: Comparisons of an order.
_ORDERS = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)

#: The texts of positions: of all rows of a tile; of those beside each tile of keys; of all keys of
#: each tile; of some elements of each tile; and of the elements of one tile.
_ROWS = {"q_idx": "q_rows"}
_ROWS_BY_TILE = {
    "q_idx": "q_rows[:, None]", "kv_first": "kv_first[None, :]", "kv_tile": "kv_tile[None, :]",
}  # fmt: skip
_KEYS = {"kv_idx": "kv_keys", "kv_first": "kv_first[:, None]"}
_PROBES = {"q_idx": "q_probes", "kv_idx": "kv_probes"}
_ELEMENTS = {"q_idx": "q_idx[:, None]", "kv_idx": "kv_idx[None, :]"}

#: The positions of some rows and of the keys of several tiles have both axes already.
_TOGETHER = {"q_idx": "q_idx", "kv_idx": "kv_idx"}


@dataclass(frozen=True)
class ReadOfTile:
    """What the kernel computes of a tile's rows, or of the keys of each tile.

    Attributes:
        code: an integer or a condition: of rows a vector, or a matrix with a column for each tile
            of keys; of keys a matrix with a row for each tile.
        ends: the variables for its least and its greatest value; of a condition, for whether it
            holds for some and for all.
        axis: the axis that is reduced.
        of_keys: whether it is of keys.
        is_condition: whether it is a condition.
    """

    code: Code
    ends: tuple[str, str]
    axis: int
    of_keys: bool
    is_condition: bool

    @property
    def by_number(self) -> bool:
        """Whether a row has an element for each tile of keys, or for a block of them."""
        return _ROWS_BY_TILE[_KV_TILE.name] in self.code.names


@dataclass(frozen=True)
class ClassifiedTiles:
    """What the kernels do that decide tiles and list them.

    Attributes:
        said: the conditions that only the data knows, and those that algebra solves, in words; the
            former are empty where the ranges of bounds are too wide.
        excess: what these would visit.
        tile: the keys of a tile that is decided.
        rows: its queries.
        reads: what is computed of rows and of keys.
        seen: conditions that all hold for a tile that may have a visible element.
        full: conditions that all hold where every element is visible; None where that is unknown.
        no_more: conditions that all hold where a tile that is seen may still have no visible
            element; None where that is never so.
        no_less: conditions that all hold where one that is not full may still have all; likewise.
        elements: the conditions of an element: they decide a tile that is left open; none
            where they would say little more, and tiles that are left open have both.
        probes: the same, of some elements of each tile: they close most tiles.
        together: the same, of the elements of several tiles, where the mask reads a table of
            queries and keys: a row of these tiles is one run of memory. Else none, and tiles are
            looked at one after another. That which reads the table comes first.
        by_batch, by_head: whether tiles differ between batch entries, and heads.
        by_group: whether only between heads that share no keys: there is a list for each of these.
        asks: the variables that these four read.
        names: the parameters that it reads.
        gathers: the numbers of dimensions that tensors are indexed by.
        query_tables: the tables with a row for each query, which tiles of keys read along. Several
            of its elements are loaded at once where Triton knows their addresses to be aligned.
        beside_lines: whether what is left open is beside lines alone: see `_leave_lines`.
        reads_group: whether it reads how many heads share keys.
        parts_told: how many states of a tile's parts lists tell the Gluon forward kernel, or 0.
            Parts are tiles that are decided, at most `MOST_PARTS`, with two bits each: where all or
            nothing of a part is visible, its elements are not looked at.
    """

    said: tuple[str, str]
    excess: Excess
    tile: int
    rows: int
    reads: tuple[ReadOfTile, ...]
    seen: tuple[Code, ...]
    full: tuple[Code, ...] | None
    no_more: tuple[Code, ...] | None
    no_less: tuple[Code, ...] | None
    elements: tuple[Code, ...]
    probes: tuple[Code, ...]
    together: tuple[Code, ...]
    by_batch: bool
    by_head: bool
    by_group: bool
    asks: frozenset[str]
    names: frozenset[str]
    gathers: tuple[int, ...]
    query_tables: frozenset[str]
    beside_lines: bool
    reads_group: bool
    parts_told: int = 0

    #: Block tables are listed without such tiles: see `flashgen.plan.listing`.
    classified = True

    @property
    def by_data(self) -> bool:
        """Whether only the data knows what is visible."""
        return bool(self.said[0])

    @property
    def several(self) -> bool:
        """Whether a tile has more than one answer."""
        return self.by_batch or self.by_head

    @property
    def note(self) -> str:
        """Which part of the mask is solved how, for a build and for explain."""
        by_data, by_algebra = self.said
        if not self.by_data:
            return (
                f"tiles are decided once a call, as bounds would visit {self.excess} the "
                f"tiles that are needed: {by_algebra}"
            )
        solved = f"; algebra solves {by_algebra}" if by_algebra else ""
        return f"tiles are decided once a call, as only the data knows {by_data}{solved}"

    @property
    def sizes(self) -> tuple[str, ...]:
        """The numbers of heads that the kernel takes."""
        own = "num_kv_heads" if self.by_group else "num_q_heads"
        return (own, *(("num_kv_heads",) * self.reads_group))

    @property
    def decides(self) -> bool:
        """Whether it decides some tiles without their elements."""
        return bool(self.seen or self.full)

    @property
    def looks_at_elements(self) -> bool:
        """Whether some tiles are left open until their elements are looked at."""
        return bool(self.elements) and not (self.no_more is None and self.no_less is None)

    @property
    def at_once(self) -> int:
        """Tiles of a program, at most those of a word of bits.

        Where elements decide many of them a program has fewer, as it decides one after another. A
        table by row and tile has a whole word, which is one run of memory, if few are left open.
        """
        few = self.by_number and self.beside_lines and not self.together
        return 8 if self.looks_at_elements and not few else 32

    @property
    def by_number(self) -> bool:
        """Whether it reads a table with an element for each row and tile of keys."""
        return any(read.by_number for read in self.reads)

    @property
    def seen_by_position(self) -> tuple[Code, ...]:
        """Those of `seen` that nothing has to be read for, where that is a table by row and tile.

        A program whose tiles they all hide reads none.
        """
        read = {end for x in self.reads for end in x.ends}
        return tuple(x for x in self.seen if self.by_number and not x.names & read)

    def looked_at(self, tensors: Iterable[KernelTensor]) -> tuple[str, ...]:
        """The sizes and strides that say whether rows of tables are aligned: Triton looks at them.

        Lengths and strides that are multiples of 16 and others then have a kernel each.
        """
        tables = [x for x in tensors if x.name in self.query_tables]
        strides = [f"{x.name}_stride_{i}" for x in tables for i in range(x.ndim - 1)]
        return (*(f"{x.name}_size_{x.ndim - 1}" for x in tables), *strides)

    @property
    def warps(self) -> int:
        """Warps of a program of `_classify_tiles`.

        Most of its instructions are about a tile, and each warp executes them: with one warp a call
        executes a third of them in all. More share what is read of many keys, or for many of them;
        or elements, where these decide every tile.
        """
        if self.looks_at_elements:
            return 1 if self.decides and not self.together else 4
        return 8 if self.reads and self.rows == self.tile else 1

    @property
    def rows_at_once(self) -> int:
        """Rows of the elements that it looks at together, for registers: a warp has fewer."""
        if self.together:
            return 16
        return 8 if self.warps == 1 else min(self.rows, 32)

    @property
    def reads_keys(self) -> bool:
        """Whether something is computed of the keys of each tile."""
        return any(read.of_keys for read in self.reads)


def finds_ranges(spec: AttentionSpec, predicate: Predicate) -> bool:
    """Whether calls find which keys conditions on keys alone show.

    In the dense form they can, and do where no list has the tiles.
    """
    return spec.forms == FORMS[:1] and listing_of(spec, predicate) is None


def listing_of(spec: AttentionSpec, predicate: Predicate) -> TileListing | ClassifiedTiles | None:
    """What lists the tiles of a mask; None where bounds give them."""
    if any(isinstance(param, BlockLists) for param in predicate.params):
        found = classified(predicate, left_to_data(predicate, ranges=True))
        # Tiles may hold rows of several heads that share a list: parts are of one head.
        return with_parts(spec, found) if found.by_head and not found.by_group else found
    return tile_listing(predicate) or classified_tiles(spec, predicate)


def classified_tiles(spec: AttentionSpec, predicate: Predicate) -> ClassifiedTiles | None:
    """The kernels for a mask whose bounds are too wide; None where bounds are as good.

    Modules with a cache or with parts of a whole have bounds alone. A cache decides its own tiles:
    see `flashgen.kernels.cache_triton.deciding`.
    """
    others = not set(spec.forms) <= {"dense", "varlen"} or spec.linformer
    if others or spec.normaliser.kind == "linear":
        return None
    # Packed sequences read parts of tensors, of which there are no ranges of keys.
    dense = spec.forms == ("dense",)
    left = left_to_data(predicate, ranges=dense)
    too_wide = left or (dense and excess_of_bounds(predicate).too_wide)
    if not too_wide:
        return None
    return with_parts(spec, classified(predicate, left))


def with_parts(spec: AttentionSpec, listing: ClassifiedTiles) -> ClassifiedTiles:
    """The kernels; their lists tell the Gluon forward kernel parts of tiles, if it can use them."""
    columns = spec.blocks.choices("BLOCK_N") or (listing.tile,)
    whole = all(n % listing.tile == 0 and n <= 2 * listing.tile for n in columns)
    of_gluon = HOPPER in spec.targets and ITEMSIZES[spec.dtype] == 2
    tells = listing.rows == listing.tile and whole and of_gluon
    return replace(listing, parts_told=4**MOST_PARTS if tells else 0)


def bounds_are_too_wide(predicate: Predicate) -> bool:
    """Whether bounds leave out conditions on data, or visit much that is not needed."""
    return bool(left_to_data(predicate, ranges=True)) or excess_of_bounds(predicate).too_wide


@lru_cache(maxsize=1024)  # a build asks for the same ones at several steps, of every spec
def classified(predicate: Predicate, left: tuple[Any, ...]) -> ClassifiedTiles:
    """The kernels for any mask."""
    said, excess = said_apart(predicate, left), excess_of_bounds(predicate)
    shared = predicate.expr.xreplace({FloorDiv(H, GROUP): _KV_HEAD})
    by_group = _KV_HEAD in shared.free_symbols and H not in shared.free_symbols
    if by_group:
        predicate = replace(predicate, expr=shared)
    answers = tile_answers(predicate)
    nonnegative = [p.name for p in predicate.params if isinstance(p, Int) and p.min >= 0]
    nonnegative.append(_KV_TILE.name)
    of_keys = [end.name for x in answers.reads if x.over == Axes.COLUMN for end in x.ends]
    by_tile = [end.name for x in answers.reads if _is_by_tile(x) for end in x.ends]
    vectors = [KV_FIRST.name, KV_LAST.name, _KV_TILE.name, *of_keys, *by_tile]

    def code(expr: object, names: Mapping[str, str] | None = None) -> Code:
        return triton_code(expr, {**KERNEL_NAMES, **(names or {})}, nonnegative, vectors)

    reads = tuple(_read(x, code(_by_number(x), _texts(x))) for x in answers.reads)
    asked = (answers.seen, answers.full, ~answers.shown, answers.whole)
    if _lists_of_tiles(predicate):
        asked = (*asked[:2], sympy.false, sympy.false)
    seen, full, no_more, no_less = (tuple(map(code, conditions(expr))) for expr in asked)
    parts = () if _lists_of_tiles(predicate) else conditions(predicate.expr)
    elements = tuple(code(part, _ELEMENTS) for part in parts)
    probes = tuple(code(part, _PROBES) for part in parts)
    tables = [part for part in parts if any(map(_is_row_of_keys, part.atoms(Load)))]
    together = (*tables, *(part for part in parts if part not in tables)) if tables else ()
    symbols = predicate.expr.free_symbols
    return ClassifiedTiles(
        said=said,
        excess=excess,
        tile=TILE,
        rows=ROWS_OF_A_LIST if _lists_of_a_query(predicate) else TILE,
        reads=reads,
        seen=seen,
        full=None if asked[1] == False else full,  # noqa: E712
        no_more=None if asked[2] == False else no_more,  # noqa: E712
        no_less=None if asked[3] == False else no_less,  # noqa: E712
        elements=elements,
        probes=probes,
        together=tuple(code(part, _TOGETHER) for part in together),
        by_batch=B in symbols,
        by_head=by_group or H in symbols,
        by_group=by_group,
        asks=read_by((*seen, *full, *no_more, *no_less)),
        names=frozenset(symbol.name for symbol in symbols),
        gathers=gathered_by((*seen, *full, *elements, *(read.code for read in reads))),
        query_tables=frozenset(
            load.args[0].name for load in filter(_is_row, predicate.expr.atoms(Load))
        ),
        beside_lines=_leave_lines(parts),
        reads_group=KV_HEADS in symbols,
    )


def _lists_of_a_query(predicate: Predicate) -> bool:
    """Whether each query has a list of blocks of its own."""
    return any(isinstance(x, BlockLists) and x.query_block == 1 for x in predicate.params)


def _lists_of_tiles(predicate: Predicate) -> bool:
    """Whether the mask reads lists of blocks, each of which consists of tiles."""
    lists = [x for x in predicate.params if isinstance(x, BlockLists)]
    return bool(lists) and all(x.block % TILE == 0 for x in lists)


def hints_to_sort(predicate: Predicate) -> tuple[str, ...]:
    """Which tensors to declare sorted, so that ranges take the place of lists."""
    left = [load for part in left_to_data(predicate, ranges=True) for load in part.atoms(Load)]
    by_position = {load.args[0] for load in left if not _last_alone(load)}
    loads = {load.args[0] for load in left} - by_position
    promised = {
        p.name: Tensor(p.name, p.dims, p.dtype, sorted=True)
        for p in predicate.params
        if isinstance(p, Tensor) and p.sym in loads and p.dtype == "int32" and not p.sorted
    }
    if not promised:
        return ()
    params = tuple(promised.get(p.name, p) for p in predicate.params)
    if bounds_are_too_wide(replace(predicate, params=params)):
        return ()
    names = " and ".join(promised)
    never, each = ("never falls", "it") if len(promised) == 1 else ("never fall", "them")
    return (f"if {names} {never}, declare {each} with sorted=True: ranges replace these lists",)


def _last_alone(load: Load) -> bool:
    """Whether a position is the last index, and in no other: what ``sorted`` is about."""
    *lead, last = load.args[1:]
    return last in POSITIONS and not any(POSITIONS & index.free_symbols for index in lead)


def _is_row_of_keys(load: Load) -> bool:
    """Whether a query has one element for each key: a row of a table, or a column of one."""
    indices = load.args[1:]
    return KV_IDX in indices and any(Q_IDX in index.free_symbols for index in indices)


def _is_row(load: Load) -> bool:
    """Whether a query has a row of a table, whose elements are keys or blocks of keys."""
    *lead, last = load.args[1:]
    return KV_IDX in last.free_symbols and any(Q_IDX in index.free_symbols for index in lead)


def _by_number(read: OfTile) -> Any:
    """What a read computes; of rows beside each tile of keys, by the number of this tile."""
    if not _is_by_tile(read):
        return read.expr
    blocks = (x for x in read.expr.atoms(FloorDiv) if x.args[0] == KV_FIRST)
    return read.expr.xreplace({x: FloorDiv(_KV_TILE, x.args[1] / TILE) for x in blocks})


def _leave_lines(parts: Iterable[Any]) -> bool:
    """Whether conditions are about rows and tiles, or about the order of positions.

    What extremes leave open then lies beside a few lines: some tiles of keys of a tile of queries.
    """
    others = (part for part in parts if not _is_of_tiles(part))
    return all(isinstance(x, _ORDERS) and not x.has(Load, FloorDiv, FloorMod) for x in others)


def _is_of_tiles(part: Any) -> bool:
    """Whether a condition is the same for all keys of a tile."""
    blocks = (x for x in part.atoms(FloorDiv) if x.args[0] == KV_IDX)
    same = {x: KV_FIRST for x in blocks if x.args[1].is_Integer and x.args[1] % TILE == 0}
    return KV_IDX not in part.xreplace(same).free_symbols


def _is_by_tile(read: OfTile) -> bool:
    """Whether something of rows differs between tiles of keys."""
    return read.over == Axes.ROW and KV_FIRST in read.expr.free_symbols


def _texts(read: OfTile) -> Mapping[str, str]:
    if read.over == Axes.COLUMN:
        return _KEYS
    return _ROWS_BY_TILE if _is_by_tile(read) else _ROWS


def _read(read: OfTile, code: Code) -> ReadOfTile:
    least, most = read.ends
    of_keys = read.over == Axes.COLUMN
    # Rows are reduced along the first axis, the keys of each tile along the second.
    return ReadOfTile(code, (least.name, most.name), int(of_keys), of_keys, read.is_condition)

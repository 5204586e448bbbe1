"""The work of a kernel for one call: tiles, FLOPs, exponentials, bytes from L2 and from DRAM.

Tiles come from the mask's own bounds, evaluated with numbers as the kernel does. The rest is sympy
over the tile counts. Two levels of traffic are kept apart: every query tile reads its keys from L2
again, while DRAM sees each tensor once as long as L2 holds the keys and values of a head. Elements
of tensors that mask and score read in the loop come from L2 for each tile too, and from DRAM once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE
from flashgen.budget.targets import Target
from flashgen.config import KernelConfig
from flashgen.params import Tensor
from flashgen.plan import KernelPlan
from flashgen.plan.dtypes import ITEMSIZES
from flashgen.plan.step_cost import tile_loads
from flashgen.symbolic import TileBounds
from flashgen.symbols import FloorDiv, evaluate

FULL_TILES, MASKED_TILES, Q_ROWS, KV_ROWS, SHARERS = sympy.symbols(
    "full_tiles masked_tiles q_rows kv_rows sharers", integer=True, positive=True
)
ELEMENTS_READ, ELEMENTS_ONCE = sympy.symbols("elements_read elements_once", integer=True)
QK_COLUMNS, V_COLUMNS, QK_HEAD_DIM, V_HEAD_DIM = sympy.symbols(
    "qk_columns v_columns qk_head_dim v_head_dim", integer=True, positive=True
)

TILES = FULL_TILES + MASKED_TILES
_QUERIES = Q_ROWS * (QK_HEAD_DIM + V_HEAD_DIM) * ITEMSIZE  # read q, write the output
_LSE = 4 * Q_ROWS

#: Both products over every element of the visited tiles, padding columns included.
FLOPS = 2 * TILES * BLOCK_M * BLOCK_N * (QK_COLUMNS + V_COLUMNS)

#: A softmax's: one for each weight, and one for each row's rescaling factor.
EXPONENTIALS = TILES * BLOCK_M * (BLOCK_N + 1)

_KEYS_READ = TILES * BLOCK_N * (QK_HEAD_DIM + V_HEAD_DIM) * ITEMSIZE
_KEYS_ONCE = KV_ROWS * (QK_HEAD_DIM + V_HEAD_DIM) * ITEMSIZE

#: Each program reads its keys and values for itself.
L2_BYTES = _QUERIES + _LSE + _KEYS_READ + ELEMENTS_READ

_ONCE = _QUERIES + _LSE + ELEMENTS_ONCE

#: Queries and output once. Keys and values once as well where L2 holds those of a head ...
DRAM_BYTES = _ONCE + _KEYS_ONCE

#: ... and otherwise once for all programs of a head that run, and so read them, side by side.
DRAM_BYTES_SPILLED = _ONCE + sympy.Max(_KEYS_ONCE, FloorDiv(_KEYS_READ, SHARERS))


@dataclass(frozen=True)
class Workload:
    """The shapes of one call, and the values of the mask's parameters.

    That of a tensor is anything that gives its elements for a tuple of indices.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    params: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Visit:
    """Key tiles that one query tile visits: unmasked and masked ones."""

    full: int
    masked: int


@dataclass(frozen=True)
class TileRun:
    """Key tiles side by side: from `begin` to before `end`, the inner ones of them unmasked."""

    begin: int
    end: int
    full_begin: int
    full_end: int


@dataclass(frozen=True)
class Traffic:
    """The work of one call of a kernel.

    Attributes:
        programs: query tiles of all heads.
        full_tiles, masked_tiles: key tiles visited by all programs, without and with the mask.
        flops: floating-point operations of both products.
        exponentials: of the softmax.
        element_bytes: bytes of tensors' elements that the loop reads.
        l2_bytes: bytes that the SMs read from L2 and write to it.
        dram_bytes: bytes that DRAM gives and takes.
    """

    programs: int
    full_tiles: int
    masked_tiles: int
    flops: int
    exponentials: int
    element_bytes: int
    l2_bytes: int
    dram_bytes: int


def traffic(
    plan: KernelPlan,
    config: KernelConfig,
    target: Target,
    work: Workload,
    visits: Sequence[Visit] | None = None,
    heads_of_a_tile: int = 1,
) -> Traffic:
    """The account of one call on one target.

    Args:
        plan: the variant.
        config: the kernel's.
        target: what it runs on.
        work: the call.
        visits: for each query tile of a head, the key tiles it visits; None is by the derived
            bounds.
        heads_of_a_tile: how many heads have rows in a tile, with equally many rows each.
    """
    if visits is None:
        visits = visited_tiles(plan, config.BLOCK_M // heads_of_a_tile, config.BLOCK_N, work)
    heads = work.batch * work.num_q_heads
    tiled = heads // heads_of_a_tile
    full = tiled * sum(visit.full for visit in visits)
    masked = tiled * sum(visit.masked for visit in visits)
    read, once = _element_bytes(plan, config, work, full, masked)
    values = {
        **config.as_dict(),
        "itemsize": plan.itemsize,
        "qk_columns": sum(plan.qk_segments),
        "v_columns": sum(plan.v_segments),
        "qk_head_dim": plan.qk_head_dim,
        "v_head_dim": plan.v_head_dim,
        "full_tiles": full,
        "masked_tiles": masked,
        "elements_read": read,
        "elements_once": once,
        "q_rows": heads * work.q_len,
        "kv_rows": work.batch * work.num_kv_heads * work.kv_len,
        "sharers": min(len(visits), target.num_sms),
    }
    held = _l2_holds_a_head(plan, target, work)
    return Traffic(
        programs=tiled * len(visits),
        full_tiles=full,
        masked_tiles=masked,
        flops=evaluate(FLOPS, values),
        exponentials=0 if plan.products else evaluate(EXPONENTIALS, values),
        element_bytes=read,
        l2_bytes=evaluate(L2_BYTES, values),
        dram_bytes=evaluate(DRAM_BYTES if held else DRAM_BYTES_SPILLED, values),
    )


@lru_cache(maxsize=256)  # for configurations that differ in warps and stages alone
def visited_tiles(
    plan: KernelPlan, block_m: int, block_n: int, work: Workload
) -> tuple[Visit, ...]:
    """For each query tile of a head, the key tiles it visits, as the kernel finds them.

    A mask that differs between batch entries or heads is taken at the first of each.

    Args:
        plan: whose bounds they go by.
        block_m: queries of one head in a tile.
        block_n: keys of a tile.
        work: the call.
    """
    return tuple(_visit(runs, block_n) for runs in _runs_of_tiles(plan, block_m, work))


@lru_cache(maxsize=64)  # for configurations that differ in tiles of keys alone
def _runs_of_tiles(
    plan: KernelPlan, block_m: int, work: Workload
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each query tile of a head, the ends of its runs of keys."""
    values = {
        **dict(work.params),
        "q_len": work.q_len,
        "kv_len": work.kv_len,
        "b": 0,
        "h": 0,
    }
    found = []
    for q_first in range(0, work.q_len, block_m):
        rows = {"q_first": q_first, "q_last": min(q_first + block_m, work.q_len) - 1}
        at = {**values, **rows}
        found.append(tuple(_ends(run, at) for run in plan.bounds.intervals))
    return tuple(found)


def _visit(runs: Iterable[tuple[int, ...]], block_n: int) -> Visit:
    full = masked = 0
    for run in _one_behind_another(runs, block_n):
        unmasked = run.full_end - run.full_begin
        full += unmasked
        masked += run.end - run.begin - unmasked
    return Visit(full, masked)


def tile_runs(bounds: TileBounds, values: Mapping[str, Any], block_n: int) -> Iterator[TileRun]:
    """The runs of key tiles that a query tile visits, one behind the other, as the kernel does.

    Args:
        bounds: of the mask.
        values: of all that they read: lengths, parameters, the tile's first and last query.
        block_n: keys of a tile.
    """
    return _one_behind_another((_ends(run, values) for run in bounds.intervals), block_n)


def _one_behind_another(runs: Iterable[tuple[int, ...]], block_n: int) -> Iterator[TileRun]:
    """Runs of keys in tiles, each cut where the one before it ended."""
    done = 0
    for begin, end, full_begin, full_end in sorted(_tiles(run, block_n) for run in runs):
        begin = max(begin, done)
        done = max(end, begin)
        full_begin = min(max(full_begin, begin), done)
        yield TileRun(begin, done, full_begin, min(max(full_end, full_begin), done))


def _ends(run: Any, values: Mapping[str, Any]) -> tuple[int, ...]:
    """A run of keys: begin and end of what some row sees, and of what all rows see."""
    begin, end, full_begin, full_end = (
        evaluate(bound, values) for bound in (run.begin, run.end, run.full_begin, run.full_end)
    )
    seen = begin < end and evaluate(run.condition, values)
    return (begin, end, full_begin, full_end) if seen else (begin,) * 4


def _tiles(run: tuple[int, ...], block_n: int) -> tuple[int, int, int, int]:
    """The same in tiles of keys."""
    begin, end, full_begin, full_end = run
    first = begin // block_n
    if begin >= end:
        return first, first, first, first
    return first, -(-end // block_n), -(-full_begin // block_n), full_end // block_n


def _element_bytes(
    plan: KernelPlan, config: KernelConfig, work: Workload, full: int, masked: int
) -> tuple[int, int]:
    """Bytes of elements that all tiles read, and those of them that are not read twice.

    Rows' elements are read before the loop and not counted.
    """
    read: dict[str, int] = {}
    for load in tile_loads(plan):
        elements = {"rows": 0, "columns": 1, "scores": config.BLOCK_M}[load.over] * config.BLOCK_N
        tiles = masked if load.masked else full + masked
        read[load.tensor] = read.get(load.tensor, 0) + tiles * elements * load.itemsize
    tensors = (param for param in plan.spec.declared if isinstance(param, Tensor))
    sizes = {tensor.name: _size(tensor, work) for tensor in tensors}
    return sum(read.values()), sum(min(n, sizes.get(name, 0)) for name, n in read.items())


def _size(tensor: Tensor, work: Workload) -> int:
    """Bytes of a tensor; a dimension of any size is taken to have an entry for each distance."""
    values = {
        **dict(work.params),
        "batch": work.batch,
        "num_q_heads": work.num_q_heads,
        "num_kv_heads": work.num_kv_heads,
        "q_len": work.q_len,
        "kv_len": work.kv_len,
    }
    distances = work.q_len + work.kv_len
    dims = [distances if dim is None else evaluate(dim.sym, values) for dim in tensor.dims]
    return ITEMSIZES[tensor.dtype] * math.prod(dims)


def _l2_holds_a_head(plan: KernelPlan, target: Target, work: Workload) -> bool:
    """Whether the keys and values of one head fit half of L2; queries and output pass through."""
    head = work.kv_len * (plan.qk_head_dim + plan.v_head_dim) * plan.itemsize
    return 2 * head <= target.l2_bytes

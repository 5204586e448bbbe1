"""CacheAccount: what ``flashgen explain --form cache`` shows of a variant and a step of decoding.

Plain data, as `flashgen.explain.account` has it of a dense call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload, tile_runs
from flashgen.config import HOPPER, KernelConfig
from flashgen.errors import FlashgenError
from flashgen.explain.account import Run, Subject, Timed
from flashgen.explain.call import Asked, described, workload
from flashgen.explain.limits import bound_of, operand, seconds_of
from flashgen.explain.shares import Shares, share_out
from flashgen.explain.variant import run_account, valid_variants
from flashgen.forms.cache import PAGE_SIZES, serves_gluon
from flashgen.forms.many_queries import Call, fills
from flashgen.forms.registry import why_no_form
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.kernels.cache_triton.rank import rank_cache
from flashgen.kernels.cache_triton.shared_memory import (
    bytes_ahead,
    cache_usage,
    programs_of_an_sm,
)
from flashgen.kernels.cache_triton.space import FEW_ROWS, cache_space, for_many_rows
from flashgen.kernels.workload import usual_lengths
from flashgen.loader import Variant
from flashgen.plan import KernelPlan, lower
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import plain_source

#: A run of keys or of tiles: the first, and the first one behind.
Span = tuple[int, int]

#: The usual sequences of a step, and keys of a page.
BATCH, PAGE_SIZE = 16, 64


@dataclass(frozen=True)
class Place:
    """Where a call runs and where its keys lie; None is the usual value.

    Attributes:
        page_size: the keys of a page; 0 for rows.
        num_splits: as of `cache_attention`.
        sms: SMs of the GPU; usually those of the target's.
    """

    page_size: int | None = None
    num_splits: int | None = None
    sms: int | None = None


@dataclass(frozen=True)
class Splits:
    """How programs share out the keys.

    Attributes:
        sms: SMs of the GPU.
        programs_of_an_sm: how many an SM runs side by side.
        programs: how many are launched.
        busy: how many have keys to read.
        tiles_of_queries: of a sequence and a head of keys.
        tiles_of_keys: that each of those visits, one after the other.
        least, most: programs that compute a tile of queries: its splits.
        merged: tiles of queries, of all heads of keys, that several programs compute.
        busiest: the share of the busiest program, as a multiple of the mean over all programs.
    """

    sms: int
    programs_of_an_sm: int
    programs: int
    busy: int
    tiles_of_queries: int
    tiles_of_keys: tuple[int, ...]
    least: int
    most: int
    merged: int
    busiest: float


@dataclass(frozen=True)
class PageAccount:
    """The pages of a sequence.

    Attributes:
        size: keys of a page.
        held: pages with its keys.
        read: pages with a key that some query sees.
    """

    size: int
    held: int
    read: int


@dataclass(frozen=True)
class CacheAccount(Timed, Subject):
    """The account of a step of decoding.

    Attributes:
        label: how the user wrote the mask.
        conditions: a key is visible if all of these hold.
        runs: the keys that a tile of queries visits.
        decided: whether each call decides which tiles of the runs are visited; the account has all.
        config: of the kernel.
        shared, limit: bytes of shared memory of a block, and the most that the target allows.
        ahead: bytes of keys and values on their way to an SM at any time.
        splits: how programs share out the keys.
        pages: None for a cache of rows.
        keys_dram: bytes of keys and values that DRAM reads: each once.
        keys_l2: those that SMs read: again for each tile of queries.
        others: bytes of queries, outputs, log-sum-exps, lengths and pages' numbers.
        partial: bytes of parts' results, written and then read, in L2.
        flops, exponentials: of all tiles.
        seconds: the time of each unit by itself, at its peak rate.
        bound: the unit that takes longest.
        remarks: what the account leaves out.
    """

    label: str
    conditions: tuple[str, ...]
    runs: tuple[Run, ...]
    decided: bool
    config: KernelConfig
    shared: int
    limit: int
    ahead: int
    splits: Splits
    pages: PageAccount | None
    keys_dram: int
    keys_l2: int
    others: int
    partial: int
    flops: int
    exponentials: int
    seconds: dict[str, float]
    bound: str
    remarks: tuple[str, ...]


def explain_cached(
    paths: Iterable[Path], target: str | None, asked: Asked, place: Place
) -> Iterator[CacheAccount]:
    """The account of every variant that the spec files declare, whether or not it has the form.

    Raises:
        FlashgenError: the specs or the call are wrong, or a variant cannot have the form.
    """
    for variant in valid_variants(paths, target):
        yield explain_variant_cached(variant, target, asked, place)


def explain_variant_cached(
    variant: Variant, target: str | None, asked: Asked, place: Place
) -> CacheAccount:
    """The account of one variant whose spec is valid.

    Raises:
        FlashgenError: the variant has no such form or call.
    """
    named = variant.spec.targets
    name = target or (HOPPER if HOPPER in named else named[0])
    spec = variant.spec if name in named else replace(variant.spec, targets=(name,))
    plan = lower(spec, variant.name)
    if why_not := why_no_form("cache", plan):
        raise FlashgenError(f"{variant.name}: --form=cache: {why_not}")
    if not spec.has_form("cache"):  # with it, bounds and lists are other ones
        plan = lower(replace(spec, forms=(*spec.forms, "cache")), variant.name)
    limits = {"num-splits": (place.num_splits, 256), "sms": (place.sms, 2**16)}
    for option, (number, most) in limits.items():
        if number is not None and not 1 <= number <= most:
            raise FlashgenError(
                f"--{option}={number}: out of range; write a number from 1 to {most}"
            )
    page_size = PAGE_SIZE if place.page_size is None else place.page_size
    if page_size not in (0, *PAGE_SIZES):
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise FlashgenError(f"--page-size={page_size}: no such pages; write one of {sizes}, or 0")
    work = workload(plan, _with_usual(plan, asked))
    architecture = get_target(name)
    return _account(variant, plan, architecture, work, replace(place, page_size=page_size))


def _with_usual(plan: KernelPlan, asked: Asked) -> Asked:
    """One query of each of `BATCH` sequences, unless something else is asked for."""
    return replace(
        asked,
        q_len=asked.q_len or 1,
        kv_len=asked.kv_len or usual_lengths(plan)[-1],
        batch=asked.batch or BATCH,
    )


def _account(
    variant: Variant, plan: KernelPlan, target: Target, work: Workload, place: Place
) -> CacheAccount:
    cache, rows = CachePlan(plan), work.q_len * work.num_q_heads // work.num_kv_heads
    config = _config(plan, target, rows)
    paged = bool(place.page_size)
    usage = cache_usage(plan, config, target, paged=paged)
    sms, an_sm = place.sms or target.num_sms, programs_of_an_sm(plan, config, target)
    units = [_unit(cache, work, config, first) for first in range(0, rows, config.BLOCK_M)]
    shares = _shares(cache, work, config, len(units), sms * an_sm, place)
    keys = [unit.keys if paged else unit.in_tiles(work.kv_len) for unit in units]
    key_bytes = (plan.qk_head_dim + plan.v_head_dim) * plan.itemsize
    heads = work.batch * work.num_kv_heads
    once = heads * key_bytes * _length(keys)
    read = heads * key_bytes * sum(_length([of_unit]) for of_unit in keys)
    pages = _pages(units, work, place.page_size) if place.page_size else None
    others = _others(plan, work) + 4 * work.batch * (1 + (pages.read if pages else 0))
    partial = _partial(plan, work, config, rows, shares)
    visits = heads * sum(unit.visits for unit in units)
    flops = (
        2
        * visits
        * config.BLOCK_M
        * config.BLOCK_N
        * (sum(plan.qk_segments) + sum(plan.v_segments))
    )
    exponentials = visits * config.BLOCK_M * (config.BLOCK_N + 1)
    seconds = seconds_of(
        replace(target, num_sms=sms),
        operand(plan),
        flops=flops * target.num_sms / sms,  # the rate of matrix units is that of all SMs
        exponentials=exponentials,
        dram=once + others,
        l2=read + others + partial,
    )
    return CacheAccount(
        variant=variant.name,
        file=variant.file or "",
        target=target.name,
        gpu=target.gpus[0],
        dtype=plan.torch_dtype,
        head_dims=(plan.qk_head_dim, plan.v_head_dim),
        call=described(plan, work),
        label=plan.predicate.label,
        conditions=tuple(map(plain_source, conditions(plan.predicate.expr))),
        runs=tuple(map(run_account, cache.intervals)),
        decided=cache.deciding is not None,
        config=config,
        shared=usage.total,
        limit=usage.limit,
        ahead=an_sm * bytes_ahead(plan, config),
        splits=_splits(work, units, shares, sms, an_sm),
        pages=pages,
        keys_dram=once,
        keys_l2=read,
        others=others,
        partial=partial,
        flops=flops,
        exponentials=exponentials,
        seconds=seconds,
        bound=bound_of(seconds),
        remarks=tuple(_remarks(cache, target, work, place)),
    )


def _config(plan: KernelPlan, target: Target, rows: int) -> KernelConfig:
    """The one that a build publishes for tiles of so many rows."""
    few = rank_cache(plan, target.name, cache_space(plan, target.name).candidates)[0]
    return few if rows <= FEW_ROWS else for_many_rows(plan, few, target)


@dataclass(frozen=True)
class _Unit:
    """A tile of queries: the keys that it sees, in runs, and the tiles of keys that it visits."""

    keys: tuple[Span, ...]
    tiles: tuple[Span, ...]
    block_n: int

    @property
    def visits(self) -> int:
        return sum(end - begin for begin, end in self.tiles)

    def in_tiles(self, kv_len: int) -> tuple[Span, ...]:
        """The keys of all tiles."""
        n = self.block_n
        return tuple((begin * n, min(end * n, kv_len)) for begin, end in self.tiles)


def _unit(
    cache: CachePlan, work: Workload, config: KernelConfig, first: int, rows: int | None = None
) -> _Unit:
    """The unit whose first row is this one; of so many rows instead of a tile's."""
    group = work.num_q_heads // work.num_kv_heads
    last = min((first + (rows or config.BLOCK_M) - 1) // group, work.q_len - 1)
    values = {
        **dict(work.params),
        **{"b": 0, "h": 0, "batch": work.batch, "num_q_heads": work.num_q_heads},
        **{"num_kv_heads": work.num_kv_heads, "q_len": work.q_len, "kv_len": work.kv_len},
        **{"q_first": first // group, "q_last": last},
    }
    bounds = replace(cache.plan.bounds, intervals=cache.intervals)
    keys, tiles = (
        tuple((run.begin, run.end) for run in tile_runs(bounds, values, n) if run.begin < run.end)
        for n in (1, config.BLOCK_N)
    )
    return _Unit(keys, tiles, config.BLOCK_N)


def _length(units: Iterable[Iterable[Span]]) -> int:
    """The keys of all spans, each once."""
    done = total = 0
    for begin, end in sorted(span for spans in units for span in spans):
        total += max(0, end - max(begin, done))
        done = max(done, end)
    return total


def _shares(
    cache: CachePlan,
    work: Workload,
    config: KernelConfig,
    tiles: int,
    at_once: int,
    place: Place,
) -> Shares:
    rows = work.q_len * work.num_q_heads // work.num_kv_heads
    visits = -(-work.kv_len // config.BLOCK_N)
    capacity = -(-work.kv_len // (place.page_size or 1)) * (place.page_size or 1)
    if cache.counts_tiles:  # each tile of queries counts as much as all queries together
        visits = _unit(cache, work, config, 0, rows).visits
    return share_out(
        batch=work.batch,
        kv_heads=work.num_kv_heads,
        tiles=tiles,
        visits=visits,
        capacity_tiles=-(-capacity // config.BLOCK_N),
        at_once=at_once,
        num_splits=place.num_splits,
    )


def _splits(work: Workload, units: Sequence[_Unit], shares: Shares, sms: int, an_sm: int) -> Splits:
    of_all = shares.units * shares.of_a_unit
    return Splits(
        sms=sms,
        programs_of_an_sm=an_sm,
        programs=shares.programs,
        busy=shares.busy,
        tiles_of_queries=len(units),
        tiles_of_keys=tuple(unit.visits for unit in units),
        least=min(shares.parts),
        most=max(shares.parts),
        merged=len(shares.merged) * work.num_kv_heads,
        busiest=min(shares.of_a_program, of_all) * shares.teams / of_all,
    )


def _others(plan: KernelPlan, work: Workload) -> int:
    """Bytes of queries, outputs and log-sum-exps."""
    queries = work.batch * work.q_len * work.num_q_heads
    return queries * ((plan.qk_head_dim + plan.v_head_dim) * plan.itemsize + 4)


def _partial(
    plan: KernelPlan, work: Workload, config: KernelConfig, rows: int, shares: Shares
) -> int:
    """Bytes of parts' outputs, maxima and sums, in float32, written and read."""
    kept, tiles = min(config.BLOCK_M, 1 << (rows - 1).bit_length()), shares.units // work.batch
    numbers = 0
    for unit in shares.merged:
        of_unit = min(config.BLOCK_M, rows - unit % tiles * config.BLOCK_M)
        numbers += shares.parts[unit] * (of_unit * plan.v_head_dim + 2 * kept)
    return 2 * 4 * numbers * work.num_kv_heads


def _pages(units: Sequence[_Unit], work: Workload, size: int) -> PageAccount:
    spans = [[(begin // size, -(-end // size)) for begin, end in unit.keys] for unit in units]
    return PageAccount(size, -(-work.kv_len // size), _length(spans))


def _remarks(cache: CachePlan, target: Target, work: Workload, place: Place) -> Iterator[str]:
    page_size = place.page_size or 0
    call = Call(
        batch=work.batch,
        q_len=work.q_len,
        num_q_heads=work.num_q_heads,
        num_kv_heads=work.num_kv_heads,
        capacity=-(-work.kv_len // (page_size or 1)) * (page_size or 1),
        page_size=page_size,
        sms=place.sms or target.num_sms,
    )
    if target.name == HOPPER and serves_gluon(cache.plan, call):
        if fills(cache.plan, call):
            yield (
                "the Gluon kernel, which computes so many queries instead: it divides the keys of "
                "a tile of queries where tiles are too few for the SMs"
            )
        else:
            yield (
                "the Gluon kernel, which does not compute this call: queries fill less than half "
                f"of the rows that {call.sms} SMs compute at once, and are too few to divide keys"
            )
    if cache.reads_head:
        yield "the runs differ between heads; the first stands for all"
    if cache.arguments.tensors:
        names = ", ".join(tensor.name for tensor in cache.arguments.tensors)
        yield f"the bytes of {names}"

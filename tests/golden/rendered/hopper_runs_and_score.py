"""A golden."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


def _named(owner, name, before):
    """The owner's attribute of this name or, in an older Triton, of the former name."""
    return getattr(owner, name if hasattr(owner, name) else before)


# `gluon.aggregate` from Triton 3.8 on.
_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else tl.core._aggregate
_async_load = _named(tma, "async_load", "async_copy_global_to_shared")  # before Triton 3.8
_async_store = _named(tma, "async_store", "async_copy_shared_to_global")  # before 3.8

# The layout of wgmma's results in registers, for the output.
OUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def _ping_pong_wait(CONSUMER: gl.constexpr):
    """Waits until this consumer's turn has been passed to it."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"bar.sync {8 + CONSUMER}, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ping_pong_arrive(CONSUMER: gl.constexpr):
    """Passes the turn to this consumer, at its hardware barrier; Triton uses the first ones."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"bar.arrive {8 + CONSUMER}, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _stage(count, NUM_STAGES: gl.constexpr):
    """(buffer, phase of its barriers) of the load after `count` others; buffers take turns."""
    if NUM_STAGES & (NUM_STAGES - 1) == 0:
        # Shorter than quotients of numbers that the compiler does not know to be positive.
        return count & (NUM_STAGES - 1), (count & NUM_STAGES) // NUM_STAGES
    else:
        return count % NUM_STAGES, count // NUM_STAGES % 2


@gluon.jit
def _lane_sum(x):
    """The sum of a row over the columns that a thread holds, as four chains; no shuffle."""
    return gl.sum(x.reshape([64, x.shape[1] // 8, 4, 2]), 1)


@gluon.jit
def _row_sum(lanes, ROWS: gl.constexpr):
    """The sums of whole rows from the sums of lanes."""
    return gl.convert_layout(gl.sum(gl.sum(lanes, 2), 1), ROWS, assert_trivial=True)


@gluon.jit
def _pack(p):
    """Weights (64, n) as (64, n / 2) pairs of bfloat16: a loop carries those without a copy."""
    low, high = p.reshape([64, p.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _unpack(pairs, OPERAND: gl.constexpr):
    """The inverse of `_pack`, into wgmma's operand layout: it compiles to no instruction."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    weights = gl.join(low, high).reshape([64, 2 * pairs.shape[1]])
    return gl.convert_layout(weights, OPERAND, assert_trivial=True)


@_aggregate
class _Call:
    """Values that are the same for the whole call."""

    num_q_heads: gl.tensor
    num_kv_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    num_tiles_m: gl.tensor
    num_tiles: gl.tensor
    heads_together: gl.tensor
    lse_rows: gl.tensor
    scale: gl.tensor
    left: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        num_q_heads,
        num_kv_heads,
        q_len,
        kv_len,
        num_tiles_m,
        num_tiles,
        heads_together,
        lse_rows,
        scale,
        left,
    ):
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.q_len = q_len
        self.kv_len = kv_len
        self.num_tiles_m = num_tiles_m
        self.num_tiles = num_tiles
        self.heads_together = heads_together
        self.lse_rows = lse_rows
        self.scale = scale
        self.left = left


@_aggregate
class _Work:
    """A tile of queries, and the tiles of keys that it visits."""

    visits: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    q_first: gl.tensor
    kv_begin_0: gl.tensor
    visits_0: gl.tensor
    kv_begin_1: gl.tensor
    visits_1: gl.tensor
    online_max: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, visits, batch, head, q_first, kv_begin_0, visits_0, kv_begin_1, visits_1, online_max
    ):
        self.visits = visits
        self.batch = batch
        self.head = head
        self.q_first = q_first
        self.kv_begin_0 = kv_begin_0
        self.visits_0 = visits_0
        self.kv_begin_1 = kv_begin_1
        self.visits_1 = visits_1
        self.online_max = online_max


@_aggregate
class _Place:
    """The number of a tile of queries, and the slots that hold its position."""

    slots: gl.shared_memory_descriptor
    q_count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, slots, q_count):
        self.slots = slots
        self.q_count = q_count


@_aggregate
class _Queries:
    """Values that a consumer computes once for its queries, for all of their scores."""

    scalar_0: gl.tensor
    qk_scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scalar_0, qk_scale):
        self.scalar_0 = scalar_0
        self.qk_scale = qk_scale


@_aggregate
class _Tiles:
    """Buffers of tiles: a tuple for each tensor, one buffer for each segment of its columns."""

    q_tiles: gl.tuple
    k_tiles: gl.tuple
    v_tiles: gl.tuple
    out_tiles: gl.tuple

    @gluon.constexpr_function
    def __init__(self, q_tiles, k_tiles, v_tiles, out_tiles):
        self.q_tiles = q_tiles
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.out_tiles = out_tiles


@_aggregate
class _Barriers:
    """Arrays of barriers: a full and an empty barrier for each buffer."""

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    work_full: gl.shared_memory_descriptor
    work_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty):
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.work_full = work_full
        self.work_empty = work_empty


@_aggregate
class _Buffers:
    """Shared memory of producer and consumers."""

    tiles: _Tiles
    barriers: _Barriers
    slots: gl.shared_memory_descriptor
    votes: gl.shared_memory_descriptor
    overflowed: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, barriers, slots, votes, overflowed):
        self.tiles = tiles
        self.barriers = barriers
        self.slots = slots
        self.votes = votes
        self.overflowed = overflowed


@_aggregate
class _Sources:
    """The producer's sources: descriptors of each segment."""

    q_descs: gl.tuple
    k_descs: gl.tuple
    v_descs: gl.tuple
    counter_ptr: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q_descs, k_descs, v_descs, counter_ptr):
        self.q_descs = q_descs
        self.k_descs = k_descs
        self.v_descs = v_descs
        self.counter_ptr = counter_ptr


@_aggregate
class _Results:
    """The consumers' results."""

    out_descs: gl.tuple
    lse_ptr: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out_descs, lse_ptr):
        self.out_descs = out_descs
        self.lse_ptr = lse_ptr


@gluon.jit
def _in_order(index, call):
    """(tile, head): heads in groups whose keys L2 holds, in a group the longest tiles first.

    The shortest quarter of all heads' tiles comes last, so that programs end at the same time.
    """
    num_tiles_m = call.num_tiles_m
    num_tiles = call.num_tiles
    heads_together = call.heads_together
    heads = num_tiles // num_tiles_m
    early = num_tiles_m - num_tiles_m // 4
    is_late = index >= early * heads
    index -= gl.where(is_late, early * heads, 0)
    together = gl.where(is_late, heads, heads_together)
    of_group = together * gl.where(is_late, num_tiles_m - early, early)
    within = index % of_group
    rank = within // together + gl.where(is_late, early, 0)
    head = index // of_group * together + within % together
    return num_tiles_m - 1 - rank, head


@gluon.jit
def _work(index, online_max, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tile of queries at an index; after the call's last one there are no visits."""
    num_q_heads = call.num_q_heads
    q_len = call.q_len
    num_tiles = call.num_tiles
    left = call.left
    is_tile = index < num_tiles
    tile_m, batch_head = _in_order(min(index, num_tiles - 1), call)
    batch = batch_head // num_q_heads
    head = batch_head % num_q_heads
    q_first = tile_m * BLOCK_M
    q_last = min(q_first + BLOCK_M, q_len) - 1
    # Keys that some of these queries see, derived from the mask.
    some_begin_0 = 0
    some_end_0 = min(4, q_last + 1)
    some_begin_1 = max(0, q_first - left)
    some_end_1 = q_last + 1
    # The same in tiles.
    kv_begin_0 = some_begin_0 // BLOCK_N
    kv_end_0 = gl.cdiv(some_end_0, BLOCK_N)
    kv_begin_1 = some_begin_1 // BLOCK_N
    kv_end_1 = gl.cdiv(some_end_1, BLOCK_N)
    # Runs can overlap: each starts where the previous one ended. One loop visits them all.
    visits_0 = kv_end_0 - kv_begin_0
    kv_begin_1 = max(kv_begin_1, kv_end_0)
    kv_end_1 = max(kv_end_1, kv_begin_1)
    visits_1 = visits_0 + kv_end_1 - kv_begin_1
    # A tile of queries that sees no key still visits one tile of keys, fully masked.
    visits = gl.where(is_tile, max(visits_1, 1), 0)
    online_max = gl.to_tensor(online_max)
    return _Work(
        visits, batch, head, q_first, kv_begin_0, visits_0, kv_begin_1, visits_1, online_max
    )


@gluon.jit
def _key_tile(visit, kv_begin_0, visits_0, kv_begin_1, visits_1, call, BLOCK_N: gl.constexpr):
    """The tile of keys of a visit."""
    tile = kv_begin_0 + visit
    tile = gl.where(visit < visits_0, tile, kv_begin_1 + visit - visits_0)
    return tile


@gluon.jit
def _own_visits(work, NUMBER: gl.constexpr, call, BLOCK_N: gl.constexpr):
    """(first visit, last visit, keys that all see ...) of one consumer's queries.

    Visits count down. A consumer skips visits at both ends in which its queries see no key, and all
    but one if it has no queries. It computes all visits between its runs.
    """
    q_len = call.q_len
    left = call.left
    visits = work.visits
    q_first = work.q_first
    kv_begin_0 = work.kv_begin_0
    visits_0 = work.visits_0
    kv_begin_1 = work.kv_begin_1
    top = max(visits - 1, 0)
    q_first = min(q_first + 64 * NUMBER, q_len - 1)
    q_last = min(q_first + 64, q_len) - 1
    some_begin_0 = 0
    some_end_0 = min(4, q_last + 1)
    all_begin_0 = 0
    all_end_0 = min(4, q_first + 1)
    some_end_1 = q_last + 1
    all_begin_1 = max(0, q_last - left)
    all_end_1 = q_first + 1
    last = min(max(some_begin_0 // BLOCK_N - kv_begin_0, 0), visits_0, top)
    own_end = max(some_end_0, some_end_1)
    first = visits_0 + max(gl.cdiv(own_end, BLOCK_N) - kv_begin_1, 0) - 1
    first = max(min(first, top), last)
    none = work.q_first + 64 * NUMBER >= q_len
    first, last = gl.where(none, 0, first), gl.where(none, 0, last)
    return first, last, all_begin_0, all_end_0, all_begin_1, all_end_1


@gluon.jit
def _visited_keys(visit, place, call, NUMBER: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first key, whether it needs the mask) of a visit."""
    kv_begin_0 = _handed_over(4, place)
    visits_0 = _handed_over(5, place)
    kv_begin_1 = _handed_over(6, place)
    visits_1 = _handed_over(7, place)
    tile = _key_tile(visit, kv_begin_0, visits_0, kv_begin_1, visits_1, call, BLOCK_N)
    all_begin_0 = _handed_over(6 * NUMBER + 11, place)
    all_end_0 = _handed_over(6 * NUMBER + 12, place)
    all_begin_1 = _handed_over(6 * NUMBER + 13, place)
    all_end_1 = _handed_over(6 * NUMBER + 14, place)
    masked = (tile * BLOCK_N < all_begin_0) | ((tile + 1) * BLOCK_N > all_end_0)
    masked &= (tile * BLOCK_N < all_begin_1) | ((tile + 1) * BLOCK_N > all_end_1)
    return tile * BLOCK_N, masked


@gluon.jit
def _hand_over(
    work, q_count, slots, full, empty, call, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Hands the tile of queries number `q_count` over to the consumers."""
    slot, phase = _stage(q_count, 2)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    numbers = (
        work.visits,
        work.batch,
        work.head,
        work.q_first,
        work.kv_begin_0,
        work.visits_0,
        work.kv_begin_1,
        work.visits_1,
        work.online_max,
    )
    for i in gl.static_range(9):
        number = gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        slots.index(slots.shape[0] // 2 * slot + i).store(number)
    for consumer in gl.static_range(CONSUMERS):
        own_visits = _own_visits(work, consumer, call, BLOCK_N)
        for i in gl.static_range(6):
            number = gl.full([1], own_visits[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
            slots.index(slots.shape[0] // 2 * slot + 6 * consumer + 9 + i).store(number)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _handed_over(number, place):
    """A number of the tile handed over. Each use reads it from memory: registers are scarce."""
    slots = place.slots
    q_count = place.q_count
    slot = slots.index(slots.shape[0] // 2 * (q_count % 2) + number)
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _batch(place):
    """The batch entry of the tile of queries."""
    return _handed_over(1, place)


@gluon.jit
def _head(place):
    """The head of the tile of queries."""
    return _handed_over(2, place)


@gluon.jit
def _q_first(place, NUMBER: gl.constexpr):
    """The first of a consumer's queries."""
    return _handed_over(3, place) + 64 * NUMBER


@gluon.constexpr_function
def _bitmask_layout(columns):
    """A layout of scores, (64, columns // 8, 8): the columns of a bitmask along dimension 1."""
    bits = [[0, 2**i, 0] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    registers = [*bits, [0, 0, 1], [8, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns // 8, 8])


@gluon.jit
def _bitmask_columns(scores, first):
    """(1, 8): the first column of each column bitmask, counted from `first`.

    If the compiler knew these numbers, it would keep their comparands in registers between tiles.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _bitmask_layout(scores.shape[1]))
    column = first + gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    column = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [column], dtype=gl.int32, is_pure=False, pack=1
    )
    return column[None, :]


@gluon.jit
def _bitmask_rows(scores, x):
    """A vector of rows, (64, 1), in the layout of column bitmasks."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _bitmask_layout(scores.shape[1]))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _at_least(column, least):
    """Bits of column + 8 * i >= least; nothing overflows, whatever `least` is."""
    least = gl.minimum(gl.maximum(least, column), column + 8 * 31)
    return -1 << ((least - column + 7) >> 3).to(gl.int32)


@gluon.jit
def _below(column, end):
    """Bits of column + 8 * i < end; nothing overflows, whatever `end` is."""
    return ~_at_least(column, end)


@gluon.jit
def _apply_bitmask(scores, bitmask):
    """Scores where a column bitmask (64 or 1, 8) has a bit, else -inf."""
    COLUMNS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = _bitmask_layout(COLUMNS)
    given = scores.reshape([64, COLUMNS // 8, 8])
    masked = gl.convert_layout(given, LAYOUT, assert_trivial=True)
    place = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    masked = gl.inline_asm_elementwise(
        """
        {
            .reg .b32 bit;
            .reg .pred shown;
            and.b32 bit, $1, $2;
            setp.ne.s32 shown, bit, 0;
            selp.f32 $0, $3, 0fFF800000, shown;
        }
        """,
        "=f,r,r,f",
        [bitmask[:, None, :], (1 << place)[None, :, None], masked],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    masked = gl.convert_layout(masked, given.type.layout, assert_trivial=True)
    return gl.convert_layout(masked.reshape([64, COLUMNS]), scores.type.layout, assert_trivial=True)


@gluon.jit
def _score_columns(scores, first, DTYPE: gl.constexpr):
    """(1, n): the positions of the scores' columns, counted from `first`, as DTYPE.

    If the compiler knew all of them, it would keep them, or their comparands, in registers from
    tile to tile. Here it cannot see the first; the others differ from it by constants.
    """
    GROUPS: gl.constexpr = scores.shape[1] // 8
    LAYOUT: gl.constexpr = gl.SliceLayout(0, scores.reshape([64, GROUPS, 8]).type.layout)
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, LAYOUT)) * 8
    column = first + gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    column = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [column], dtype=gl.int32, is_pure=False, pack=1
    )
    columns = group.to(DTYPE)[:, None] + column.to(DTYPE)[None, :]
    ROW: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    return gl.convert_layout(columns.reshape([8 * GROUPS]), ROW, assert_trivial=True)[None, :]


@gluon.jit
def _hide(scores, start_n, place, queries, call, NUMBER: gl.constexpr):
    """Scores of 64 queries with the keys from start_n on, -inf where a comparison hides them."""
    left = call.left
    LAYOUT: gl.constexpr = scores.type.layout
    q_first = _q_first(place, NUMBER)
    q_idx = (q_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)))[:, None]
    kv_idx = _bitmask_columns(scores, start_n)
    q_idx = _bitmask_rows(scores, q_idx)
    bitmask = _below(kv_idx - 1, q_idx)
    bitmask &= _below(kv_idx, 4) | _at_least(kv_idx, q_idx - left)
    return _apply_bitmask(scores, bitmask)


@gluon.jit
def _scores(scores, start_n, masked, place, queries, call, NUMBER: gl.constexpr):
    """The scores and the mask, from the products of 64 queries and the keys from start_n on."""
    scalar_0 = queries.scalar_0
    q_first = _q_first(place, NUMBER)
    col_0 = _score_columns(scores, start_n - q_first, gl.float32)
    col_1 = col_0 * scalar_0
    # score + (kv_idx - q_idx) * exp2(-(0.5 * h) - 0.5), over qk_scale and without what the row
    # alone adds.
    scores = scores + col_1
    # Only a tile that holds a hidden key, or reaches past kv_len, evaluates the mask.
    if masked:
        scores = _hide(scores, start_n, place, queries, call, NUMBER)
    return scores


@gluon.jit
def _load_qk(descs, memory, number, start, full, empty, phase):
    """Lets TMA fill the buffers of this number from (batch, head, row) on, once they are empty."""
    batch, head, row = start
    BYTES: gl.constexpr = descs[0].block_type.nbytes
    mbarrier.wait(empty.index(number), phase)
    mbarrier.expect(full.index(number), BYTES)
    _async_load(descs[0], [batch, head, row, 0], full.index(number), memory[0].index(number))


@gluon.jit
def _load_v(descs, memory, number, start, full, empty, phase):
    """Lets TMA fill the buffers of this number from (batch, head, row) on, once they are empty."""
    batch, head, row = start
    BYTES: gl.constexpr = descs[0].block_type.nbytes
    mbarrier.wait(empty.index(number), phase)
    mbarrier.expect(full.index(number), BYTES)
    _async_load(descs[0], [batch, head, row, 0], full.index(number), memory[0].index(number))


@gluon.jit
def _take_overflow(overflowed, slot, CONSUMERS: gl.constexpr):
    """Whether `_set_overflow` has noted an overflow of any consumer; clears the notes."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    told = 0
    for c in gl.static_range(CONSUMERS):
        told = max(told, gl.max(overflowed.index(2 * c + slot).load(LANES), 0))
        _set_overflow(0, overflowed, c, slot)
    return told


@gluon.jit
def _taken(counter_ptr, num_tiles):
    """The next tile of queries from the counter."""
    taken = gl.atomic_add(counter_ptr, 1)
    if taken == num_tiles - 1:
        gl.store(counter_ptr, 0)  # for the next call
    return taken + gl.num_programs(0)


@gluon.jit
def _load_queries(work, q_count, q_descs, q_tiles, q_full, q_empty, CONSUMERS: gl.constexpr):
    """Lets TMA load the queries of a tile."""
    batch = work.batch
    head = work.head
    q_first = work.q_first
    q_stage, q_phase = _stage(q_count, 2)
    for i in gl.static_range(CONSUMERS):
        c = CONSUMERS - 1 - i  # the last queries are often the first to see keys
        number = q_stage * CONSUMERS + c
        _load_qk(
            q_descs, q_tiles, number, (batch, head, q_first + 64 * c), q_full, q_empty, q_phase ^ 1
        )


@gluon.jit
def _producer(
    sources, buffers, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr
):
    """Finds the tiles of queries for the consumers, and loads what they need."""
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    num_tiles = call.num_tiles
    q_descs = sources.q_descs
    k_descs = sources.k_descs
    v_descs = sources.v_descs
    counter_ptr = sources.counter_ptr
    tiles = buffers.tiles
    barriers = buffers.barriers
    slots = buffers.slots
    overflowed = buffers.overflowed
    q_tiles = tiles.q_tiles
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    q_full = barriers.q_full
    q_empty = barriers.q_empty
    k_full = barriers.k_full
    k_empty = barriers.k_empty
    v_full = barriers.v_full
    v_empty = barriers.v_empty
    work_full = barriers.work_full
    work_empty = barriers.work_empty
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    # A buffer is empty in the phase before the phase in which it is full.
    index = gl.program_id(0)
    last, before = index, 0  # the last tiles handed over
    work = _work(index, 0, call, BLOCK_M, BLOCK_N)
    q_count = 0  # tiles of queries
    kv_count = 0  # tiles of keys
    _hand_over(work, q_count, slots, work_full, work_empty, call, CONSUMERS, BLOCK_N)
    visits = work.visits
    _load_queries(work, q_count, q_descs, q_tiles, q_full, q_empty, CONSUMERS)
    while visits > 0:
        kv_head = work.head // (num_q_heads // num_kv_heads)
        tile = _key_tile(
            visits - 1,
            work.kv_begin_0,
            work.visits_0,
            work.kv_begin_1,
            work.visits_1,
            call,
            BLOCK_N,
        )
        start = (work.batch, kv_head, tile * BLOCK_N)
        stage, phase = _stage(kv_count, NUM_STAGES)
        _load_qk(k_descs, k_tiles, stage, start, k_full, k_empty, phase ^ 1)
        for visit in range(visits - 2, -1, -1):
            v_start = start
            v_stage, v_phase = _stage(kv_count, NUM_STAGES)
            kv_count += 1
            tile = _key_tile(
                visit, work.kv_begin_0, work.visits_0, work.kv_begin_1, work.visits_1, call, BLOCK_N
            )
            start = (work.batch, kv_head, tile * BLOCK_N)
            stage, phase = _stage(kv_count, NUM_STAGES)
            _load_qk(k_descs, k_tiles, stage, start, k_full, k_empty, phase ^ 1)
            _load_v(v_descs, v_tiles, v_stage, v_start, v_full, v_empty, v_phase ^ 1)
        stage, phase = _stage(kv_count, NUM_STAGES)
        _load_v(v_descs, v_tiles, stage, start, v_full, v_empty, phase ^ 1)
        kv_count += 1
        # The next tile, after the loads, which must not wait for it.
        q_count += 1
        slot, phase = _stage(q_count, 2)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        online_max = _take_overflow(overflowed, slot, CONSUMERS)  # of the tile before the last one
        following = before
        if online_max == 0:
            if index < num_tiles:
                index = _taken(counter_ptr, num_tiles)
            following = index
            if index >= num_tiles:
                # Before the end, wait for the last tile's overflow.
                mbarrier.wait(work_empty.index(1 - slot), (q_count - 1) // 2 % 2)
                online_max = _take_overflow(overflowed, 1 - slot, CONSUMERS)
                following = gl.where(online_max > 0, last, index)
        before = last
        last = following
        work = _work(following, online_max, call, BLOCK_M, BLOCK_N)
        _hand_over(work, q_count, slots, work_full, work_empty, call, CONSUMERS, BLOCK_N)
        visits = work.visits
        if visits > 0:
            _load_queries(work, q_count, q_descs, q_tiles, q_full, q_empty, CONSUMERS)


@gluon.jit
def _queries_of(q_tiles, number):
    """The queries as operands of wgmma in shared memory."""
    return (q_tiles[0].index(number).reshape([64, 64]),)


@gluon.jit
def _start_scores(q, k_tiles, stage, SCORES: gl.constexpr):
    """Starts q @ k.T for a tile of keys."""
    COLUMNS: gl.constexpr = SCORES.instr_shape[1]
    scores = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    k = k_tiles[0].index(stage).reshape([COLUMNS, 64])
    scores = warpgroup_mma(q[0], k.permute((1, 0)), scores, use_acc=False, is_async=True)
    return scores


@gluon.jit
def _add_values(weights, v_tile, acc, begun):
    """Starts acc = p @ v, or, once begun, acc += p @ v, for a tile of values."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    COLUMNS: gl.constexpr = 2 * weights[0].shape[1]
    v = v_tile.reshape([COLUMNS, acc.shape[1]])
    return warpgroup_mma(_unpack(weights[0], OPERAND), v, acc, use_acc=begun > 0, is_async=True)


@gluon.jit
def _start_values(weights, v_tiles, stage, acc, begun):
    """Starts acc += p @ v for a tile of keys."""
    return (_add_values(weights, v_tiles[0].index(stage), acc[0], begun),)


@gluon.jit
def _finish(
    m_i,
    total,
    rounding,
    redone,
    place,
    queries,
    call,
    lse_ptr,
    NUMBER: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Stores the LSE of rows after their last key; returns the factors of their output."""
    num_q_heads = call.num_q_heads
    q_len = call.q_len
    lse_rows = call.lse_rows
    batch, head, q_first = _batch(place), _head(place), _q_first(place, NUMBER)
    offs_m = q_first + gl.arange(0, 64, layout=ROWS)
    # Sums of usual weights are scaled back near 1, which keeps the digits of their logarithm.
    usual = total < 1.0
    unit = gl.where(usual, 2.0**64, 1.0)
    base = m_i - gl.where(usual, 64.0, 0.0)
    total *= unit
    # A score's terms that depend on the row alone change no weight: they were left out so far.
    base += (
        1.4426950408889634
        * gl.cast(q_first - offs_m, gl.float32)
        * gl.exp2(-(0.5 * gl.cast(head, gl.float32)) - 0.5)
    )
    if lse_rows > 0:
        lse = (base + gl.log2(total)) * 0.6931471805599453  # ln 2: back to the natural logarithm
        row = (batch * num_q_heads + head).to(gl.int64) * q_len
        gl.store(lse_ptr + row + offs_m, lse, mask=offs_m < gl.where(redone > 0, 0, lse_rows))
    return unit * rounding / total


@gluon.jit
def _store_columns(
    acc, place, tile, out_desc, redone, call, NUMBER: gl.constexpr, COLUMN: gl.constexpr
):
    """Lets TMA store the output's columns from COLUMN on, through shared memory."""
    q_len = call.q_len
    batch, head, q_first = _batch(place), _head(place), _q_first(place, NUMBER)
    q_first = gl.where(redone > 0, q_len, q_first)
    tile.reshape([64, acc.shape[1]]).store(acc.to(gl.bfloat16))
    fence_async_shared()
    _async_store(out_desc, [batch, head, q_first, COLUMN], tile)


@gluon.jit
def _store_out(acc, place, out_tiles, number, out_descs, redone, call, NUMBER: gl.constexpr):
    """Stores the output of rows after their last key."""
    _store_columns(acc[0], place, out_tiles[0].index(number), out_descs[0], redone, call, NUMBER, 0)


@gluon.jit
def _queries(place, call, NUMBER: gl.constexpr, ROWS: gl.constexpr):
    """The scalars and rows for the scores of a consumer's queries."""
    scale = call.scale
    head = _head(place)
    scalar_0 = gl.exp2(-(0.5 * gl.cast(head, gl.float32)) - 0.5) / scale
    qk_scale = 1.4426950408889634 * scale
    return _Queries(scalar_0, qk_scale)


# Limits for the sum of a row's weights: one to raise the reference, and the end of the range.
RAISE_ABOVE: gl.constexpr = gl.constexpr(2.0**-40)
MOST_WEIGHT: gl.constexpr = gl.constexpr(2.0**88)
# Below all scores: the reference of a row that has seen no key yet.
UNSEEN: gl.constexpr = gl.constexpr(-3.0e38)
# Steps before the first check of the sums.
LOOK: gl.constexpr = gl.constexpr(16)


@gluon.jit
def _lane_max(x):
    """The maximum of a row over the columns that a thread holds, as four chains; no shuffle."""
    return gl.max(x.reshape([64, x.shape[1] // 8, 4, 2]), 1)


@gluon.jit
def _row_max(lanes, ROWS: gl.constexpr):
    """The maxima of whole rows from the maxima of lanes."""
    return gl.convert_layout(gl.max(gl.max(lanes, 2), 1), ROWS, assert_trivial=True)


@gluon.jit
def _reference(top, ROWS: gl.constexpr, qk_scale):
    """The references of rows, in base 2, from the maxima of lanes."""
    # Finite, so a row that has seen no key yet has weights of exactly 0 instead of NaN.
    return gl.maximum(_row_max(top, ROWS) * qk_scale, UNSEEN) + 64.0


@gluon.jit
def _scale_lanes(lanes, factor):
    """The sums of lanes, multiplied by the factors of their rows."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, lanes.type.layout))
    factor = gl.convert_layout(factor, ROWS, assert_trivial=True)
    return lanes * factor[:, None][:, :, None]


@gluon.jit
def _scale_rows(acc, factor):
    """The rows of an accumulator, multiplied by their factors."""
    OUT: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]


@gluon.jit
def _raised(m_i, m_new, sums):
    """(references, factors of sums) of rows with larger scores, or sums above RAISE_ABOVE."""
    reached = m_i + gl.log2(sums) + 64.0  # the reference that its present sum would have
    grown = gl.maximum(m_new, reached - 8.0)
    m_new = gl.where(sums <= RAISE_ABOVE, m_new, grown)
    # Large sums are not lost: their factor is at least 2^-120.
    m_new = gl.where(sums <= 2.0**24, m_new, gl.minimum(m_new, m_i + 120.0))
    # Where earlier keys outweigh these, by a power of 2: their weights keep their digits.
    m_new = gl.where(m_new >= reached, m_new, m_i + gl.floor(m_new - m_i))
    # A sum beyond its range becomes infinite, so that the overflow is noticed at the end.
    return m_new, gl.where(sums <= MOST_WEIGHT, gl.exp2(m_i - m_new), float("inf"))


@gluon.jit
def _steep(top, m_i, ROWS: gl.constexpr, qk_scale):
    """How far apart scores of a row are: 3 for very far, 1 for far; 5 if it has seen no key."""
    low = gl.where(top == float("-inf"), float("inf"), top)
    low = gl.convert_layout(gl.min(gl.min(low, 2), 1), ROWS, assert_trivial=True)
    spread = m_i - low * qk_scale
    far = gl.where(spread > 139.0, 1, 0)
    very_far = gl.where(spread > 214.0, 2, 0)
    steep = gl.where(m_i > UNSEEN, far | very_far, 5)
    return steep


@gluon.jit
def _any(rows, votes):
    """The OR of three bits over a consumer's rows: within each warp, then over the warps."""
    rows = gl.inline_asm_elementwise(
        "{.reg .b32 x; or.b32 x, $2, $3; redux.sync.or.b32 $0, x, 0xffffffff; mov.b32 $1, $0;}",
        "=r,=r,r,r", [rows], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    votes.store(rows.to(gl.int8).reshape([4, 16]).permute((1, 0)).reshape([64]))
    warps = votes.slice(0, 4).load(gl.BlockedLayout([4], [32], [4], [0])).to(gl.int32)
    return gl.max(warps & 1, 0) | gl.max(warps & 2, 0) | gl.max(warps & 4, 0)


@gluon.jit
def _first_maxima(top, online_max, votes, ROWS: gl.constexpr, qk_scale):
    """(references, whether the next step takes new maxima) of the first tile of keys."""
    m_i = _reference(top, ROWS, qk_scale)
    # The second bit stays: each step then takes new maxima.
    growing = 2 * online_max | _any(_steep(top, m_i, ROWS, qk_scale), votes)
    return m_i, growing


@gluon.jit
def _next_maxima(top, m_i, l_i, growing, votes, ROWS: gl.constexpr, qk_scale):
    """(references, factors of sums, whether the next step takes new maxima too) of a step."""
    m_new = gl.maximum(m_i, _reference(top, ROWS, qk_scale))
    if growing & 6 == 4:
        fresh = gl.where(m_i > UNSEEN, 0, _steep(top, m_new, ROWS, qk_scale))
        growing = _any(fresh, votes)
    else:
        growing &= 2
    m_i, factor = _raised(m_i, m_new, _row_sum(l_i, ROWS))
    return m_i, factor, growing


@gluon.jit
def _set_overflow(number, overflowed, NUMBER: gl.constexpr, slot):
    """Notes whether a consumer's weights have overflowed their range."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    overflowed.index(2 * NUMBER + slot).store(gl.full([1], number, gl.int32, LANES))


@gluon.jit
def _rounded_by(lanes, total, ROWS: gl.constexpr):
    """The factor by which products have a row's weights too small: 1 but for rows of one key.

    A key that outweighs all others is such a row's sum. Values were multiplied by its weight in
    bfloat16, which is the sum's. With that divided out the output is the key's value, and `delta`
    of the backward pass is exact, from which all that remains of such a row's gradient follows.
    """
    rounded = total.to(gl.bfloat16).to(gl.float32)
    return gl.where(_row_max(lanes, ROWS) > total * (1.0 - 2.0**-12), total / rounded, 1.0)


@gluon.jit
def _last_sums(l_i, online_max, place, buffers, NUMBER: gl.constexpr, ROWS: gl.constexpr):
    """(sums of rows, factors, whether the producer repeats this tile)."""
    q_count = place.q_count
    votes = buffers.votes
    overflowed = buffers.overflowed
    total = _row_sum(l_i, ROWS)
    rounding = _rounded_by(l_i, total, ROWS)
    redone = _any(gl.where(total <= MOST_WEIGHT, 0, 1 - online_max), votes.index(NUMBER))
    if redone > 0:
        _set_overflow(1, overflowed, NUMBER, q_count % 2)
    return total, rounding, redone


@gluon.jit
def _skip(
    visits,
    kv_count,
    barriers,
    NUMBER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Releases tiles of keys and values that a consumer's queries do not see, as they arrive."""
    k_full = barriers.k_full
    k_empty = barriers.k_empty
    v_full = barriers.v_full
    v_empty = barriers.v_empty
    for _ in range(visits):
        stage, phase = _stage(kv_count, NUM_STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        _ping_pong_wait(NUMBER)
        _ping_pong_arrive((NUMBER + 1) % CONSUMERS)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        kv_count += 1
    return kv_count


@gluon.jit
def _first_weights(
    scores,
    start_n,
    masked,
    place,
    queries,
    call,
    online_max,
    votes,
    NUMBER: gl.constexpr,
    ROWS: gl.constexpr,
):
    """(references, lanes' row sums, weights, whether the next step takes new maxima)."""
    qk_scale = queries.qk_scale
    scores = _scores(scores, start_n, masked, place, queries, call, NUMBER)
    m_i, growing = _first_maxima(_lane_max(scores), online_max, votes, ROWS, qk_scale)
    p = gl.exp2(scores * qk_scale - m_i[:, None])
    l_i = _lane_sum(p)
    return m_i, l_i, (_pack(p),), growing


@gluon.jit
def _step(
    q,
    acc,
    m_i,
    l_i,
    weights,
    growing,
    kv_count,
    begun,
    more,
    start_n,
    masked,
    place,
    queries,
    call,
    buffers,
    NUMBER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SCORES: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    GROWS: gl.constexpr,
):
    """Adds p @ v of the previous tile of keys; computes the weights of a tile of keys.

    Returns the accumulators, references, lanes' row sums and the weights.
    If GROWS, it takes new maxima, and returns whether the next step has to.
    """
    qk_scale = queries.qk_scale
    tiles = buffers.tiles
    barriers = buffers.barriers
    votes = buffers.votes
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    k_full = barriers.k_full
    k_empty = barriers.k_empty
    v_full = barriers.v_full
    v_empty = barriers.v_empty
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    v_stage, v_phase = _stage(kv_count - 1, NUM_STAGES)
    k_stage, _ = _stage(kv_count, NUM_STAGES)
    next_stage, next_phase = _stage(kv_count + 1, NUM_STAGES)
    _ping_pong_wait(NUMBER)
    scores = _start_scores(q, k_tiles, k_stage, SCORES)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = _start_values(weights, v_tiles, v_stage, acc, begun)
    _ping_pong_arrive((NUMBER + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    scores = _scores(scores, start_n, masked, place, queries, call, NUMBER)
    if GROWS:
        m_i, factor, growing = _next_maxima(
            _lane_max(scores), m_i, l_i, growing, votes.index(NUMBER), ROWS, qk_scale
        )
    acc = (warpgroup_mma_wait(0, deps=acc),)
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    if GROWS:
        acc = (_scale_rows(acc[0], factor),)
        l_i = _scale_lanes(l_i, factor)
    p = gl.exp2(scores * qk_scale - m_i[:, None])
    l_i += _lane_sum(p)
    weights = (_pack(p),)
    mbarrier.wait(k_full.index(next_stage), next_phase, pred=more)
    if GROWS:
        return acc, m_i, l_i, weights, growing
    else:
        return acc, m_i, l_i, weights


@gluon.jit
def _consumer(
    results,
    buffers,
    call,
    NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Computes the rows [64 * NUMBER, 64 * NUMBER + 64) of each tile of queries."""
    out_descs = results.out_descs
    lse_ptr = results.lse_ptr
    tiles = buffers.tiles
    barriers = buffers.barriers
    slots = buffers.slots
    votes = buffers.votes
    q_tiles = tiles.q_tiles
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    out_tiles = tiles.out_tiles
    q_full = barriers.q_full
    q_empty = barriers.q_empty
    k_full = barriers.k_full
    k_empty = barriers.k_empty
    v_full = barriers.v_full
    v_empty = barriers.v_empty
    work_full = barriers.work_full
    work_empty = barriers.work_empty
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    NEXT: gl.constexpr = (NUMBER + 1) % CONSUMERS
    q_count = 0  # tiles of queries
    kv_count = 0  # tiles of keys
    mbarrier.wait(work_full.index(0), 0)
    visits = _handed_over(0, _Place(slots, q_count))
    if NUMBER == CONSUMERS - 1:
        _ping_pong_arrive(0)
    acc = (gl.zeros([64, 64], gl.float32, OUT),)
    while visits > 0:
        place = _Place(slots, q_count)
        online_max = _handed_over(8, place)
        queries = _queries(place, call, NUMBER, ROWS)
        first = _handed_over(6 * NUMBER + 9, place)
        last = _handed_over(6 * NUMBER + 10, place)
        kv_count = _skip(visits - 1 - first, kv_count, barriers, NUMBER, CONSUMERS, NUM_STAGES)
        k_stage, k_phase = _stage(kv_count, NUM_STAGES)
        q_stage, q_phase = _stage(q_count, 2)
        number = q_stage * CONSUMERS + NUMBER
        mbarrier.wait(q_full.index(number), q_phase)
        q = _queries_of(q_tiles, number)
        mbarrier.wait(k_full.index(k_stage), k_phase)
        _ping_pong_wait(NUMBER)
        scores = _start_scores(q, k_tiles, k_stage, SCORES)
        _ping_pong_arrive(NEXT)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        start_n, masked = _visited_keys(first, place, call, NUMBER, BLOCK_N)
        m_i, l_i, weights, growing = _first_weights(
            scores,
            start_n,
            masked,
            place,
            queries,
            call,
            online_max,
            votes.index(NUMBER),
            NUMBER,
            ROWS,
        )
        begun = 0  # whether acc holds products of this tile, or still another's
        kv_count += 1
        k_stage, k_phase = _stage(kv_count, NUM_STAGES)
        mbarrier.wait(k_full.index(k_stage), k_phase, pred=first > last)
        rest = first - 1
        until = LOOK  # steps before the sums are checked
        while rest >= last:
            while (growing > 0) & (rest >= last):
                # growing // 8 is 0: these are the same queries, which ptxas must not see: it would
                # move address arithmetic that both loops share to the path into this loop.
                q_again = _queries_of(q_tiles, number + growing // 8)
                start_n, masked = _visited_keys(rest, place, call, NUMBER, BLOCK_N)
                acc, m_i, l_i, weights, growing = _step(
                    q_again,
                    acc,
                    m_i,
                    l_i,
                    weights,
                    growing,
                    kv_count,
                    begun,
                    rest > last,
                    start_n,
                    masked,
                    place,
                    queries,
                    call,
                    buffers,
                    NUMBER,
                    CONSUMERS,
                    SCORES,
                    NUM_STAGES,
                    True,
                )
                kv_count += 1
                begun = 1
                rest -= 1
            stop = max(last, rest - until + 1)
            for visit in range(rest, stop - 1, -1):
                start_n, masked = _visited_keys(visit, place, call, NUMBER, BLOCK_N)
                acc, m_i, l_i, weights = _step(
                    q,
                    acc,
                    m_i,
                    l_i,
                    weights,
                    growing,
                    kv_count,
                    begun,
                    visit > last,
                    start_n,
                    masked,
                    place,
                    queries,
                    call,
                    buffers,
                    NUMBER,
                    CONSUMERS,
                    SCORES,
                    NUM_STAGES,
                    False,
                )
                kv_count += 1
                begun = 1
            rest = min(rest, stop - 1)
            until = min(2 * until, 64)
            if rest >= last:
                sums = _row_sum(l_i, ROWS)
                growing = _any(gl.where(sums <= RAISE_ABOVE, 0, 1), votes.index(NUMBER))
        # The tile's end.
        total, rounding, redone = _last_sums(l_i, online_max, place, buffers, NUMBER, ROWS)
        v_stage, v_phase = _stage(kv_count - 1, NUM_STAGES)
        mbarrier.arrive(q_empty.index(q_count % 2 * CONSUMERS + NUMBER), count=1)
        _ping_pong_wait(NUMBER)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = _start_values(weights, v_tiles, v_stage, acc, begun)
        _ping_pong_arrive(NEXT)
        scale_out = _finish(
            m_i, total, rounding, redone, place, queries, call, lse_ptr, NUMBER, ROWS
        )
        acc = (warpgroup_mma_wait(0, deps=acc),)
        # One thread waits until TMA has read its last store; the arrival makes the others wait.
        tma.store_wait(0)
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        acc = (_scale_rows(acc[0], scale_out),)
        _store_out(acc, place, out_tiles, NUMBER, out_descs, redone, call, NUMBER)
        mbarrier.arrive(work_empty.index(q_count % 2), count=1)
        kv_count = _skip(last, kv_count, barriers, NUMBER, CONSUMERS, NUM_STAGES)
        q_count += 1
        slot, phase = _stage(q_count, 2)
        mbarrier.wait(work_full.index(slot), phase)
        visits = _handed_over(0, _Place(slots, q_count))
    tma.store_wait(0)
    if NUMBER == 0:
        _ping_pong_wait(0)  # the last arrival, for which no turn is left


# Lengths, head counts and the mask's parameters never cause a recompile.
@gluon.jit(
    do_not_specialize=[
        "num_q_heads",
        "num_kv_heads",
        "q_len",
        "kv_len",
        "num_tiles_m",
        "num_tiles",
        "heads_together",
        "lse_rows",
        "left",
    ]
)
def _attention_hopper(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    counter_ptr,
    num_q_heads,
    num_kv_heads,
    q_len,
    kv_len,
    num_tiles_m,
    num_tiles,
    heads_together,
    lse_rows,
    scale,
    left,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """One program: tiles of BLOCK_M queries, one after another.

    Descriptors are of (batch, heads, rows, columns): of q and out with tiles of 64 rows, of k and v
    with BLOCK_N. lse (batch, heads, q_len) is contiguous; lse_rows is q_len, or 0 for no LSE.
    A head has num_tiles_m tiles, a call num_tiles. counter_ptr: the number handed out, 0 at first.
    """
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    Q_TILES: gl.constexpr = 2 * CONSUMERS
    call = _Call(
        num_q_heads,
        num_kv_heads,
        q_len,
        kv_len,
        num_tiles_m,
        num_tiles,
        heads_together,
        lse_rows,
        scale,
        left,
    )
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [Q_TILES, 1, 1, 64, 64], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_N, 64], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_N, 64], v_desc.layout)
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, 1, 1, 64, 64], out_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    # Slots for the tiles of queries that the producer hands over: the present and the next.
    scalar: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUMBERS: gl.constexpr = 9 + 6 * CONSUMERS
    slots = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], scalar)
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_tiles, k_tiles = (q_tiles,), (k_tiles,)
    v_tiles, out_tiles = (v_tiles,), (out_tiles,)
    tiles = _Tiles(q_tiles, k_tiles, v_tiles, out_tiles)
    barriers = _Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty)
    votes = gl.allocate_shared_memory(gl.int8, [CONSUMERS, 64], scalar)
    overflowed = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 1], scalar)
    # Alternate between arrays: between two stores to one array Triton inserts a barrier.
    for i in gl.static_range(max(Q_TILES + NUM_STAGES, 2 * CONSUMERS)):
        if i < Q_TILES:
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=1)
        if i < NUM_STAGES:
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=CONSUMERS)
        if i < NUM_STAGES:
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)
        if i < 2:
            mbarrier.init(work_full.index(i), count=1)
            mbarrier.init(work_empty.index(i), count=CONSUMERS)
        if i < 2 * CONSUMERS:
            _set_overflow(0, overflowed, i // 2, i % 2)
    buffers = _Buffers(tiles, barriers, slots, votes, overflowed)
    q_descs, k_descs = (q_desc,), (k_desc,)
    v_descs, out_descs = (v_desc,), (out_desc,)
    sources = _Sources(q_descs, k_descs, v_descs, counter_ptr)
    results = _Results(out_descs, lse_ptr)
    # Partitions, then warps and registers of all but the first: Gluon requires literal lists.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (results, buffers, call, 0, BLOCK_M, BLOCK_N, NUM_STAGES)),
                (_consumer, (results, buffers, call, 1, BLOCK_M, BLOCK_N, NUM_STAGES)),
                (_producer, (sources, buffers, call, BLOCK_M, BLOCK_N, NUM_STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (results, buffers, call, 0, BLOCK_M, BLOCK_N, NUM_STAGES)),
                (_consumer, (results, buffers, call, 1, BLOCK_M, BLOCK_N, NUM_STAGES)),
                (_consumer, (results, buffers, call, 2, BLOCK_M, BLOCK_N, NUM_STAGES)),
                (_producer, (sources, buffers, call, BLOCK_M, BLOCK_N, NUM_STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )

"""A golden."""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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
_reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")  # before 3.9


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    """Lets TMA add a tile to memory: Triton 3.8's `tma.async_atomic_add`."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


_async_add = getattr(tma, "async_atomic_add", _async_add)


@gluon.jit
def _at_1d_hopper(tensor, i_0):
    """tensor[i_0, ...] for indices that broadcast, 0 outside of it."""
    ptr, size_0, stride_0 = tensor
    inside = (i_0 >= 0) & (i_0 < size_0)
    ptr += gl.cast(i_0, gl.int64) * stride_0
    return gl.load(ptr, mask=inside, other=0)


@_aggregate
class _BackwardCall:
    """Values that are the same for the whole call."""

    num_q_heads: gl.tensor
    num_kv_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    rows_len: gl.tensor
    scale: gl.tensor
    left: gl.tensor
    slopes: gl.tuple

    @gluon.constexpr_function
    def __init__(self, num_q_heads, num_kv_heads, q_len, kv_len, rows_len, scale, left, slopes):
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.q_len = q_len
        self.kv_len = kv_len
        self.rows_len = rows_len
        self.scale = scale
        self.left = left
        self.slopes = slopes


@_aggregate
class _KeysWorkTile:
    """A tile of keys of one head."""

    batch: gl.tensor
    kv_head: gl.tensor
    kv_first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, kv_first):
        self.batch = batch
        self.kv_head = kv_head
        self.kv_first = kv_first


@_aggregate
class _Keys:
    """Values that a consumer computes once for its keys, or once a head."""

    head_row: gl.tensor
    k_number: gl.tensor
    kv_idx: gl.tensor
    scalar_0: gl.tensor
    qk_scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, head_row, k_number, kv_idx, scalar_0, qk_scale):
        self.head_row = head_row
        self.k_number = k_number
        self.kv_idx = kv_idx
        self.scalar_0 = scalar_0
        self.qk_scale = qk_scale


@_aggregate
class _BackwardTiles:
    """Buffers of loaded tiles."""

    q_tiles: gl.shared_memory_descriptor
    grad_out_tiles: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    rows_tiles: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q_tiles, grad_out_tiles, k_tiles, v_tiles, rows_tiles):
        self.q_tiles = q_tiles
        self.grad_out_tiles = grad_out_tiles
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.rows_tiles = rows_tiles


@_aggregate
class _BackwardBarriers:
    """Arrays of barriers, one for each buffer."""

    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys_full, keys_empty, full, empty):
        self.keys_full = keys_full
        self.keys_empty = keys_empty
        self.full = full
        self.empty = empty


@_aggregate
class _BackwardBuffers:
    """Shared memory of producer and consumers."""

    tiles: _BackwardTiles
    barriers: _BackwardBarriers
    ds_tiles: gl.shared_memory_descriptor
    grad_q_tiles: gl.shared_memory_descriptor
    slots: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, barriers, ds_tiles, grad_q_tiles, slots):
        self.tiles = tiles
        self.barriers = barriers
        self.ds_tiles = ds_tiles
        self.grad_q_tiles = grad_q_tiles
        self.slots = slots


@_aggregate
class _BackwardSources:
    """The producer's sources."""

    q_desc: tma.tensor_descriptor
    grad_out_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    rows_desc: tma.tensor_descriptor
    counter_ptr: gl.tensor
    num_tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q_desc, grad_out_desc, k_desc, v_desc, rows_desc, counter_ptr, num_tiles):
        self.q_desc = q_desc
        self.grad_out_desc = grad_out_desc
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.rows_desc = rows_desc
        self.counter_ptr = counter_ptr
        self.num_tiles = num_tiles


@_aggregate
class _BackwardResults:
    """The consumers' results."""

    grad_q_desc: tma.tensor_descriptor
    grad_k_desc: tma.tensor_descriptor
    grad_v_desc: tma.tensor_descriptor
    total_ptr: gl.tensor

    @gluon.constexpr_function
    def __init__(self, grad_q_desc, grad_k_desc, grad_v_desc, total_ptr):
        self.grad_q_desc = grad_q_desc
        self.grad_k_desc = grad_k_desc
        self.grad_v_desc = grad_v_desc
        self.total_ptr = total_ptr


@gluon.jit
def _next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    """(buffer, phase of its barriers) of the next visit; buffers take turns."""
    stage += 1
    if stage == NUM_STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _unknown_zero():
    """0, which a compiler cannot see.

    Otherwise it would hoist the addresses of all parts of a tile out of the loop, more than
    registers hold.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@_aggregate
class _RunsOfQueries:
    """The visited tiles of queries: their number, and where they are."""

    visits: gl.tensor
    q_begin_0: gl.tensor
    visits_0: gl.tensor
    full_begin_0: gl.tensor
    full_end_0: gl.tensor
    q_begin_1: gl.tensor
    visits_1: gl.tensor
    full_begin_1: gl.tensor
    full_end_1: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        visits,
        q_begin_0,
        visits_0,
        full_begin_0,
        full_end_0,
        q_begin_1,
        visits_1,
        full_begin_1,
        full_end_1,
    ):
        self.visits = visits
        self.q_begin_0 = q_begin_0
        self.visits_0 = visits_0
        self.full_begin_0 = full_begin_0
        self.full_end_0 = full_end_0
        self.q_begin_1 = q_begin_1
        self.visits_1 = visits_1
        self.full_begin_1 = full_begin_1
        self.full_end_1 = full_end_1


@gluon.jit
def _backward_visits(batch, head, kv_first, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The visits of a head's queries, from bounds; see `_query_tile`."""
    q_len = call.q_len
    kv_len = call.kv_len
    left = call.left
    kv_last = min(kv_first + BLOCK_N, kv_len) - 1
    # Queries that see some of these keys, and that see all of them, derived from the mask.
    some_begin_0 = kv_first
    some_end_0 = min(q_len, kv_last + left + 1)
    all_begin_0 = kv_last
    all_end_0 = min(q_len, kv_first + left + 1)
    some_begin_1 = kv_first
    some_end_1 = q_len
    all_begin_1 = kv_last
    all_end_1 = gl.where(kv_last <= 3, q_len, kv_last)
    some_end_1 = gl.where(kv_first <= 3, some_end_1, some_begin_1)
    # The same in tiles.
    q_begin_0 = some_begin_0 // BLOCK_M
    q_end_0 = gl.cdiv(some_end_0, BLOCK_M)
    full_begin_0 = gl.cdiv(all_begin_0, BLOCK_M)
    full_end_0 = all_end_0 // BLOCK_M
    q_begin_1 = some_begin_1 // BLOCK_M
    q_end_1 = gl.where(some_begin_1 < some_end_1, gl.cdiv(some_end_1, BLOCK_M), q_begin_1)
    full_begin_1 = gl.cdiv(all_begin_1, BLOCK_M)
    full_end_1 = all_end_1 // BLOCK_M
    # Runs can overlap: each starts where the previous one ended. One loop visits them all.
    visits_0 = q_end_0 - q_begin_0
    q_begin_1 = max(q_begin_1, q_end_0)
    q_end_1 = max(q_end_1, q_begin_1)
    visits_1 = visits_0 + q_end_1 - q_begin_1
    visits = visits_1
    return _RunsOfQueries(
        visits,
        q_begin_0,
        visits_0,
        full_begin_0,
        full_end_0,
        q_begin_1,
        visits_1,
        full_begin_1,
        full_end_1,
    )


@gluon.jit
def _query_tile(visit, runs, call, kv_first, BLOCK_N: gl.constexpr):
    """(tile of queries, whether it needs the mask) of a visit."""
    kv_len = call.kv_len
    q_begin_0 = runs.q_begin_0
    visits_0 = runs.visits_0
    full_begin_0 = runs.full_begin_0
    full_end_0 = runs.full_end_0
    q_begin_1 = runs.q_begin_1
    full_begin_1 = runs.full_begin_1
    full_end_1 = runs.full_end_1
    tile = q_begin_0 + visit
    tile = gl.where(visit < visits_0, tile, q_begin_1 + visit - visits_0)
    masked = (tile < full_begin_0) | (tile >= full_end_0)
    masked &= (tile < full_begin_1) | (tile >= full_end_1)
    # Weights of keys past the end could overflow, and their products with dp be NaN.
    masked |= kv_first + BLOCK_N > kv_len
    return tile, masked


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
def _query_columns(scores, first, DTYPE: gl.constexpr):
    """(n,): the queries that the columns of scores are of, counted from `first`, as DTYPE.

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
    return gl.convert_layout(columns.reshape([8 * GROUPS]), ROW, assert_trivial=True)


@gluon.jit
def _mask_scores(scores, q_first, head, keys, call, work_tile):
    """Scores of 64 keys with the queries from q_first on, -inf where a comparison hides them."""
    left = call.left
    kv_idx = keys.kv_idx
    q_idx = _bitmask_columns(scores, q_first)
    kv_idx = _bitmask_rows(scores, kv_idx)
    bitmask = _at_least(q_idx, kv_idx)
    bitmask &= gl.where(kv_idx < 4, -1, 0) | _below(q_idx - left - 1, kv_idx)
    return _apply_bitmask(scores, bitmask)


@gluon.jit
def _backward_scores(scores, lse, q_first, head, keys, call, work_tile, masked):
    """Scores and mask, from 64 keys' products with the queries from q_first on."""
    slopes = call.slopes
    kv_idx = keys.kv_idx
    scalar_0 = keys.scalar_0
    col_0 = gl.cast(kv_idx - q_first, gl.float32)
    col_1 = col_0 * scalar_0
    # Scores lack the terms that depend on the row alone: subtract them from the LSE.
    lse -= 1.4426950408889634 * -_query_columns(scores, 0, gl.float32) * _at_1d_hopper(slopes, head)
    # score + (kv_idx - q_idx) * slopes[h], over qk_scale and without what the row alone adds.
    scores = scores + col_1
    # Only a tile that holds a hidden pair, or reaches past an end, evaluates the mask.
    if masked:
        scores = _mask_scores(scores, q_first, head, keys, call, work_tile)
    return scores, lse


@gluon.jit
def _lane_sums(x):
    """The sums of rows over the columns that a thread holds, as four chains; no shuffle."""
    return gl.sum(x.reshape([64, x.shape[1] // 8, 4, 2]), 1)


@gluon.jit
def _add_learned(totals, ds, q_first, head, keys, call, work_tile):
    """Adds the gradients of learned tensors from 64 keys to their sums."""
    kv_idx = keys.kv_idx
    q_idx = _query_columns(ds, q_first, gl.float32)[None, :]
    kv_idx = kv_idx.to(gl.float32)
    partial = kv_idx - q_idx
    of_total = ds * partial
    return (totals[0] + _lane_sums(of_total),)


@gluon.jit
def _start_scores_of_keys(keys, q_tiles, stage, SCORES: gl.constexpr):
    """Starts k @ q.T, or v @ do.T, for a tile of queries."""
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    scores = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
    q = q_tiles.index(stage).reshape([BLOCK_M, keys.shape[1]])
    return warpgroup_mma(keys, q.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _in_registers_order(sums):
    """64 x 64 sums in the order of registers, which saves shared memory; see `_place_sums`."""
    return sums.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([128, 32])


@gluon.jit
def _announce(index, slots, number):
    """Tells the consumers which tile of keys arrives next in a buffer; -1: no more."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(number).store(gl.full([1], index, gl.int32, LANES))


@gluon.jit
def _announced(slots, number):
    """The tile of keys in a buffer. Each use reads it from memory: registers are scarce."""
    return gl.max(slots.index(number).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _keys_of(index, call, BLOCK_N: gl.constexpr):
    """The tile of keys of this index, in the order of computation."""
    num_kv_heads = call.num_kv_heads
    kv_len = call.kv_len
    num_tiles_n = gl.cdiv(kv_len, BLOCK_N)
    # Tiles of one head run side by side: they share queries in L2.
    batch_head = index // num_tiles_n
    tile_n = index % num_tiles_n
    return _KeysWorkTile(batch_head // num_kv_heads, batch_head % num_kv_heads, tile_n * BLOCK_N)


@gluon.jit
def _backward_producer(
    sources, buffers, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr
):
    """Takes tiles of keys, and loads the consumers' tiles for them."""
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    q_desc = sources.q_desc
    grad_out_desc = sources.grad_out_desc
    k_desc = sources.k_desc
    v_desc = sources.v_desc
    rows_desc = sources.rows_desc
    counter_ptr = sources.counter_ptr
    num_tiles = sources.num_tiles
    tiles = buffers.tiles
    barriers = buffers.barriers
    slots = buffers.slots
    q_tiles = tiles.q_tiles
    grad_out_tiles = tiles.grad_out_tiles
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    rows_tiles = tiles.rows_tiles
    keys_full = barriers.keys_full
    keys_empty = barriers.keys_empty
    full = barriers.full
    empty = barriers.empty
    TILES: gl.constexpr = q_desc.block_type.nbytes + grad_out_desc.block_type.nbytes
    BYTES: gl.constexpr = TILES + 2 * rows_desc.block_type.nbytes
    group = num_q_heads // num_kv_heads
    stage, phase = 0, 1  # a buffer is empty one phase before it is full
    index, count = gl.program_id(0), 0
    while index < num_tiles:
        work_tile = _keys_of(index, call, BLOCK_N)
        batch, kv_head, kv_first = work_tile.batch, work_tile.kv_head, work_tile.kv_first
        number = count % 2
        keys_arrived = keys_full.index(number)
        mbarrier.wait(keys_empty.index(number), count // 2 % 2 ^ 1)
        _announce(index, slots, number)
        mbarrier.expect(keys_arrived, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        keys_place = [batch, kv_head, kv_first, 0]
        _async_load(k_desc, keys_place, keys_arrived, k_tiles.index(number))
        _async_load(v_desc, keys_place, keys_arrived, v_tiles.index(number))
        for member in range(group):
            head = kv_head * group + member
            row = batch * num_q_heads + head
            runs = _backward_visits(batch, head, kv_first, call, BLOCK_M, BLOCK_N)
            for visit in range(runs.visits):
                tile = _query_tile(visit, runs, call, kv_first, BLOCK_N)[0]
                q_first = tile * BLOCK_M
                mbarrier.wait(empty.index(stage), phase)
                arrived = full.index(stage)
                mbarrier.expect(arrived, BYTES)
                place = [batch, head, q_first, 0]
                _async_load(q_desc, place, arrived, q_tiles.index(stage))
                _async_load(rows_desc, [0, row, q_first], arrived, rows_tiles.index(stage))
                _async_load(grad_out_desc, place, arrived, grad_out_tiles.index(stage))
                _async_load(
                    rows_desc, [1, row, q_first], arrived, rows_tiles.index(NUM_STAGES + stage)
                )
                stage, phase = _next_stage(stage, phase, NUM_STAGES)
        count += 1
        taken = gl.atomic_add(counter_ptr, 1)
        if taken == num_tiles - 1:
            gl.store(counter_ptr, 0)  # for the next call
        index = taken + gl.num_programs(0)
    mbarrier.wait(keys_empty.index(count % 2), count // 2 % 2 ^ 1)
    _announce(-1, slots, count % 2)
    mbarrier.arrive(keys_full.index(count % 2), count=1)


@gluon.jit
def _start_grad_q(ds_tile, k, NUMBER: gl.constexpr, BLOCK_M: gl.constexpr):
    """Starts ds @ k for half of the queries, or half of the columns, or (64 x 64) its own keys."""
    GRAD_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    grad_q = gl.zeros([64, 64], gl.float32, GRAD_Q)
    if BLOCK_M == 128:
        ds_tile = ds_tile.slice(64 * NUMBER, 64, 1)
    elif k.shape[1] == 128:
        k = k.slice(64 * NUMBER, 64, 1)
    else:
        ds_tile, k = ds_tile.slice(64 * NUMBER, 64), k.slice(64 * NUMBER, 64)
    return warpgroup_mma(ds_tile.permute((1, 0)), k, grad_q, use_acc=False, is_async=True)


@gluon.jit
def _backward_step(
    grad_k,
    grad_v,
    scores,
    totals,
    stage,
    phase,
    parity,
    tile,
    more,
    masked,
    head,
    keys,
    results,
    buffers,
    call,
    work_tile,
    NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    LEARNS: gl.constexpr,
):
    """Adds a tile of queries' products to the gradients; computes the next tile's scores."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    head_row = keys.head_row
    k_number = keys.k_number
    qk_scale = keys.qk_scale
    grad_q_desc = results.grad_q_desc
    tiles = buffers.tiles
    barriers = buffers.barriers
    ds_tiles = buffers.ds_tiles
    grad_q_tiles = buffers.grad_q_tiles
    q_tiles = tiles.q_tiles
    grad_out_tiles = tiles.grad_out_tiles
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    rows_tiles = tiles.rows_tiles
    full = barriers.full
    empty = barriers.empty
    zero = _unknown_zero()
    k = k_tiles.index(k_number + zero).reshape([BLOCK_N, 64])
    v = v_tiles.index(k_number + zero).reshape([BLOCK_N, 64])
    own_k, own_v = k.slice(64 * NUMBER, 64), v.slice(64 * NUMBER, 64)
    q_first = tile * BLOCK_M
    dp = _start_scores_of_keys(own_v, grad_out_tiles, stage, SCORES)
    lse = rows_tiles.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    scores, lse = _backward_scores(scores, lse, q_first, head, keys, call, work_tile, masked)
    p = gl.exp2(scores * qk_scale - lse[None, :])
    weights = gl.convert_layout(p.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
    delta = rows_tiles.index(NUM_STAGES + stage).reshape([BLOCK_M]).load(COLUMNS)
    grad_out = grad_out_tiles.index(stage).reshape([BLOCK_M, 64])
    grad_v = warpgroup_mma(weights, grad_out, grad_v, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - delta[None, :])
    if LEARNS:
        totals = _add_learned(totals, ds, q_first, head, keys, call, work_tile)
    ds = ds.to(gl.bfloat16)
    of_scores = gl.convert_layout(ds, WEIGHTS, assert_trivial=True)
    q = q_tiles.index(stage).reshape([BLOCK_M, 64])
    grad_k = warpgroup_mma(of_scores, q, grad_k, is_async=True)
    ds_tile = ds_tiles.index(parity)
    ds_tile.slice(64 * NUMBER, 64).store(ds)
    fence_async_shared()
    grad_q = _start_grad_q(ds_tile, k, NUMBER, BLOCK_M)
    grad_v = warpgroup_mma_wait(2, deps=(grad_v,))
    next_stage, next_phase = _next_stage(stage, phase, NUM_STAGES)
    mbarrier.wait(full.index(next_stage), next_phase, pred=more)
    scores = _start_scores_of_keys(own_k, q_tiles, next_stage, SCORES)
    grad_k = warpgroup_mma_wait(2, deps=(grad_k,))
    mbarrier.arrive(empty.index(stage), count=1)
    tma.store_wait(0)
    grad_q = warpgroup_mma_wait(1, deps=(grad_q,))
    grad_q_tile = grad_q_tiles.index(NUMBER + zero)
    grad_q_tile.store(_in_registers_order(grad_q))
    fence_async_shared()
    _async_add(grad_q_desc, [head_row + q_first * 2, 0], grad_q_tile)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return grad_k, grad_v, scores, totals, next_stage, next_phase, parity ^ 1


@gluon.jit
def _backward_consumer(
    results,
    buffers,
    call,
    NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    LEARNS: gl.constexpr,
):
    """Computes the gradients of keys and values [64 * NUMBER, 64 * NUMBER + 64) of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    kv_len = call.kv_len
    rows_len = call.rows_len
    scale = call.scale
    slopes = call.slopes
    grad_k_desc = results.grad_k_desc
    grad_v_desc = results.grad_v_desc
    total_ptr = results.total_ptr
    tiles = buffers.tiles
    barriers = buffers.barriers
    grad_q_tiles = buffers.grad_q_tiles
    slots = buffers.slots
    q_tiles = tiles.q_tiles
    k_tiles = tiles.k_tiles
    keys_full = barriers.keys_full
    keys_empty = barriers.keys_empty
    full = barriers.full
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    group = num_q_heads // num_kv_heads
    stage, phase, parity, count = 0, 0, 0, 0
    mbarrier.wait(keys_full.index(0), 0)
    while _announced(slots, count % 2) >= 0:
        k_number = count % 2
        grad_k = gl.zeros([64, 64], gl.float32, GRADS)
        grad_v = gl.zeros([64, 64], gl.float32, GRADS)
        # One query head of the group after another: their gradients accumulate in registers.
        for member in range(group):
            work_tile = _keys_of(_announced(slots, k_number), call, BLOCK_N)
            batch, kv_head, kv_first = work_tile.batch, work_tile.kv_head, work_tile.kv_first
            kv_idx = (kv_first + 64 * NUMBER + gl.arange(0, 64, layout=ROWS))[:, None]
            head = kv_head * group + member
            runs = _backward_visits(batch, head, kv_first, call, BLOCK_M, BLOCK_N)
            visits = runs.visits
            scalar_slopes = _at_1d_hopper(slopes, head)
            scalar_0 = scalar_slopes / scale
            qk_scale = 1.4426950408889634 * scale
            # The first row of this consumer's part of dq in the buffer of sums, whose rows have 32.
            head_row = (batch * num_q_heads + head) * rows_len * 2
            keys = _Keys(head_row, k_number, kv_idx, scalar_0, qk_scale)
            zeros = _lane_sums(gl.zeros([64, BLOCK_M], gl.float32, SCORES))
            totals = (zeros,)
            mbarrier.wait(full.index(stage), phase, pred=visits > 0)
            k = k_tiles.index(k_number + _unknown_zero()).reshape([BLOCK_N, 64])
            own_k = k.slice(64 * NUMBER, 64)
            following = _start_scores_of_keys(own_k, q_tiles, stage, SCORES)
            scores = warpgroup_mma_wait(0, deps=(following,))
            for visit in range(visits):
                tile, masked = _query_tile(visit, runs, call, kv_first, BLOCK_N)
                grad_k, grad_v, scores, totals, stage, phase, parity = _backward_step(
                    grad_k,
                    grad_v,
                    scores,
                    totals,
                    stage,
                    phase,
                    parity,
                    tile,
                    visit + 1 < visits,
                    masked,
                    head,
                    keys,
                    results,
                    buffers,
                    call,
                    work_tile,
                    NUMBER,
                    BLOCK_M,
                    BLOCK_N,
                    NUM_STAGES,
                    LEARNS,
                )
            if LEARNS:
                # Each key of a head has its own sum.
                offs_n = kv_first + 64 * NUMBER + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
                sums_first = (batch * num_q_heads + head).to(gl.int64) * kv_len
                total = gl.sum(gl.sum(totals[0], 2), 1)
                total = gl.convert_layout(total, offs_n.type.layout, assert_trivial=True)
                gl.store(total_ptr + sums_first + offs_n, total, mask=offs_n < kv_len)
        work_tile = _keys_of(_announced(slots, k_number), call, BLOCK_N)
        mbarrier.arrive(keys_empty.index(k_number), count=1)
        # Gradients are stored through this consumer's dq buffer: the next keys are arriving.
        place = [work_tile.batch, work_tile.kv_head, work_tile.kv_first + 64 * NUMBER, 0]
        leaving = _reinterpret(
            grad_q_tiles.index(NUMBER), gl.bfloat16, [2, 1, 1, 64, 64], grad_k_desc.layout
        )
        tma.store_wait(0)
        leaving.index(0).reshape([64, 64]).store(grad_v.to(gl.bfloat16))
        fence_async_shared()
        _async_store(grad_v_desc, place, leaving.index(0))
        leaving.index(1).reshape([64, 64]).store((grad_k * scale).to(gl.bfloat16))
        fence_async_shared()
        _async_store(grad_k_desc, place, leaving.index(1))
        count += 1
        mbarrier.wait(keys_full.index(count % 2), count // 2 % 2)
    tma.store_wait(0)


# Lengths, head counts and the mask's parameters never cause a recompile.
@gluon.jit(
    do_not_specialize=[
        "num_q_heads",
        "num_kv_heads",
        "q_len",
        "kv_len",
        "rows_len",
        "num_tiles",
        "left",
        "slopes_size_0",
    ]
)
def _backward_hopper(
    q_desc,
    k_desc,
    v_desc,
    grad_out_desc,
    rows_desc,
    grad_q_desc,
    grad_k_desc,
    grad_v_desc,
    total_ptr,
    counter_ptr,
    num_q_heads,
    num_kv_heads,
    q_len,
    kv_len,
    rows_len,
    num_tiles,
    scale,
    left,
    slopes_ptr,
    slopes_size_0,
    slopes_stride_0,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    LEARNS: gl.constexpr,
):
    """One program: gradients of tiles of BLOCK_N keys and values, and their contributions to dq.

    Descriptors of q and grad_out are of (batch, heads, rows, columns) with tiles of BLOCK_M rows,
    of k and v with BLOCK_N, of their gradients with 64. counter_ptr: how many of num_tiles were
    handed out, 0 at first. rows comes from `_backward_rows`, (2, batch * num_q_heads, rows_len);
    grad_q is a buffer of zeros for sums, which `_place_sums` reads.
    Without LEARNS nothing is computed, or written, for learned tensors.
    Sums for learned tensors of a head or a key are (batch, num_q_heads, kv_len).
    """
    slopes = (slopes_ptr, slopes_size_0, slopes_stride_0)
    call = _BackwardCall(num_q_heads, num_kv_heads, q_len, kv_len, rows_len, scale, left, slopes)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_M, 64], q_desc.layout)
    grad_out_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_M, 64], grad_out_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, BLOCK_N, 64], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, BLOCK_N, 64], v_desc.layout)
    SCORES_T: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], gl.bfloat16)
    ds_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, BLOCK_M], SCORES_T)
    grad_q_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], grad_q_desc.layout)
    rows_tiles = gl.allocate_shared_memory(
        gl.float32, [2 * NUM_STAGES, 1, 1, BLOCK_M], rows_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    keys_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(keys_full.index(i), count=1)
        mbarrier.init(keys_empty.index(i), count=2)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)

    tiles = _BackwardTiles(q_tiles, grad_out_tiles, k_tiles, v_tiles, rows_tiles)
    barriers = _BackwardBarriers(keys_full, keys_empty, full, empty)
    buffers = _BackwardBuffers(tiles, barriers, ds_tiles, grad_q_tiles, slots)
    sources = _BackwardSources(
        q_desc, grad_out_desc, k_desc, v_desc, rows_desc, counter_ptr, num_tiles
    )
    results = _BackwardResults(grad_q_desc, grad_k_desc, grad_v_desc, total_ptr)
    gl.warp_specialize(
        [
            (
                _backward_consumer,
                (results, buffers, call, 0, BLOCK_M, BLOCK_N, NUM_STAGES, LEARNS),
            ),
            (
                _backward_consumer,
                (results, buffers, call, 1, BLOCK_M, BLOCK_N, NUM_STAGES, LEARNS),
            ),
            (_backward_producer, (sources, buffers, call, BLOCK_M, BLOCK_N, NUM_STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit
def _place(sums_ptr, grad_ptr, row, length, rows_len, scale, HEAD_DIM: tl.constexpr):
    """Stores sums of 64 rows in (batch, heads, length, HEAD_DIM); `row` counts rows_len a head."""
    offs_m = row % rows_len + tl.arange(0, 64)
    batch_head = (row // rows_len).to(tl.int64)
    places = tl.arange(0, 128)[:, None] * 32 + tl.arange(0, 32)[None, :]
    for part in tl.static_range(1):  # 64 columns each
        sums = tl.load(sums_ptr + 4096 * part + places)
        # A thread (of 8 x 4 in a warp) holds 8 groups of columns, 2 rows, 2 columns.
        tile = tl.reshape(sums, [4, 8, 4, 8, 2, 2]).permute(0, 4, 1, 3, 2, 5).reshape([64, 64])
        offs_d = 64 * part + tl.arange(0, 64)
        inside = (offs_m < length)[:, None]
        if 64 * (part + 1) > HEAD_DIM:
            inside &= (offs_d < HEAD_DIM)[None, :]
        ptrs = grad_ptr + (batch_head * length + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(ptrs, (tile * scale).to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["q_len", "rows_len"])
def _place_sums(sums_ptr, grad_q_ptr, q_len, rows_len, scale):
    """One program: 64 rows of one head's gradient of q, from the sums of `_backward_hopper`.

    grad_q (batch, num_q_heads, q_len, 56) is contiguous.
    """
    sums_ptr += tl.program_id(0).to(tl.int64) * 4096
    row = tl.program_id(0) * 64
    _place(sums_ptr, grad_q_ptr, row, q_len, rows_len, scale, 56)

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


@_aggregate
class _BackwardCall:
    """Values that are the same for the whole call."""

    num_q_heads: gl.tensor
    num_kv_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    rows_len: gl.tensor
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, num_q_heads, num_kv_heads, q_len, kv_len, rows_len, scale):
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.q_len = q_len
        self.kv_len = kv_len
        self.rows_len = rows_len
        self.scale = scale


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

    kv_idx: gl.tensor
    qk_scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, kv_idx, qk_scale):
        self.kv_idx = kv_idx
        self.qk_scale = qk_scale


@_aggregate
class _BackwardTiles:
    """Buffers of loaded tiles."""

    q_tiles: gl.shared_memory_descriptor
    grad_out_tiles: gl.shared_memory_descriptor
    k_tile: gl.shared_memory_descriptor
    v_tile: gl.shared_memory_descriptor
    rows_tiles: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q_tiles, grad_out_tiles, k_tile, v_tile, rows_tiles):
        self.q_tiles = q_tiles
        self.grad_out_tiles = grad_out_tiles
        self.k_tile = k_tile
        self.v_tile = v_tile
        self.rows_tiles = rows_tiles


@_aggregate
class _BackwardBarriers:
    """Arrays of barriers, one for each buffer."""

    keys_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys_full, full, empty):
        self.keys_full = keys_full
        self.full = full
        self.empty = empty


@_aggregate
class _BackwardBuffers:
    """Shared memory of producer and consumers."""

    tiles: _BackwardTiles
    barriers: _BackwardBarriers
    factors_tile: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, barriers, factors_tile):
        self.tiles = tiles
        self.barriers = barriers
        self.factors_tile = factors_tile


@_aggregate
class _BackwardSources:
    """The producer's sources."""

    q_desc: tma.tensor_descriptor
    grad_out_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    rows_desc: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, q_desc, grad_out_desc, k_desc, v_desc, rows_desc):
        self.q_desc = q_desc
        self.grad_out_desc = grad_out_desc
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.rows_desc = rows_desc


@_aggregate
class _BackwardResults:
    """The consumers' results."""

    grad_k_desc: tma.tensor_descriptor
    grad_v_desc: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, grad_k_desc, grad_v_desc):
        self.grad_k_desc = grad_k_desc
        self.grad_v_desc = grad_v_desc


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


@gluon.jit
def _meet():
    """Waits for the other consumer, at a hardware barrier; Triton uses the first ones itself."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.sync 10, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@_aggregate
class _RunsOfQueries:
    """The visited tiles of queries: their number, and where they are."""

    visits: gl.tensor
    masked_visits: gl.tensor
    before: gl.tensor
    unmasked: gl.tensor
    q_begin: gl.tensor

    @gluon.constexpr_function
    def __init__(self, visits, masked_visits, before, unmasked, q_begin):
        self.visits = visits
        self.masked_visits = masked_visits
        self.before = before
        self.unmasked = unmasked
        self.q_begin = q_begin


@gluon.jit
def _backward_visits(batch, head, kv_first, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The visits of a head's queries, from bounds; see `_query_tile`."""
    q_len = call.q_len
    kv_len = call.kv_len
    kv_last = min(kv_first + BLOCK_N, kv_len) - 1
    # Queries that see some of these keys, and that see all of them, derived from the mask.
    some_begin = max(0, kv_first + q_len - kv_len)
    some_end = q_len
    all_begin = max(0, kv_last + q_len - kv_len)
    all_end = q_len
    # The same in tiles.
    q_begin = some_begin // BLOCK_M
    q_end = gl.cdiv(some_end, BLOCK_M)
    full_begin = gl.cdiv(all_begin, BLOCK_M)
    full_end = all_end // BLOCK_M
    visits = q_end - q_begin
    before = min(max(full_begin - q_begin, 0), visits)
    unmasked = max(min(full_end - q_begin, visits) - before, 0)
    # Weights of keys past the end could overflow, and their products with dp be NaN.
    if kv_first + BLOCK_N > kv_len:
        unmasked = 0
    masked_visits = visits - unmasked
    return _RunsOfQueries(visits, masked_visits, before, unmasked, q_begin)


@gluon.jit
def _query_tile(visit, runs):
    """The tile of queries of a visit: masked tiles come first."""
    masked_visits = runs.masked_visits
    before = runs.before
    unmasked = runs.unmasked
    q_begin = runs.q_begin
    masked = visit + gl.where(visit < before, 0, unmasked)
    tile = gl.where(visit < masked_visits, masked, visit - masked_visits + before)
    return q_begin + tile


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
def _mask_scores(scores, q_first, head, keys, call, work_tile):
    """Scores of 64 keys with the queries from q_first on, -inf where a comparison hides them."""
    q_len = call.q_len
    kv_len = call.kv_len
    kv_idx = keys.kv_idx
    q_idx = _bitmask_columns(scores, q_first)
    kv_idx = _bitmask_rows(scores, kv_idx)
    bitmask = _at_least(q_idx + kv_len - q_len, kv_idx)
    return _apply_bitmask(scores, bitmask)


@gluon.jit
def _backward_scores(scores, q_first, head, keys, call, work_tile, masked):
    """Scores and mask, from 64 keys' products with the queries from q_first on."""
    # Only a tile that holds a hidden pair, or reaches past an end, evaluates the mask.
    if masked:
        scores = _mask_scores(scores, q_first, head, keys, call, work_tile)
    return scores


@gluon.jit
def _start_scores_of_keys(keys, q_tiles, stage, SCORES: gl.constexpr):
    """Starts k @ q.T, or v @ do.T, for a tile of queries."""
    BLOCK_M: gl.constexpr = SCORES.instr_shape[1]
    scores = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
    q = q_tiles.index(stage).reshape([BLOCK_M, keys.shape[1]])
    return warpgroup_mma(keys, q.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _backward_producer(
    sources,
    buffers,
    call,
    work_tile,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Loads the consumers' tiles."""
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    batch = work_tile.batch
    kv_head = work_tile.kv_head
    kv_first = work_tile.kv_first
    q_desc = sources.q_desc
    grad_out_desc = sources.grad_out_desc
    k_desc = sources.k_desc
    v_desc = sources.v_desc
    rows_desc = sources.rows_desc
    tiles = buffers.tiles
    barriers = buffers.barriers
    q_tiles = tiles.q_tiles
    grad_out_tiles = tiles.grad_out_tiles
    k_tile = tiles.k_tile
    v_tile = tiles.v_tile
    rows_tiles = tiles.rows_tiles
    keys_full = barriers.keys_full
    full = barriers.full
    empty = barriers.empty
    TILES: gl.constexpr = q_desc.block_type.nbytes + grad_out_desc.block_type.nbytes
    BYTES: gl.constexpr = TILES + 2 * rows_desc.block_type.nbytes
    mbarrier.expect(keys_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    place = [batch, kv_head, kv_first, 0]
    _async_load(k_desc, place, keys_full, k_tile.index(0))
    _async_load(v_desc, place, keys_full, v_tile.index(0))
    group = num_q_heads // num_kv_heads
    stage, phase = 0, 1  # a buffer is empty one phase before it is full
    for member in range(group):
        head = kv_head * group + member
        row = batch * num_q_heads + head
        runs = _backward_visits(batch, head, kv_first, call, BLOCK_M, BLOCK_N)
        for visit in range(runs.visits):
            tile = _query_tile(visit, runs)
            q_first = tile * BLOCK_M
            mbarrier.wait(empty.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES)
            place = [batch, head, q_first, 0]
            _async_load(q_desc, place, arrived, q_tiles.index(stage))
            _async_load(rows_desc, [0, row, q_first], arrived, rows_tiles.index(stage))
            _async_load(grad_out_desc, place, arrived, grad_out_tiles.index(stage))
            _async_load(rows_desc, [1, row, q_first], arrived, rows_tiles.index(NUM_STAGES + stage))
            stage, phase = _next_stage(stage, phase, NUM_STAGES)


@gluon.jit
def _wait_at(NUMBER: gl.constexpr):
    """Waits at a hardware barrier until the other consumer has arrived."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"bar.sync {NUMBER}, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _arrive_at(NUMBER: gl.constexpr):
    """Arrives at a hardware barrier where the other consumer waits, without waiting."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"bar.arrive {NUMBER}, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# The hardware barriers of the tile of factors: it has been written; it has been read.
WRITTEN: gl.constexpr = gl.constexpr(11)
READ: gl.constexpr = gl.constexpr(12)


@gluon.jit
def _values_step(
    grad_v,
    scores,
    stage,
    phase,
    tile,
    more,
    masked,
    head,
    keys,
    buffers,
    call,
    work_tile,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Adds a tile of queries' products to dv; computes the next tile's scores."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    qk_scale = keys.qk_scale
    tiles = buffers.tiles
    barriers = buffers.barriers
    factors_tile = buffers.factors_tile
    q_tiles = tiles.q_tiles
    grad_out_tiles = tiles.grad_out_tiles
    k_tile = tiles.k_tile
    rows_tiles = tiles.rows_tiles
    full = barriers.full
    empty = barriers.empty
    q_first = tile * BLOCK_M
    lse = rows_tiles.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    scores = _backward_scores(scores, q_first, head, keys, call, work_tile, masked)
    p = gl.exp2(scores * qk_scale - lse[None, :])
    weights = gl.convert_layout(p.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
    # In the order of registers, which saves shared memory.
    registers = p.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 3, 1, 5))
    _wait_at(READ)
    factors_tile.store(registers.reshape([128, 32]))
    _arrive_at(WRITTEN)
    grad_out = grad_out_tiles.index(stage).reshape([BLOCK_M, 256])
    grad_v = warpgroup_mma(weights, grad_out, grad_v, is_async=True)
    next_stage, next_phase = _next_stage(stage, phase, NUM_STAGES)
    mbarrier.wait(full.index(next_stage), next_phase, pred=more)
    k = k_tile.index(_unknown_zero()).reshape([BLOCK_N, 256])
    scores = _start_scores_of_keys(k, q_tiles, next_stage, SCORES)
    grad_v = warpgroup_mma_wait(1, deps=(grad_v,))
    mbarrier.arrive(empty.index(stage), count=1)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return grad_v, scores, next_stage, next_phase


@gluon.jit
def _values_consumer(
    results,
    buffers,
    call,
    work_tile,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Computes the gradient of a program's values."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    scale = call.scale
    batch = work_tile.batch
    kv_head = work_tile.kv_head
    kv_first = work_tile.kv_first
    grad_v_desc = results.grad_v_desc
    tiles = buffers.tiles
    barriers = buffers.barriers
    q_tiles = tiles.q_tiles
    k_tile = tiles.k_tile
    v_tile = tiles.v_tile
    keys_full = barriers.keys_full
    full = barriers.full
    grad_v = gl.zeros([64, 256], gl.float32, GRADS)
    k = k_tile.index(0).reshape([BLOCK_N, 256])
    kv_idx = (kv_first + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES)))[:, None]
    qk_scale = scale * 1.4426950408889634  # log2(e)
    group = num_q_heads // num_kv_heads
    stage, phase = 0, 0
    mbarrier.wait(keys_full, 0)
    # One query head of the group after another: their gradients accumulate in registers.
    for member in range(group):
        head = kv_head * group + member
        runs = _backward_visits(batch, head, kv_first, call, BLOCK_M, BLOCK_N)
        visits = runs.visits
        keys = _Keys(kv_idx, qk_scale)
        mbarrier.wait(full.index(stage), phase, pred=visits > 0)
        following = _start_scores_of_keys(k, q_tiles, stage, SCORES)
        scores = warpgroup_mma_wait(0, deps=(following,))
        masked_visits = runs.masked_visits
        for visit in range(masked_visits):
            tile = _query_tile(visit, runs)
            grad_v, scores, stage, phase = _values_step(
                grad_v,
                scores,
                stage,
                phase,
                tile,
                visit + 1 < visits,
                True,
                head,
                keys,
                buffers,
                call,
                work_tile,
                BLOCK_M,
                BLOCK_N,
                NUM_STAGES,
            )

        for visit in range(masked_visits, visits):
            tile = _query_tile(visit, runs)
            grad_v, scores, stage, phase = _values_step(
                grad_v,
                scores,
                stage,
                phase,
                tile,
                visit + 1 < visits,
                False,
                head,
                keys,
                buffers,
                call,
                work_tile,
                BLOCK_M,
                BLOCK_N,
                NUM_STAGES,
            )
    _wait_at(READ)  # matches the arrival of the last tile
    _meet()  # the other consumer has read the values: their buffer takes their gradient
    v_tile.index(0).reshape([BLOCK_N, 256]).store(grad_v.to(gl.bfloat16))
    fence_async_shared()
    place = [batch, kv_head, kv_first, 0]
    _async_store(grad_v_desc, place, v_tile.index(0))
    tma.store_wait(0)


@gluon.jit
def _keys_step(
    grad_k,
    dp,
    stage,
    phase,
    more,
    buffers,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Adds a tile of queries' products to dk; computes the next tile's dp."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    # A thread has a row of the factors, in the order of its registers.
    FACTORS: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0])
    tiles = buffers.tiles
    barriers = buffers.barriers
    factors_tile = buffers.factors_tile
    q_tiles = tiles.q_tiles
    grad_out_tiles = tiles.grad_out_tiles
    v_tile = tiles.v_tile
    rows_tiles = tiles.rows_tiles
    full = barriers.full
    empty = barriers.empty
    delta = rows_tiles.index(NUM_STAGES + stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, SCORES))
    _wait_at(WRITTEN)
    registers = factors_tile.load(FACTORS).reshape([4, 8, 4, 8, 2, 2])
    _arrive_at(READ)
    factors = registers.permute((0, 4, 1, 3, 2, 5)).reshape([64, BLOCK_M])
    factors = gl.convert_layout(factors, SCORES, assert_trivial=True)
    ds = (factors * (dp - delta[None, :])).to(gl.bfloat16)
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, GRADS, 2), assert_trivial=True)
    q = q_tiles.index(stage).reshape([BLOCK_M, 256])
    grad_k = warpgroup_mma(ds, q, grad_k, is_async=True)
    next_stage, next_phase = _next_stage(stage, phase, NUM_STAGES)
    mbarrier.wait(full.index(next_stage), next_phase, pred=more)
    v = v_tile.index(_unknown_zero()).reshape([BLOCK_N, 256])
    dp = _start_scores_of_keys(v, grad_out_tiles, next_stage, SCORES)
    grad_k = warpgroup_mma_wait(1, deps=(grad_k,))
    mbarrier.arrive(empty.index(stage), count=1)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return grad_k, dp, next_stage, next_phase


@gluon.jit
def _keys_consumer(
    results,
    buffers,
    call,
    work_tile,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Computes the gradient of a program's keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    scale = call.scale
    batch = work_tile.batch
    kv_head = work_tile.kv_head
    kv_first = work_tile.kv_first
    grad_k_desc = results.grad_k_desc
    tiles = buffers.tiles
    barriers = buffers.barriers
    grad_out_tiles = tiles.grad_out_tiles
    k_tile = tiles.k_tile
    v_tile = tiles.v_tile
    keys_full = barriers.keys_full
    full = barriers.full
    grad_k = gl.zeros([64, 256], gl.float32, GRADS)
    v = v_tile.index(0).reshape([BLOCK_N, 256])
    group = num_q_heads // num_kv_heads
    stage, phase = 0, 0
    _arrive_at(READ)  # no factors are waiting to be read yet
    mbarrier.wait(keys_full, 0)
    for member in range(group):
        head = kv_head * group + member
        runs = _backward_visits(batch, head, kv_first, call, BLOCK_M, BLOCK_N)
        visits = runs.visits
        mbarrier.wait(full.index(stage), phase, pred=visits > 0)
        following = _start_scores_of_keys(v, grad_out_tiles, stage, SCORES)
        dp = warpgroup_mma_wait(0, deps=(following,))
        for visit in range(visits):
            grad_k, dp, stage, phase = _keys_step(
                grad_k, dp, stage, phase, visit + 1 < visits, buffers, BLOCK_M, BLOCK_N, NUM_STAGES
            )
    _meet()  # the other consumer has read the keys: their buffer takes their gradient
    k_tile.index(0).reshape([BLOCK_N, 256]).store((grad_k * scale).to(gl.bfloat16))
    fence_async_shared()
    place = [batch, kv_head, kv_first, 0]
    _async_store(grad_k_desc, place, k_tile.index(0))
    tma.store_wait(0)


# Lengths, head counts and the mask's parameters never cause a recompile.
@gluon.jit(do_not_specialize=["num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len"])
def _backward_hopper(
    q_desc,
    k_desc,
    v_desc,
    grad_out_desc,
    rows_desc,
    grad_k_desc,
    grad_v_desc,
    num_q_heads,
    num_kv_heads,
    q_len,
    kv_len,
    rows_len,
    scale,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """One program: the gradients of BLOCK_N keys and values of one head.

    Descriptors of q and grad_out are of (batch, heads, rows, columns) with tiles of BLOCK_M rows,
    of k and v with BLOCK_N, of their gradients with 64. rows comes from `_backward_rows`, (2,
    batch * num_q_heads, rows_len).
    """
    num_tiles_n = gl.cdiv(kv_len, BLOCK_N)
    # Tiles of one head run side by side: they share queries in L2. Those with most work come first.
    batch_head = gl.program_id(0) // num_tiles_n
    tile_n = gl.program_id(0) % num_tiles_n
    work_tile = _KeysWorkTile(
        batch_head // num_kv_heads, batch_head % num_kv_heads, tile_n * BLOCK_N
    )
    call = _BackwardCall(num_q_heads, num_kv_heads, q_len, kv_len, rows_len, scale)
    q_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_M, 256], q_desc.layout
    )
    grad_out_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_M, 256], grad_out_desc.layout
    )
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, BLOCK_N, 256], k_desc.layout)
    v_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, BLOCK_N, 256], v_desc.layout)
    FACTORS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 32], gl.float32)
    factors_tile = gl.allocate_shared_memory(gl.float32, [128, 32], FACTORS)
    rows_tiles = gl.allocate_shared_memory(
        gl.float32, [2 * NUM_STAGES, 1, 1, BLOCK_M], rows_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    mbarrier.init(keys_full, count=1)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)

    tiles = _BackwardTiles(q_tiles, grad_out_tiles, k_tile, v_tile, rows_tiles)
    barriers = _BackwardBarriers(keys_full, full, empty)
    buffers = _BackwardBuffers(tiles, barriers, factors_tile)
    sources = _BackwardSources(q_desc, grad_out_desc, k_desc, v_desc, rows_desc)
    results = _BackwardResults(grad_k_desc, grad_v_desc)
    gl.warp_specialize(
        [
            (_values_consumer, (results, buffers, call, work_tile, BLOCK_M, BLOCK_N, NUM_STAGES)),
            (_keys_consumer, (results, buffers, call, work_tile, BLOCK_M, BLOCK_N, NUM_STAGES)),
            (_backward_producer, (sources, buffers, call, work_tile, BLOCK_M, BLOCK_N, NUM_STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@_aggregate
class _QueriesCall:
    """Values that are the same for the whole call."""

    num_q_heads: gl.tensor
    num_kv_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    rows_len: gl.tensor
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, num_q_heads, num_kv_heads, q_len, kv_len, rows_len, scale):
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.q_len = q_len
        self.kv_len = kv_len
        self.rows_len = rows_len
        self.scale = scale


@_aggregate
class _QueriesWorkTile:
    """A tile of queries of one head."""

    batch: gl.tensor
    head: gl.tensor
    q_first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, q_first):
        self.batch = batch
        self.head = head
        self.q_first = q_first


@_aggregate
class _Rows:
    """Values that a consumer computes once for its queries."""

    lse: gl.tensor
    delta: gl.tensor
    qk_scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lse, delta, qk_scale):
        self.lse = lse
        self.delta = delta
        self.qk_scale = qk_scale


@_aggregate
class _QueriesTiles:
    """Buffers of loaded tiles."""

    q_tile: gl.shared_memory_descriptor
    grad_out_tile: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q_tile, grad_out_tile, k_tiles, v_tiles):
        self.q_tile = q_tile
        self.grad_out_tile = grad_out_tile
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles


@_aggregate
class _QueriesBarriers:
    """Arrays of barriers, one for each buffer."""

    queries_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries_full, k_full, k_empty, v_full, v_empty):
        self.queries_full = queries_full
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty


@_aggregate
class _QueriesBuffers:
    """Shared memory of producer and consumers."""

    tiles: _QueriesTiles
    barriers: _QueriesBarriers

    @gluon.constexpr_function
    def __init__(self, tiles, barriers):
        self.tiles = tiles
        self.barriers = barriers


@_aggregate
class _QueriesSources:
    """The producer's sources."""

    q_desc: tma.tensor_descriptor
    grad_out_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, q_desc, grad_out_desc, k_desc, v_desc):
        self.q_desc = q_desc
        self.grad_out_desc = grad_out_desc
        self.k_desc = k_desc
        self.v_desc = v_desc


@_aggregate
class _RunsOfKeys:
    """The visited tiles of keys: their number, and where they are."""

    visits: gl.tensor
    masked_visits: gl.tensor
    unmasked: gl.tensor

    @gluon.constexpr_function
    def __init__(self, visits, masked_visits, unmasked):
        self.visits = visits
        self.masked_visits = masked_visits
        self.unmasked = unmasked


@gluon.jit
def _visits_of_queries(batch, head, q_first, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The visits of a head's keys, from bounds; see `_tile_of_keys`."""
    q_len = call.q_len
    kv_len = call.kv_len
    q_last = min(q_first + BLOCK_M, q_len) - 1
    # Keys that some of these queries see, and keys that all of them see, derived from the mask.
    some_end = max(0, q_last + kv_len - q_len + 1)
    all_end = max(0, q_first + kv_len - q_len + 1)
    # The same in tiles.
    kv_end = gl.cdiv(some_end, BLOCK_N)
    full_end = all_end // BLOCK_N
    visits = kv_end
    unmasked = max(min(full_end, visits), 0)
    masked_visits = visits - unmasked
    return _RunsOfKeys(visits, masked_visits, unmasked)


@gluon.jit
def _tile_of_keys(visit, runs):
    """The tile of keys of a visit: masked tiles come first."""
    masked_visits = runs.masked_visits
    unmasked = runs.unmasked
    masked = visit + gl.where(visit < 0, 0, unmasked)
    tile = gl.where(visit < masked_visits, masked, visit - masked_visits)
    return tile


@gluon.jit
def _mask_scores_of_queries(scores, start_n, rows, call, work_tile):
    """Scores of 64 queries with the keys from start_n on, -inf where a comparison hides them."""
    q_len = call.q_len
    kv_len = call.kv_len
    q_first = work_tile.q_first
    q_idx = (q_first + gl.arange(0, 64, layout=gl.SliceLayout(1, scores.type.layout)))[:, None]
    kv_idx = _bitmask_columns(scores, start_n)
    q_idx = _bitmask_rows(scores, q_idx)
    bitmask = _below(kv_idx - 1, q_idx + kv_len - q_len)
    return _apply_bitmask(scores, bitmask)


@gluon.jit
def _scores_of_queries(scores, start_n, rows, call, work_tile, masked):
    """Scores and mask, from 64 queries' products with the keys from start_n on."""
    # Only a tile that holds a hidden pair, or reaches past an end, evaluates the mask.
    if masked:
        scores = _mask_scores_of_queries(scores, start_n, rows, call, work_tile)
    return scores


@gluon.jit
def _queries_producer(
    sources,
    buffers,
    call,
    work_tile,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Loads the consumers' tiles: queries once, keys and values for each visit."""
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    batch = work_tile.batch
    head = work_tile.head
    q_first = work_tile.q_first
    q_desc = sources.q_desc
    grad_out_desc = sources.grad_out_desc
    k_desc = sources.k_desc
    v_desc = sources.v_desc
    tiles = buffers.tiles
    barriers = buffers.barriers
    q_tile = tiles.q_tile
    grad_out_tile = tiles.grad_out_tile
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    queries_full = barriers.queries_full
    k_full = barriers.k_full
    k_empty = barriers.k_empty
    v_full = barriers.v_full
    v_empty = barriers.v_empty
    mbarrier.expect(queries_full, q_desc.block_type.nbytes + grad_out_desc.block_type.nbytes)
    place = [batch, head, q_first, 0]
    _async_load(q_desc, place, queries_full, q_tile.index(0))
    _async_load(grad_out_desc, place, queries_full, grad_out_tile.index(0))
    kv_head = head // (num_q_heads // num_kv_heads)
    runs = _visits_of_queries(batch, head, q_first, call, BLOCK_M, BLOCK_N)
    k_stage, v_stage = 0, 0
    k_phase, v_phase = 1, 1  # a buffer is empty one phase before it is full
    for visit in range(runs.visits):
        tile = _tile_of_keys(visit, runs)
        place = [batch, kv_head, tile * BLOCK_N, 0]
        mbarrier.wait(k_empty.index(k_stage), k_phase)
        arrived = k_full.index(k_stage)
        mbarrier.expect(arrived, k_desc.block_type.nbytes)
        _async_load(k_desc, place, arrived, k_tiles.index(k_stage))
        mbarrier.wait(v_empty.index(v_stage), v_phase)
        arrived = v_full.index(v_stage)
        mbarrier.expect(arrived, v_desc.block_type.nbytes)
        _async_load(v_desc, place, arrived, v_tiles.index(v_stage))
        k_stage, k_phase = _next_stage(k_stage, k_phase, K_STAGES)
        v_stage, v_phase = _next_stage(v_stage, v_phase, V_STAGES)


@gluon.jit
def _start_scores_of_queries(q, k_tiles, stage, SCORES: gl.constexpr):
    """Starts q @ k.T, or do @ v.T, for a tile of keys."""
    BLOCK_N: gl.constexpr = SCORES.instr_shape[1]
    scores = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    k = k_tiles.index(stage).reshape([BLOCK_N, q.shape[1]])
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _queries_step(
    grad_q,
    scores,
    k_stage,
    k_phase,
    v_stage,
    v_phase,
    tile,
    more,
    masked,
    rows,
    buffers,
    call,
    work_tile,
    NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Adds a tile of keys' products to dq; computes the next tile's scores."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    lse = rows.lse
    delta = rows.delta
    qk_scale = rows.qk_scale
    tiles = buffers.tiles
    barriers = buffers.barriers
    q_tile = tiles.q_tile
    grad_out_tile = tiles.grad_out_tile
    k_tiles = tiles.k_tiles
    v_tiles = tiles.v_tiles
    k_full = barriers.k_full
    k_empty = barriers.k_empty
    v_full = barriers.v_full
    v_empty = barriers.v_empty
    zero = _unknown_zero()
    q = q_tile.index(zero).reshape([BLOCK_M, 256]).slice(64 * NUMBER, 64)
    grad_out = grad_out_tile.index(zero).reshape([BLOCK_M, 256]).slice(64 * NUMBER, 64)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    dp = _start_scores_of_queries(grad_out, v_tiles, v_stage, SCORES)
    scores = _scores_of_queries(scores, tile * BLOCK_N, rows, call, work_tile, masked)
    p = gl.exp2(scores * qk_scale - lse[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    ds = (p * (dp - delta[:, None])).to(gl.bfloat16)
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, GRADS, 2), assert_trivial=True)
    k = k_tiles.index(k_stage).reshape([BLOCK_N, 256])
    grad_q = warpgroup_mma(ds, k, grad_q, is_async=True)
    next_stage, next_phase = _next_stage(k_stage, k_phase, K_STAGES)
    mbarrier.wait(k_full.index(next_stage), next_phase, pred=more)
    scores = _start_scores_of_queries(q, k_tiles, next_stage, SCORES)
    grad_q = warpgroup_mma_wait(1, deps=(grad_q,))
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    v_stage, v_phase = _next_stage(v_stage, v_phase, V_STAGES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return grad_q, scores, next_stage, next_phase, v_stage, v_phase


@gluon.jit
def _queries_consumer(
    grad_q_desc,
    rows_ptr,
    buffers,
    call,
    work_tile,
    NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Computes the gradient of a program's queries [64 * NUMBER, 64 * NUMBER + 64)."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    num_q_heads = call.num_q_heads
    rows_len = call.rows_len
    scale = call.scale
    batch = work_tile.batch
    head = work_tile.head
    q_first = work_tile.q_first
    tiles = buffers.tiles
    barriers = buffers.barriers
    q_tile = tiles.q_tile
    k_tiles = tiles.k_tiles
    queries_full = barriers.queries_full
    k_full = barriers.k_full
    runs = _visits_of_queries(batch, head, q_first, call, BLOCK_M, BLOCK_N)
    visits = runs.visits
    own_q = q_tile.index(0).reshape([BLOCK_M, 256]).slice(64 * NUMBER, 64)
    grad_q = gl.zeros([64, 256], gl.float32, GRADS)
    q_first += 64 * NUMBER
    own = _QueriesWorkTile(batch, head, q_first)
    offs_m = q_first + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    # rows is padded to whole tiles of queries.
    row = (batch * num_q_heads + head).to(gl.int64) * rows_len
    lse = gl.load(rows_ptr + row + offs_m)
    num_rows = gl.num_programs(0).to(gl.int64) * BLOCK_M
    delta = gl.load(rows_ptr + num_rows + row + offs_m)
    qk_scale = scale * 1.4426950408889634  # log2(e)
    rows = _Rows(lse, delta, qk_scale)
    k_stage, k_phase, v_stage, v_phase = 0, 0, 0, 0
    mbarrier.wait(queries_full, 0)
    mbarrier.wait(k_full.index(0), 0, pred=visits > 0)
    following = _start_scores_of_queries(own_q, k_tiles, 0, SCORES)
    scores = warpgroup_mma_wait(0, deps=(following,))
    masked_visits = runs.masked_visits
    for visit in range(masked_visits):
        tile = _tile_of_keys(visit, runs)
        grad_q, scores, k_stage, k_phase, v_stage, v_phase = _queries_step(
            grad_q,
            scores,
            k_stage,
            k_phase,
            v_stage,
            v_phase,
            tile,
            visit + 1 < visits,
            True,
            rows,
            buffers,
            call,
            own,
            NUMBER,
            BLOCK_M,
            BLOCK_N,
            K_STAGES,
            V_STAGES,
        )

    for visit in range(masked_visits, visits):
        tile = _tile_of_keys(visit, runs)
        grad_q, scores, k_stage, k_phase, v_stage, v_phase = _queries_step(
            grad_q,
            scores,
            k_stage,
            k_phase,
            v_stage,
            v_phase,
            tile,
            visit + 1 < visits,
            False,
            rows,
            buffers,
            call,
            own,
            NUMBER,
            BLOCK_M,
            BLOCK_N,
            K_STAGES,
            V_STAGES,
        )
    # The gradient is stored through its queries' buffer.
    own_q.store((grad_q * scale).to(gl.bfloat16))
    fence_async_shared()
    grad_q_tile = q_tile.index(0).slice(64 * NUMBER, 64, 2)
    _async_store(grad_q_desc, [batch, head, q_first, 0], grad_q_tile)
    tma.store_wait(0)


# Lengths, head counts and the mask's parameters never cause a recompile.
@gluon.jit(do_not_specialize=["num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len"])
def _backward_queries_hopper(
    q_desc,
    k_desc,
    v_desc,
    grad_out_desc,
    grad_q_desc,
    rows_ptr,
    num_q_heads,
    num_kv_heads,
    q_len,
    kv_len,
    rows_len,
    scale,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """One program: the gradient of BLOCK_M queries of one head.

    Descriptors of q and grad_out are of (batch, heads, rows, columns) with tiles of BLOCK_M rows,
    of k and v with BLOCK_N, and of grad_q with 64. rows comes from `_backward_rows`, (2, batch *
    num_q_heads, rows_len), with rows_len a multiple of BLOCK_M.
    """
    num_tiles_m = rows_len // BLOCK_M
    # Tiles of one head run side by side: they share keys in L2. Those with most work come first.
    batch_head = gl.program_id(0) // num_tiles_m
    tile_m = num_tiles_m - 1 - gl.program_id(0) % num_tiles_m
    work_tile = _QueriesWorkTile(
        batch_head // num_q_heads, batch_head % num_q_heads, tile_m * BLOCK_M
    )
    call = _QueriesCall(num_q_heads, num_kv_heads, q_len, kv_len, rows_len, scale)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, BLOCK_M, 256], q_desc.layout)
    grad_out_tile = gl.allocate_shared_memory(
        gl.bfloat16, [1, 1, 1, BLOCK_M, 256], grad_out_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [K_STAGES, 1, 1, BLOCK_N, 256], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES, 1, 1, BLOCK_N, 256], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    mbarrier.init(queries_full, count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)

    tiles = _QueriesTiles(q_tile, grad_out_tile, k_tiles, v_tiles)
    barriers = _QueriesBarriers(queries_full, k_full, k_empty, v_full, v_empty)
    buffers = _QueriesBuffers(tiles, barriers)
    sources = _QueriesSources(q_desc, grad_out_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (
                _queries_consumer,
                (
                    grad_q_desc,
                    rows_ptr,
                    buffers,
                    call,
                    work_tile,
                    0,
                    BLOCK_M,
                    BLOCK_N,
                    K_STAGES,
                    V_STAGES,
                ),
            ),
            (
                _queries_consumer,
                (
                    grad_q_desc,
                    rows_ptr,
                    buffers,
                    call,
                    work_tile,
                    1,
                    BLOCK_M,
                    BLOCK_N,
                    K_STAGES,
                    V_STAGES,
                ),
            ),
            (
                _queries_producer,
                (sources, buffers, call, work_tile, BLOCK_M, BLOCK_N, K_STAGES, V_STAGES),
            ),
        ],
        [4, 1],
        [240, 24],
    )

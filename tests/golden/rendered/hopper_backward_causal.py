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


@_aggregate
class _BackwardCall:
    """Values that are the same for the whole call."""

    num_q_heads: gl.tensor
    num_kv_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    rows_len: gl.tensor
    scale: gl.tensor
    heads_together: gl.tensor
    num_whole: gl.tensor
    num_parts: gl.tensor
    parts_together: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        num_q_heads,
        num_kv_heads,
        q_len,
        kv_len,
        rows_len,
        scale,
        heads_together,
        num_whole,
        num_parts,
        parts_together,
    ):
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.q_len = q_len
        self.kv_len = kv_len
        self.rows_len = rows_len
        self.scale = scale
        self.heads_together = heads_together
        self.num_whole = num_whole
        self.num_parts = num_parts
        self.parts_together = parts_together


@_aggregate
class _KeysWorkTile:
    """A tile of keys of one head."""

    batch: gl.tensor
    kv_head: gl.tensor
    kv_first: gl.tensor
    part: gl.tensor
    num_parts: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, kv_first, part, num_parts):
        self.batch = batch
        self.kv_head = kv_head
        self.kv_first = kv_first
        self.part = part
        self.num_parts = num_parts


@_aggregate
class _Keys:
    """Values that a consumer computes once for its keys, or once a head."""

    head_row: gl.tensor
    k_number: gl.tensor
    kv_idx: gl.tensor
    qk_scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, head_row, k_number, kv_idx, qk_scale):
        self.head_row = head_row
        self.k_number = k_number
        self.kv_idx = kv_idx
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
    grad_out_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys_full, keys_empty, full, empty, grad_out_full):
        self.keys_full = keys_full
        self.keys_empty = keys_empty
        self.full = full
        self.empty = empty
        self.grad_out_full = grad_out_full


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
    parts_desc: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, grad_q_desc, grad_k_desc, grad_v_desc, parts_desc):
        self.grad_q_desc = grad_q_desc
        self.grad_k_desc = grad_k_desc
        self.grad_v_desc = grad_v_desc
        self.parts_desc = parts_desc


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
    some_begin = kv_first
    some_end = q_len
    all_begin = kv_last
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
    kv_idx = keys.kv_idx
    q_idx = _bitmask_columns(scores, q_first)
    kv_idx = _bitmask_rows(scores, kv_idx)
    bitmask = _at_least(q_idx, kv_idx)
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
def _members(work_tile, group, DIVIDED: gl.constexpr):
    """The first query head of a part in its group, and the head after its last."""
    if not DIVIDED:
        return 0, group
    part, num_parts = work_tile.part, work_tile.num_parts
    return group * part // num_parts, group * (part + 1) // num_parts


@gluon.jit
def _store_part(parts_desc, row, grad, tile):
    """Stores a part's gradient of 64 keys or values, 64 columns at a time."""
    WIDTH: gl.constexpr = grad.shape[1]
    if WIDTH == 128:
        halves = grad.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        _store_part(parts_desc, row, halves[0], tile)
        _store_part(parts_desc, row + 128, halves[1], tile)
    else:
        tma.store_wait(0)
        tile.store(_in_registers_order(grad))
        fence_async_shared()
        _async_store(parts_desc, [row, 0], tile)


@gluon.jit
def _keys_of(index, call, BLOCK_N: gl.constexpr, DIVIDED: gl.constexpr):
    """The tile of keys, or the part of one, of this index, in the order of computation."""
    num_kv_heads = call.num_kv_heads
    kv_len = call.kv_len
    heads_together = call.heads_together
    num_whole = call.num_whole
    num_parts = call.num_parts
    parts_together = call.parts_together
    num_tiles_n = gl.cdiv(kv_len, BLOCK_N)
    # Heads come in groups whose queries L2 holds, and in a group the longest tiles first.
    first, parts, together = 0, 1, heads_together
    if DIVIDED:
        # Tiles of the last heads are divided: their parts keep programs busy to the end.
        whole_tiles = num_whole * num_tiles_n
        divided = index >= whole_tiles
        first = gl.where(divided, num_whole, 0)
        parts = gl.where(divided, num_parts, 1)
        together = gl.where(divided, parts_together, heads_together)
        index -= gl.where(divided, whole_tiles, 0)
    group = index // (together * num_tiles_n)
    within = index % (together * num_tiles_n)
    tile_n = within // together
    batch_head = group * together + within % together
    part = batch_head % parts
    batch_head = first + batch_head // parts
    return _KeysWorkTile(
        batch_head // num_kv_heads, batch_head % num_kv_heads, tile_n * BLOCK_N, part, parts
    )


@gluon.jit
def _load_values(v_desc, place, arrived, v_tiles, free, phase):
    """Loads values once the previous ones are no longer read: `free` completes that phase."""
    mbarrier.wait(free, phase)
    _async_load(v_desc, place, arrived, v_tiles.index(0))


@gluon.jit
def _backward_producer(
    sources,
    buffers,
    call,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DIVIDED: gl.constexpr,
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
    grad_out_full = barriers.grad_out_full
    BYTES: gl.constexpr = q_desc.block_type.nbytes + rows_desc.block_type.nbytes
    GRAD_OUT_BYTES: gl.constexpr = grad_out_desc.block_type.nbytes + rows_desc.block_type.nbytes
    group = num_q_heads // num_kv_heads
    stage, phase = 0, 1  # a buffer is empty one phase before it is full
    last_stage, last_phase = 0, 1  # the buffer of the last visit, and the phase that frees it
    index, count = gl.program_id(0), 0
    while index < num_tiles:
        work_tile = _keys_of(index, call, BLOCK_N, DIVIDED)
        batch, kv_head, kv_first = work_tile.batch, work_tile.kv_head, work_tile.kv_first
        number = count % 2
        keys_arrived = keys_full.index(number)
        mbarrier.wait(keys_empty.index(number), count // 2 % 2 ^ 1)
        _announce(index, slots, number)
        mbarrier.expect(keys_arrived, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        keys_place = [batch, kv_head, kv_first, 0]
        _async_load(k_desc, keys_place, keys_arrived, k_tiles.index(number))
        # Values have one buffer, free after the previous tile's last visit: queries come first.
        free, free_phase, due = empty.index(last_stage), last_phase, True
        first_member, end_of_members = _members(work_tile, group, DIVIDED)
        for member in range(first_member, end_of_members):
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
                arrived = grad_out_full.index(stage)
                mbarrier.expect(arrived, GRAD_OUT_BYTES)
                _async_load(grad_out_desc, place, arrived, grad_out_tiles.index(stage))
                _async_load(
                    rows_desc, [1, row, q_first], arrived, rows_tiles.index(NUM_STAGES + stage)
                )
                last_stage, last_phase = stage, phase ^ 1
                stage, phase = _next_stage(stage, phase, NUM_STAGES)
                if due:
                    _load_values(v_desc, keys_place, keys_arrived, v_tiles, free, free_phase)
                    due = False
        if due:  # not read by a visit, but consumers and the next load wait for these values
            _load_values(v_desc, keys_place, keys_arrived, v_tiles, free, free_phase)
            mbarrier.wait(keys_arrived, count // 2 % 2)
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
):
    """Adds a tile of queries' products to the gradients; computes the next tile's scores."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
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
    grad_out_full = barriers.grad_out_full
    zero = _unknown_zero()
    k = k_tiles.index(k_number + zero).reshape([BLOCK_N, 128])
    v = v_tiles.index(zero).reshape([BLOCK_N, 128])
    own_k, own_v = k.slice(64 * NUMBER, 64), v.slice(64 * NUMBER, 64)
    q_first = tile * BLOCK_M
    mbarrier.wait(grad_out_full.index(stage), phase)
    dp = _start_scores_of_keys(own_v, grad_out_tiles, stage, SCORES)
    lse = rows_tiles.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    scores = _backward_scores(scores, q_first, head, keys, call, work_tile, masked)
    p = gl.exp2(scores * qk_scale - lse[None, :])
    weights = gl.convert_layout(p.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
    delta = rows_tiles.index(NUM_STAGES + stage).reshape([BLOCK_M]).load(COLUMNS)
    grad_out = grad_out_tiles.index(stage).reshape([BLOCK_M, 128])
    grad_v = warpgroup_mma(weights, grad_out, grad_v, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = (p * (dp - delta[None, :])).to(gl.bfloat16)
    of_scores = gl.convert_layout(ds, WEIGHTS, assert_trivial=True)
    q = q_tiles.index(stage).reshape([BLOCK_M, 128])
    grad_k = warpgroup_mma(of_scores, q, grad_k, is_async=True)
    # There are two buffers of ds: neither is written while the other consumer reads it.
    ds_tile = ds_tiles.index(parity)
    ds_tile.slice(64 * NUMBER, 64).store(ds)
    fence_async_shared()
    _meet()
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
    _async_add(grad_q_desc, [head_row + q_first * 4, 0], grad_q_tile)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return grad_k, grad_v, scores, next_stage, next_phase, parity ^ 1


@gluon.jit
def _backward_consumer(
    results,
    buffers,
    call,
    NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DIVIDED: gl.constexpr,
):
    """Computes the gradients of keys and values [64 * NUMBER, 64 * NUMBER + 64) of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    num_q_heads = call.num_q_heads
    num_kv_heads = call.num_kv_heads
    kv_len = call.kv_len
    rows_len = call.rows_len
    scale = call.scale
    num_whole = call.num_whole
    grad_k_desc = results.grad_k_desc
    grad_v_desc = results.grad_v_desc
    parts_desc = results.parts_desc
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
    qk_scale = scale * 1.4426950408889634  # log2(e)
    group = num_q_heads // num_kv_heads
    stage, phase, parity, count = 0, 0, 0, 0
    mbarrier.wait(keys_full.index(0), 0)
    while _announced(slots, count % 2) >= 0:
        k_number = count % 2
        grad_k = gl.zeros([64, 128], gl.float32, GRADS)
        grad_v = gl.zeros([64, 128], gl.float32, GRADS)
        # One query head of the group after another: their gradients accumulate in registers.
        work_tile = _keys_of(_announced(slots, k_number), call, BLOCK_N, DIVIDED)
        first_member, end_of_members = _members(work_tile, group, DIVIDED)
        for member in range(first_member, end_of_members):
            work_tile = _keys_of(_announced(slots, k_number), call, BLOCK_N, DIVIDED)
            batch, kv_head, kv_first = work_tile.batch, work_tile.kv_head, work_tile.kv_first
            kv_idx = (kv_first + 64 * NUMBER + gl.arange(0, 64, layout=ROWS))[:, None]
            head = kv_head * group + member
            runs = _backward_visits(batch, head, kv_first, call, BLOCK_M, BLOCK_N)
            visits = runs.visits
            # The first row of this consumer's part of dq in the buffer of sums, whose rows have 32.
            head_row = (batch * num_q_heads + head) * rows_len * 4 + 128 * NUMBER
            keys = _Keys(head_row, k_number, kv_idx, qk_scale)
            mbarrier.wait(full.index(stage), phase, pred=visits > 0)
            k = k_tiles.index(k_number + _unknown_zero()).reshape([BLOCK_N, 128])
            own_k = k.slice(64 * NUMBER, 64)
            following = _start_scores_of_keys(own_k, q_tiles, stage, SCORES)
            scores = warpgroup_mma_wait(0, deps=(following,))
            masked_visits = runs.masked_visits
            for visit in range(masked_visits):
                tile = _query_tile(visit, runs)
                grad_k, grad_v, scores, stage, phase, parity = _backward_step(
                    grad_k,
                    grad_v,
                    scores,
                    stage,
                    phase,
                    parity,
                    tile,
                    visit + 1 < visits,
                    True,
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
                )

            for visit in range(masked_visits, visits):
                tile = _query_tile(visit, runs)
                grad_k, grad_v, scores, stage, phase, parity = _backward_step(
                    grad_k,
                    grad_v,
                    scores,
                    stage,
                    phase,
                    parity,
                    tile,
                    visit + 1 < visits,
                    False,
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
                )
        work_tile = _keys_of(_announced(slots, k_number), call, BLOCK_N, DIVIDED)
        mbarrier.arrive(keys_empty.index(k_number), count=1)
        if DIVIDED and work_tile.num_parts > 1:
            tile = work_tile.batch * num_kv_heads + work_tile.kv_head - num_whole
            tile = tile * gl.cdiv(kv_len, BLOCK_N) + work_tile.kv_first // BLOCK_N
            row = 1024 * (tile * work_tile.num_parts + work_tile.part) + 512 * NUMBER
            _store_part(parts_desc, row, grad_k, grad_q_tiles.index(NUMBER))
            _store_part(parts_desc, row + 256, grad_v, grad_q_tiles.index(NUMBER))
        else:
            # Gradients are stored through this consumer's dq buffer: the next keys are arriving.
            place = [work_tile.batch, work_tile.kv_head, work_tile.kv_first + 64 * NUMBER, 0]
            leaving = _reinterpret(
                grad_q_tiles.index(NUMBER), gl.bfloat16, [1, 1, 1, 64, 128], grad_k_desc.layout
            )
            tma.store_wait(0)
            leaving.index(0).reshape([64, 128]).store(grad_v.to(gl.bfloat16))
            fence_async_shared()
            _async_store(grad_v_desc, place, leaving.index(0))
            tma.store_wait(0)
            leaving.index(0).reshape([64, 128]).store((grad_k * scale).to(gl.bfloat16))
            fence_async_shared()
            _async_store(grad_k_desc, place, leaving.index(0))
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
        "heads_together",
        "num_whole",
        "num_parts",
        "parts_together",
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
    parts_desc,
    counter_ptr,
    num_q_heads,
    num_kv_heads,
    q_len,
    kv_len,
    rows_len,
    num_tiles,
    heads_together,
    num_whole,
    num_parts,
    parts_together,
    scale,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DIVIDED: gl.constexpr,
):
    """One program: gradients of tiles of BLOCK_N keys and values, and their contributions to dq.

    Descriptors of q and grad_out are of (batch, heads, rows, columns) with tiles of BLOCK_M rows,
    of k and v with BLOCK_N, of their gradients with 64. counter_ptr: how many of num_tiles were
    handed out, 0 at first. rows comes from `_backward_rows`, (2, batch * num_q_heads, rows_len);
    grad_q is a buffer of zeros for sums, which `_place_sums` reads.
    With DIVIDED, tiles of all heads of keys but the first num_whole are in num_parts parts, and
    num_tiles counts both. Gradients of parts go to `parts`, and `_place_sums` adds them up.
    """
    call = _BackwardCall(
        num_q_heads,
        num_kv_heads,
        q_len,
        kv_len,
        rows_len,
        scale,
        heads_together,
        num_whole,
        num_parts,
        parts_together,
    )
    q_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_M, 128], q_desc.layout
    )
    grad_out_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_STAGES, 1, 1, BLOCK_M, 128], grad_out_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, BLOCK_N, 128], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, BLOCK_N, 128], v_desc.layout)
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
    grad_out_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(keys_full.index(i), count=1)
        mbarrier.init(keys_empty.index(i), count=2)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(grad_out_full.index(i), count=1)

    tiles = _BackwardTiles(q_tiles, grad_out_tiles, k_tiles, v_tiles, rows_tiles)
    barriers = _BackwardBarriers(keys_full, keys_empty, full, empty, grad_out_full)
    buffers = _BackwardBuffers(tiles, barriers, ds_tiles, grad_q_tiles, slots)
    sources = _BackwardSources(
        q_desc, grad_out_desc, k_desc, v_desc, rows_desc, counter_ptr, num_tiles
    )
    results = _BackwardResults(grad_q_desc, grad_k_desc, grad_v_desc, parts_desc)
    gl.warp_specialize(
        [
            (
                _backward_consumer,
                (results, buffers, call, 0, BLOCK_M, BLOCK_N, NUM_STAGES, DIVIDED),
            ),
            (
                _backward_consumer,
                (results, buffers, call, 1, BLOCK_M, BLOCK_N, NUM_STAGES, DIVIDED),
            ),
            (_backward_producer, (sources, buffers, call, BLOCK_M, BLOCK_N, NUM_STAGES, DIVIDED)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit
def _place(sums_ptr, grad_ptr, row, length, rows_len, scale, HEAD_DIM: tl.constexpr, num_parts=1):
    """Stores sums of 64 rows in (batch, heads, length, HEAD_DIM); `row` counts rows_len a head."""
    offs_m = row % rows_len + tl.arange(0, 64)
    batch_head = (row // rows_len).to(tl.int64)
    places = tl.arange(0, 128)[:, None] * 32 + tl.arange(0, 32)[None, :]
    for part in tl.static_range(2):  # 64 columns each
        sums = tl.load(sums_ptr + 4096 * part + places)
        for other in tl.range(1, num_parts):
            sums += tl.load(sums_ptr + 32768 * other + 4096 * part + places)
        # A thread (of 8 x 4 in a warp) holds 8 groups of columns, 2 rows, 2 columns.
        tile = tl.reshape(sums, [4, 8, 4, 8, 2, 2]).permute(0, 4, 1, 3, 2, 5).reshape([64, 64])
        offs_d = 64 * part + tl.arange(0, 64)
        inside = (offs_m < length)[:, None]
        if 64 * (part + 1) > HEAD_DIM:
            inside &= (offs_d < HEAD_DIM)[None, :]
        ptrs = grad_ptr + (batch_head * length + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(ptrs, (tile * scale).to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["q_len", "rows_len", "kv_len", "num_sums", "num_whole", "num_parts"])
def _place_sums(
    sums_ptr,
    parts_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    q_len,
    rows_len,
    kv_len,
    num_sums,
    num_whole,
    num_parts,
    scale,
    BLOCK_N: gl.constexpr,
):
    """One program: 64 rows of one head's gradient, from the sums and parts of `_backward_hopper`.

    The first programs make grad_q from num_sums rows of sums; further programs add up the parts of
    grad_k and grad_v, for all heads but the first num_whole. Gradients are contiguous.
    """
    program = tl.program_id(0)
    row = program * 64
    if row < num_sums:
        sums_ptr += program.to(tl.int64) * 8192
        _place(sums_ptr, grad_q_ptr, row, q_len, rows_len, scale, 128, 1)
    else:
        # Each consumer has stored the part's gradients of 64 keys, then of their values.
        number = program - num_sums // 64
        row = number // 2 * 64
        tile = (row // BLOCK_N).to(tl.int64)
        parts_ptr += tile * num_parts * 32768 + row % BLOCK_N * 256 + number % 2 * 8192
        kv_rows_len = tl.cdiv(kv_len, BLOCK_N) * BLOCK_N
        row += num_whole * kv_rows_len
        if number % 2 == 0:
            _place(parts_ptr, grad_k_ptr, row, kv_len, kv_rows_len, scale, 128, num_parts)
        else:
            _place(parts_ptr, grad_v_ptr, row, kv_len, kv_rows_len, 1.0, 128, num_parts)

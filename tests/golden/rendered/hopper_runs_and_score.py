"""A golden."""

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
    """What owner has by a name or, in a Triton that does not have it yet, by the one before."""
    return getattr(owner, name if hasattr(owner, name) else before)


_async_load = _named(tma, "async_load", "async_copy_global_to_shared")  # before Triton 3.8
_async_store = _named(tma, "async_store", "async_copy_shared_to_global")  # before 3.8

# Where the results of wgmma lie in registers: the output's.
OUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# What the weights of a row may add up to: before its reference is raised, and at all.
OUTGROWN: gl.constexpr = gl.constexpr(2.0**-40)
MOST_WEIGHT: gl.constexpr = gl.constexpr(2.0**88)
# Below all scores: the reference of a row that has seen no key yet.
UNSEEN: gl.constexpr = gl.constexpr(-3.0e38)
# Steps between two looks at the sums, at first.
LOOK: gl.constexpr = gl.constexpr(16)


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr):
    """Waits until this consumer's turn has been passed to it."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"bar.sync {8 + CONSUMER}, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr):
    """Lets this consumer go on. It has a hardware barrier; Triton takes the first ones itself."""
    lanes = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        f"bar.arrive {8 + CONSUMER}, 256; mov.b32 $0, $1;", "=r,r", [lanes],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _stage(count, NUM_STAGES: gl.constexpr):
    """(buffer, phase of its barriers) of what comes after so many others; buffers take turns."""
    if NUM_STAGES & (NUM_STAGES - 1) == 0:
        # Of numbers that the compiler does not know to be positive, quotients are longer.
        return count & (NUM_STAGES - 1), (count & NUM_STAGES) // NUM_STAGES
    else:
        return count % NUM_STAGES, count // NUM_STAGES % 2


@gluon.jit
def _lane_max(x):
    """The maximum of a row over the columns that a thread holds, as four chains; no shuffle."""
    return gl.max(x.reshape([64, x.shape[1] // 8, 4, 2]), 1)


@gluon.jit
def _lane_sum(x):
    """The sum of a row over the columns that a thread holds, likewise."""
    return gl.sum(x.reshape([64, x.shape[1] // 8, 4, 2]), 1)


@gluon.jit
def _row_sum(lanes, ROWS: gl.constexpr):
    """The sum of whole rows from those of lanes."""
    return gl.convert_layout(gl.sum(gl.sum(lanes, 2), 1), ROWS, assert_trivial=True)


@gluon.jit
def _row_max(lanes, ROWS: gl.constexpr):
    """The maximum of whole rows from those of lanes."""
    return gl.convert_layout(gl.max(gl.max(lanes, 2), 1), ROWS, assert_trivial=True)


@gluon.jit
def _reference(top, ROWS: gl.constexpr, qk_scale):
    """What weights are relative to, in base 2, where lanes have seen scores up to these."""
    # Finite, so a row that has seen no key yet has weights of exactly 0 instead of NaN.
    return gl.maximum(_row_max(top, ROWS) * qk_scale, UNSEEN) + 64.0


@gluon.jit
def _scale_lanes(lanes, factor):
    """What lanes hold of each row times the row's factor."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, lanes.type.layout))
    factor = gl.convert_layout(factor, ROWS, assert_trivial=True)
    return lanes * factor[:, None][:, :, None]


@gluon.jit
def _scale_rows(acc, factor):
    """Rows of an accumulator times their factors."""
    OUT: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]


@gluon.jit
def _raised(m_i, m_new, sums):
    """(references, what sums are times) of rows with larger scores, or sums that have outgrown."""
    grown = gl.maximum(m_new, m_i + gl.log2(sums) + 56.0)
    m_new = gl.where(sums <= OUTGROWN, m_new, grown)
    # Large sums are not lost: 2^-120 is the least that they are times.
    m_new = gl.where(sums <= 2.0**24, m_new, gl.minimum(m_new, m_i + 120.0))
    # What is beyond its range stays so, for all to see.
    return m_new, gl.where(sums <= MOST_WEIGHT, gl.exp2(m_i - m_new), float("inf"))


@gluon.jit
def _steep(top, m_i, ROWS: gl.constexpr, qk_scale):
    """How far apart scores of a row are: 2 for very far, 1 for far; 5 if it has seen no key."""
    seen = gl.where(top == float("-inf"), float("inf"), top)
    low = gl.convert_layout(gl.min(gl.min(seen, 2), 1), ROWS, assert_trivial=True)
    spread = m_i - low * qk_scale
    far = gl.where(spread > 139.0, 1, 0)
    very_far = gl.where(spread > 214.0, 2, 0)
    return gl.where(m_i > UNSEEN, far | very_far, 5)


@gluon.jit
def _any(rows, votes):
    """The bits, of three, that any of a consumer's rows has: of each warp, then of the warps."""
    rows = gl.inline_asm_elementwise(
        "{.reg .b32 x; or.b32 x, $2, $3; redux.sync.or.b32 $0, x, 0xffffffff; mov.b32 $1, $0;}",
        "=r,=r,r,r", [rows], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    votes.store(rows.to(gl.int8).reshape([4, 16]).permute((1, 0)).reshape([64]))
    warps = votes.slice(0, 4).load(gl.BlockedLayout([4], [32], [4], [0])).to(gl.int32)
    return gl.max(warps & 1, 0) | gl.max(warps & 2, 0) | gl.max(warps & 4, 0)


@gluon.jit
def _tell(number, outgrown, NUMBER: gl.constexpr, slot):
    """Notes whether a consumer's weights have outgrown their maxima."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    outgrown.index(2 * NUMBER + slot).store(gl.full([1], number, gl.int32, LANES))


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
    """The way back, into what wgmma takes from registers: no instruction is left of it."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    weights = gl.join(low, high).reshape([64, 2 * pairs.shape[1]])
    return gl.convert_layout(weights, OPERAND, assert_trivial=True)


@gluon.jit
def _in_order(index, num_tiles_m, num_tiles, heads_together):
    """(tile, head): heads in groups whose keys L2 holds, in a group the longest tiles first.

    The shortest quarter of all heads' tiles comes last, so that programs end at the same time.
    """
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
def _work(index, careful, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(visits, batch, head, q_first, ...): a tile of queries, and what `_key_tile` goes by.

    After the call's last tile of queries there are no visits.
    """
    num_q_heads, _, q_len, _, num_tiles_m, num_tiles, heads_together, _, _, left = call
    is_tile = index < num_tiles
    index = min(index, num_tiles - 1)
    tile_m, batch_head = _in_order(index, num_tiles_m, num_tiles, heads_together)
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
    # Runs can overlap: each starts where the one before it ended. They are visited as one.
    visits_0 = kv_end_0 - kv_begin_0
    kv_begin_1 = max(kv_begin_1, kv_end_0)
    kv_end_1 = max(kv_end_1, kv_begin_1)
    visits_1 = visits_0 + kv_end_1 - kv_begin_1
    # Where there is nothing to see, one tile of keys is visited all the same, and all of it masked.
    visits = gl.where(is_tile, max(visits_1, 1), 0)
    return visits, batch, head, q_first, kv_begin_0, visits_0, kv_begin_1, visits_1, careful


@gluon.jit
def _seen(work, NUMBER: gl.constexpr, call, BLOCK_N: gl.constexpr):
    """(first visit, last visit, keys that all see ...) of one consumer's queries.

    Visits count down. A consumer leaves out those at both ends at which its queries see nothing,
    and all but one if it has no queries. Between runs it computes all.
    """
    _, _, q_len, _, _, _, _, _, _, left = call
    visits, _, _, q_first, kv_begin_0, visits_0, kv_begin_1, _, _ = work
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
    own_end = some_end_0
    own_end = max(own_end, some_end_1)
    first = visits_0 + max(gl.cdiv(own_end, BLOCK_N) - kv_begin_1, 0) - 1
    first = max(min(first, top), last)
    none = work[3] + 64 * NUMBER >= q_len
    first, last = gl.where(none, 0, first), gl.where(none, 0, last)
    return first, last, all_begin_0, all_end_0, all_begin_1, all_end_1


@gluon.jit
def _key_tile(visit, work, call, BLOCK_N: gl.constexpr):
    """The tile of keys of a visit."""
    _, _, _, _, kv_begin_0, visits_0, kv_begin_1, _, _ = work
    tile = kv_begin_0 + visit
    tile = gl.where(visit < visits_0, tile, kv_begin_1 + visit - visits_0)
    return tile


@gluon.jit
def _hand_over(
    work, q_count, slots, full, empty, call, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Tells the consumers the tile of queries that comes after `q_count` others."""
    slot, phase = _stage(q_count, 2)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    for i in gl.static_range(9):
        number = gl.full([1], work[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        slots.index(slots.shape[0] // 2 * slot + i).store(number)
    for consumer in gl.static_range(CONSUMERS):
        seen = _seen(work, consumer, call, BLOCK_N)
        for i in gl.static_range(6):
            number = gl.full([1], seen[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
            slots.index(slots.shape[0] // 2 * slot + 6 * consumer + 9 + i).store(number)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _handed_over(number, q_count, slots):
    """One number of the work handed over. It is read where it is used: registers are scarce."""
    slot = slots.index(slots.shape[0] // 2 * (q_count % 2) + number)
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _batch(place):
    """The batch entry of the tile of queries."""
    slots, q_count = place
    return _handed_over(1, q_count, slots)


@gluon.jit
def _head(place):
    """Its head."""
    slots, q_count = place
    return _handed_over(2, q_count, slots)


@gluon.jit
def _q_first(place, NUMBER: gl.constexpr):
    """The first of a consumer's queries."""
    slots, q_count = place
    return _handed_over(3, q_count, slots) + 64 * NUMBER


@gluon.jit
def _visited_tile(visit, place, call, NUMBER: gl.constexpr, BLOCK_N: gl.constexpr):
    """(tile of keys, whether it needs the mask) of a visit."""
    slots, q_count = place
    kv_begin_0 = _handed_over(4, q_count, slots)
    visits_0 = _handed_over(5, q_count, slots)
    kv_begin_1 = _handed_over(6, q_count, slots)
    visits_1 = _handed_over(7, q_count, slots)
    work = (0, 0, 0, 0, kv_begin_0, visits_0, kv_begin_1, visits_1, 0)
    tile = _key_tile(visit, work, call, BLOCK_N)
    all_begin_0 = _handed_over(6 * NUMBER + 11, q_count, slots)
    all_end_0 = _handed_over(6 * NUMBER + 12, q_count, slots)
    all_begin_1 = _handed_over(6 * NUMBER + 13, q_count, slots)
    all_end_1 = _handed_over(6 * NUMBER + 14, q_count, slots)
    masked = (tile * BLOCK_N < all_begin_0) | ((tile + 1) * BLOCK_N > all_end_0)
    masked &= (tile * BLOCK_N < all_begin_1) | ((tile + 1) * BLOCK_N > all_end_1)
    return tile, masked


@gluon.constexpr_function
def _octets(columns):
    """A layout of scores, (64, columns // 8, 8): octets of one row and place lie side by side."""
    octets = [[0, 2**i, 0] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    registers = [*octets, [0, 0, 1], [8, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns // 8, 8])


@gluon.jit
def _first_octet(scores, first):
    """(1, 8): the first columns, counted from `first`.

    A compiler that knows them keeps what they are compared with in registers from tile to tile.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _octets(scores.shape[1]))
    column = first + gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    column = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [column], dtype=gl.int32, is_pure=False, pack=1
    )
    return column[None, :]


@gluon.jit
def _rows_of_octets(scores, x):
    """A vector of rows, (64, 1), where octets are."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _octets(scores.shape[1]))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _at_least(column, least):
    """Bits of column + 8 * i >= least; nothing overflows, whatever `least` is."""
    least = gl.minimum(gl.maximum(least, column), column + 8 * 31)
    return -1 << ((least - column + 7) >> 3).to(gl.int32)


@gluon.jit
def _below(column, end):
    """Those of column + 8 * i < end."""
    return ~_at_least(column, end)


@gluon.jit
def _seen_alone(scores, bits):
    """Scores where bits (64 or 1, 8) say that a pair is seen, else -inf."""
    COLUMNS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = _octets(COLUMNS)
    given = scores.reshape([64, COLUMNS // 8, 8])
    octets = gl.convert_layout(given, LAYOUT, assert_trivial=True)
    octet = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    octets = gl.inline_asm_elementwise(
        """
        {
            .reg .b32 bit;
            .reg .pred seen;
            and.b32 bit, $1, $2;
            setp.ne.s32 seen, bit, 0;
            selp.f32 $0, $3, 0fFF800000, seen;
        }
        """,
        "=f,r,r,f",
        [bits[:, None, :], (1 << octet)[None, :, None], octets],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    octets = gl.convert_layout(octets, given.type.layout, assert_trivial=True)
    return gl.convert_layout(octets.reshape([64, COLUMNS]), scores.type.layout, assert_trivial=True)


@gluon.jit
def _columns(scores, first, DTYPE: gl.constexpr):
    """(1, n): the positions of the scores' columns, counted from `first`, as DTYPE.

    A compiler that knows all of them keeps them, or what is compared with them, in registers from
    tile to tile. Of these it cannot see the first; the others are a constant apart.
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
    _, _, _, _, _, _, _, _, _, left = call
    LAYOUT: gl.constexpr = scores.type.layout
    q_first = _q_first(place, NUMBER)
    q_idx = (q_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)))[:, None]

    kv_idx = _first_octet(scores, start_n)
    q_idx = _rows_of_octets(scores, q_idx)
    seen = _below(kv_idx - 1, q_idx)
    seen &= _below(kv_idx, 4) | _at_least(kv_idx, q_idx - left)
    return _seen_alone(scores, seen)


@gluon.jit
def _scores(scores, start_n, masked, place, queries, call, NUMBER: gl.constexpr):
    """What the softmax sees of the products q @ k.T of 64 queries and the keys from start_n on."""
    scalar_0, _ = queries
    q_first = _q_first(place, NUMBER)
    col_0 = _columns(scores, start_n - q_first, gl.float32)
    col_1 = col_0 * scalar_0
    # score + (kv_idx - q_idx) * exp2(-(0.5 * h) - 0.5), over qk_scale and without what the row
    # alone adds.
    scores = scores + col_1
    # Only a tile that holds a hidden key, or reaches past kv_len, pays for the mask.
    if masked:
        scores = _hide(scores, start_n, place, queries, call, NUMBER)
    return scores


@gluon.jit
def _load_qk(descs, buffers, number, place, full, empty, phase):
    """Has TMA fill the buffers of this number from (batch, head, row) on, once they are empty."""
    batch, head, row = place
    BYTES: gl.constexpr = descs[0].block_type.nbytes
    mbarrier.wait(empty.index(number), phase)
    mbarrier.expect(full.index(number), BYTES)
    _async_load(descs[0], [batch, head, row, 0], full.index(number), buffers[0].index(number))


@gluon.jit
def _load_v(descs, buffers, number, place, full, empty, phase):
    """Has TMA fill the buffers of this number from (batch, head, row) on, once they are empty."""
    batch, head, row = place
    BYTES: gl.constexpr = descs[0].block_type.nbytes
    mbarrier.wait(empty.index(number), phase)
    mbarrier.expect(full.index(number), BYTES)
    _async_load(descs[0], [batch, head, row, 0], full.index(number), buffers[0].index(number))


@gluon.jit
def _told(outgrown, slot, CONSUMERS: gl.constexpr):
    """Whether `_tell` has noted that of a consumer; forgets it."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    told = 0
    for c in gl.static_range(CONSUMERS):
        told = max(told, gl.max(outgrown.index(2 * c + slot).load(LANES), 0))
        _tell(0, outgrown, c, slot)
    return told


@gluon.jit
def _producer(
    sources, buffers, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr
):
    """Finds the tiles of queries for the consumers, and loads what they need."""
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    num_q_heads, num_kv_heads, _, _, _, num_tiles, _, _, _, _ = call
    q_descs, k_descs, v_descs, counter_ptr = sources
    tiles, barriers, handover, growth = buffers
    q_tiles, k_tiles, v_tiles, _ = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _, outgrown = growth
    slots, work_full, work_empty = handover
    # A buffer is empty in the phase before the one that it is full in.
    index = gl.program_id(0)
    last, before = index, 0  # the last tiles handed over
    work = _work(index, 0, call, BLOCK_M, BLOCK_N)
    q_count = 0  # tiles of queries
    kv_count = 0  # tiles of keys
    _hand_over(work, q_count, slots, work_full, work_empty, call, CONSUMERS, BLOCK_N)
    visits = work[0]
    q_stage, q_phase = _stage(q_count, 2)
    for i in gl.static_range(CONSUMERS):
        c = CONSUMERS - 1 - i  # the last queries often see keys first
        number = q_stage * CONSUMERS + c
        rows = (work[1], work[2], work[3] + 64 * c)
        _load_qk(q_descs, q_tiles, number, rows, q_full, q_empty, q_phase ^ 1)
    while visits > 0:
        kv_head = work[2] // (num_q_heads // num_kv_heads)
        tile = _key_tile(visits - 1, work, call, BLOCK_N)
        place = (work[1], kv_head, tile * BLOCK_N)
        stage, phase = _stage(kv_count, NUM_STAGES)
        _load_qk(k_descs, k_tiles, stage, place, k_full, k_empty, phase ^ 1)
        for visit in range(visits - 2, -1, -1):
            v_place = place
            v_stage, v_phase = _stage(kv_count, NUM_STAGES)
            kv_count += 1
            tile = _key_tile(visit, work, call, BLOCK_N)
            place = (work[1], kv_head, tile * BLOCK_N)
            stage, phase = _stage(kv_count, NUM_STAGES)
            _load_qk(k_descs, k_tiles, stage, place, k_full, k_empty, phase ^ 1)
            _load_v(v_descs, v_tiles, v_stage, v_place, v_full, v_empty, v_phase ^ 1)
        stage, phase = _stage(kv_count, NUM_STAGES)
        _load_v(v_descs, v_tiles, stage, place, v_full, v_empty, phase ^ 1)
        kv_count += 1
        # The next tile, after the loads, which must not wait for it.
        q_count += 1
        slot, phase = _stage(q_count, 2)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        careful = _told(outgrown, slot, CONSUMERS)  # of the tile before the last one
        following = before
        if careful == 0:
            if index < num_tiles:
                taken = gl.atomic_add(counter_ptr, 1)
                if taken == num_tiles - 1:
                    gl.store(counter_ptr, 0)  # for the next call
                index = taken + gl.num_programs(0)
            following = index
            if index >= num_tiles:
                # That of the last tile has to be known before the end.
                mbarrier.wait(work_empty.index(1 - slot), (q_count - 1) // 2 % 2)
                careful = _told(outgrown, 1 - slot, CONSUMERS)
                following = gl.where(careful > 0, last, index)
        before = last
        last = following
        work = _work(following, careful, call, BLOCK_M, BLOCK_N)
        _hand_over(work, q_count, slots, work_full, work_empty, call, CONSUMERS, BLOCK_N)
        visits = work[0]
        if visits > 0:
            q_stage, q_phase = _stage(q_count, 2)
            for i in gl.static_range(CONSUMERS):
                c = CONSUMERS - 1 - i  # the last queries often see keys first
                number = q_stage * CONSUMERS + c
                rows = (work[1], work[2], work[3] + 64 * c)
                _load_qk(q_descs, q_tiles, number, rows, q_full, q_empty, q_phase ^ 1)


@gluon.jit
def _queries_of(q_tiles, number):
    """The queries as operands of wgmma in shared memory."""
    q = q_tiles[0].index(number).reshape([64, 64])
    return (q,)


@gluon.jit
def _start_scores(q, k_tiles, stage, HALF: gl.constexpr, SCORES: gl.constexpr):
    """Starts q @ k.T for a tile of keys."""
    COLUMNS: gl.constexpr = SCORES.instr_shape[1]
    scores = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    k = k_tiles[0].index(stage).reshape([COLUMNS, 64])
    scores = warpgroup_mma(q[0], k.permute((1, 0)), scores, use_acc=False, is_async=True)
    return scores


@gluon.jit
def _start_values(weights, v_tiles, stage, acc, begun):
    """Starts acc += p @ v for a tile of keys.

    What acc holds counts only where this tile of queries has begun.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    COLUMNS: gl.constexpr = 2 * weights[0].shape[1]
    v = v_tiles[0].index(stage).reshape([COLUMNS, 64])
    return warpgroup_mma(_unpack(weights[0], OPERAND), v, acc, use_acc=begun > 0, is_async=True)


@gluon.jit
def _queries(place, call, NUMBER: gl.constexpr, ROWS: gl.constexpr):
    """What the scores of a consumer's queries are computed with, besides the call's own."""
    _, _, _, _, _, _, _, _, scale, _ = call
    head = _head(place)
    scalar_0 = gl.exp2(-(0.5 * gl.cast(head, gl.float32)) - 0.5) / scale
    qk_scale = 1.4426950408889634 * scale
    return (scalar_0, qk_scale)


@gluon.jit
def _first_weights(
    scores_0,
    start_n,
    masked,
    place,
    queries,
    call,
    careful,
    votes,
    NUMBER: gl.constexpr,
    ROWS: gl.constexpr,
):
    """(row maxima, lanes' row sums, weights) of the first tile of keys."""
    _, qk_scale = queries
    scores_0 = _scores(scores_0, start_n, masked, place, queries, call, NUMBER)
    top = _lane_max(scores_0)
    m_i = _reference(top, ROWS, qk_scale)
    m_scaled = m_i[:, None]
    # The second bit stays: each step then takes new maxima.
    growing = 2 * careful | _any(_steep(top, m_i, ROWS, qk_scale), votes)
    p_0 = gl.exp2(scores_0 * qk_scale - m_scaled)
    l_i = _lane_sum(p_0)
    weights = (_pack(p_0),)
    return m_i, l_i, weights, growing


@gluon.jit
def _finish(
    m_i, total, redone, place, queries, call, lse_ptr, NUMBER: gl.constexpr, ROWS: gl.constexpr
):
    """Stores the LSE of rows that have seen all their keys; returns what their output is times."""
    num_q_heads, _, q_len, _, _, _, _, lse_rows, _, _ = call
    batch, head, q_first = _batch(place), _head(place), _q_first(place, NUMBER)
    offs_m = q_first + gl.arange(0, 64, layout=ROWS)
    # Sums of usual weights are brought back near 1, which keeps the digits of their logarithm.
    usual = total < 1.0
    unit = gl.where(usual, 2.0**64, 1.0)
    base = m_i - gl.where(usual, 64.0, 0.0)
    total *= unit
    # What the row alone adds to its scores changes no weight: it was left out up to here.
    base += (
        1.4426950408889634
        * gl.cast(q_first - offs_m, gl.float32)
        * gl.exp2(-(0.5 * gl.cast(head, gl.float32)) - 0.5)
    )
    if lse_rows > 0:
        lse = (base + gl.log2(total)) * 0.6931471805599453  # ln 2: back to the natural logarithm
        row = (batch * num_q_heads + head).to(gl.int64) * q_len
        gl.store(lse_ptr + row + offs_m, lse, mask=offs_m < gl.where(redone > 0, 0, lse_rows))
    return unit / total


@gluon.jit
def _store_out(acc, place, redone, q_len, out_tiles, out_descs, NUMBER: gl.constexpr):
    """Has TMA store the output, which passes through shared memory."""
    batch, head, q_first = _batch(place), _head(place), _q_first(place, NUMBER)
    q_first = gl.where(redone > 0, q_len, q_first)
    tile = out_tiles[0].index(NUMBER)
    tile.reshape([64, 64]).store(acc.to(gl.bfloat16))
    fence_async_shared()
    where = [batch, head, q_first, 0]
    _async_store(out_descs[0], where, tile)


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
    buffers,
    call,
    NUMBER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SCORES: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    GROWS: gl.constexpr,
):
    """Adds p @ v of the tile of keys before; weighs the tile from start_n on.

    Returns the accumulators, row maxima, lanes' row sums and the weights. If it GROWS, it takes
    new maxima, and returns whether the next step has to.
    """
    _, qk_scale = queries
    tiles, barriers, _, growth = buffers
    votes, _ = growth
    _, k_tiles, v_tiles, _ = tiles
    _, _, k_full, k_empty, v_full, v_empty = barriers
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    v_stage, v_phase = _stage(kv_count - 1, NUM_STAGES)
    k_stage, _ = _stage(kv_count, NUM_STAGES)
    next_stage, next_phase = _stage(kv_count + 1, NUM_STAGES)
    _take_turn(NUMBER)
    scores_0 = _start_scores(q, k_tiles, k_stage, 0, SCORES)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = _start_values(weights, v_tiles, v_stage, acc, begun)
    _pass_turn((NUMBER + 1) % CONSUMERS)
    scores_0 = warpgroup_mma_wait(1, deps=(scores_0,))
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    scores_0 = _scores(scores_0, start_n, masked, place, queries, call, NUMBER)
    if GROWS:
        top = _lane_max(scores_0)
        m_new = gl.maximum(m_i, _reference(top, ROWS, qk_scale))
        if growing & 6 == 4:
            fresh = gl.where(m_i > UNSEEN, 0, _steep(top, m_new, ROWS, qk_scale))
            growing = _any(fresh, votes.index(NUMBER))
        else:
            growing &= 2
        m_i, factor = _raised(m_i, m_new, _row_sum(l_i, ROWS))
    m_scaled = m_i[:, None]
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    if GROWS:
        acc = _scale_rows(acc, factor)
        l_i = _scale_lanes(l_i, factor)
    p_0 = gl.exp2(scores_0 * qk_scale - m_scaled)
    l_i += _lane_sum(p_0)
    weights = (_pack(p_0),)
    mbarrier.wait(k_full.index(next_stage), next_phase, pred=more)
    if GROWS:
        return acc, m_i, l_i, weights, growing
    else:
        return acc, m_i, l_i, weights


@gluon.jit
def _skip(
    kv_count, barriers, NUMBER: gl.constexpr, CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr
):
    """Passes on a tile of keys and values that a consumer's queries do not see, as it comes."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    stage, phase = _stage(kv_count, NUM_STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    _take_turn(NUMBER)
    _pass_turn((NUMBER + 1) % CONSUMERS)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.arrive(v_empty.index(stage), count=1)


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
    """Computes the rows [64 * NUMBER, 64 * NUMBER + 64) of each tile of queries.

    Weights are relative to a row's maximum over the first tile of keys that it sees. Where some
    outgrow it, it is raised; where that comes too late, the tile of queries is handed over again.
    """
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    HALF: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    NEXT: gl.constexpr = (NUMBER + 1) % CONSUMERS
    _, _, q_len, _, _, _, _, _, _, _ = call
    out_descs, lse_ptr = results
    tiles, barriers, handover, growth = buffers
    votes, outgrown = growth
    q_tiles, k_tiles, v_tiles, out_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    slots, work_full, work_empty = handover
    q_count = 0  # tiles of queries
    kv_count = 0  # tiles of keys
    mbarrier.wait(work_full.index(0), 0)
    visits = _handed_over(0, q_count, slots)
    if NUMBER == CONSUMERS - 1:
        _pass_turn(0)
    acc = gl.zeros([64, 64], gl.float32, OUT)
    while visits > 0:
        place = (slots, q_count)
        careful = _handed_over(8, q_count, slots)
        queries = _queries(place, call, NUMBER, ROWS)
        first = _handed_over(6 * NUMBER + 9, q_count, slots)
        last = _handed_over(6 * NUMBER + 10, q_count, slots)
        for _visit in range(visits - 1 - first):
            _skip(kv_count, barriers, NUMBER, CONSUMERS, NUM_STAGES)
            kv_count += 1
        k_stage, k_phase = _stage(kv_count, NUM_STAGES)
        q_stage, q_phase = _stage(q_count, 2)
        number = q_stage * CONSUMERS + NUMBER
        mbarrier.wait(q_full.index(number), q_phase)
        q = _queries_of(q_tiles, number)
        mbarrier.wait(k_full.index(k_stage), k_phase)
        _take_turn(NUMBER)
        scores_0 = _start_scores(q, k_tiles, k_stage, 0, SCORES)
        _pass_turn(NEXT)
        scores_0 = warpgroup_mma_wait(0, deps=(scores_0,))
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        tile, masked = _visited_tile(first, place, call, NUMBER, BLOCK_N)
        start_n = tile * BLOCK_N
        m_i, l_i, weights, growing = _first_weights(
            scores_0,
            start_n,
            masked,
            place,
            queries,
            call,
            careful,
            votes.index(NUMBER),
            NUMBER,
            ROWS,
        )
        begun = 0  # whether values of this tile are in acc, or still those of another
        kv_count += 1
        k_stage, k_phase = _stage(kv_count, NUM_STAGES)
        mbarrier.wait(k_full.index(k_stage), k_phase, pred=first > last)
        rest = first - 1
        until = LOOK  # steps before the sums are looked at
        while rest >= last:
            while (growing > 0) & (rest >= last):
                # growing is up to 7: these are the same queries. ptxas must not see it: what both
                # loops need of their addresses it would compute on the way to this one alone.
                q_again = _queries_of(q_tiles, number + growing // 8)
                tile, masked = _visited_tile(rest, place, call, NUMBER, BLOCK_N)
                start_n = tile * BLOCK_N
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
                    buffers,
                    call,
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
                tile, masked = _visited_tile(visit, place, call, NUMBER, BLOCK_N)
                start_n = tile * BLOCK_N
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
                    buffers,
                    call,
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
                growing = _any(gl.where(sums <= OUTGROWN, 0, 1), votes.index(NUMBER))

        # The tile's end.
        total = _row_sum(l_i, ROWS)
        redone = 0  # whether the producer has to hand this tile over again
        redone = _any(gl.where(total <= MOST_WEIGHT, 0, 1 - careful), votes.index(NUMBER))
        if redone > 0:
            _tell(1, outgrown, NUMBER, q_count % 2)
        v_stage, v_phase = _stage(kv_count - 1, NUM_STAGES)
        mbarrier.arrive(q_empty.index(q_count % 2 * CONSUMERS + NUMBER), count=1)
        _take_turn(NUMBER)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = _start_values(weights, v_tiles, v_stage, acc, begun)
        _pass_turn(NEXT)
        scale_out = _finish(m_i, total, redone, place, queries, call, lse_ptr, NUMBER, ROWS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # One thread waits until its last store has been read; the arrival holds up the others.
        tma.store_wait(0)
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        acc *= gl.convert_layout(scale_out, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        _store_out(acc, place, redone, q_len, out_tiles, out_descs, NUMBER)
        mbarrier.arrive(work_empty.index(q_count % 2), count=1)
        for _visit in range(last):
            _skip(kv_count, barriers, NUMBER, CONSUMERS, NUM_STAGES)
            kv_count += 1
        q_count += 1
        slot, phase = _stage(q_count, 2)
        mbarrier.wait(work_full.index(slot), phase)
        visits = _handed_over(0, q_count, slots)
    tma.store_wait(0)
    if NUMBER == 0:
        _take_turn(0)  # the one that is left over


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
    with BLOCK_N. lse (batch, heads, q_len) is contiguous, lse_rows q_len, or 0 if nobody asks.
    num_tiles_m tiles make a head, num_tiles a call. counter_ptr holds 0: how many were handed out.

    """
    CONSUMERS: gl.constexpr = BLOCK_M // 64
    Q_TILES: gl.constexpr = 2 * CONSUMERS
    call = (
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
    # Tiles of queries that the producer hands over to the consumers: the present and the next.
    scalar: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUMBERS: gl.constexpr = 9 + 6 * CONSUMERS
    slots = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], scalar)
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_tiles, k_tiles = (q_tiles,), (k_tiles,)
    v_tiles, out_tiles = (v_tiles,), (out_tiles,)
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    votes = gl.allocate_shared_memory(gl.int8, [CONSUMERS, 64], scalar)
    outgrown = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 1], scalar)
    # One of each array after the other: between two of one array Triton has all warps meet.
    for i in gl.static_range(Q_TILES + NUM_STAGES):
        if i < Q_TILES:
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=1)
        if i < NUM_STAGES:
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=CONSUMERS)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)
        if i < 2:
            mbarrier.init(work_full.index(i), count=1)
            mbarrier.init(work_empty.index(i), count=CONSUMERS)
        if i < 2 * CONSUMERS:
            _tell(0, outgrown, i // 2, i % 2)
    buffers = (tiles, barriers, (slots, work_full, work_empty), (votes, outgrown))
    q_descs, k_descs = (q_desc,), (k_desc,)
    v_descs, out_descs = (v_desc,), (out_desc,)
    sources = (q_descs, k_descs, v_descs, counter_ptr)
    results = (out_descs, lse_ptr)
    # The partitions, the warps and the registers of all but the first: Gluon wants literal lists.
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

"""A golden."""

import triton
import triton.language as tl


@triton.jit
def _at_3d(tensor, i_0, i_1, i_2):
    """tensor[i_0, ...] for indices that broadcast, 0 outside of it."""
    ptr, size_0, size_1, size_2, stride_0, stride_1, stride_2 = tensor
    inside = (i_0 >= 0) & (i_0 < size_0)
    inside &= (i_1 >= 0) & (i_1 < size_1)
    inside &= (i_2 >= 0) & (i_2 < size_2)
    ptr += tl.cast(i_0, tl.int64) * stride_0
    ptr += tl.cast(i_1, tl.int64) * stride_1
    ptr += tl.cast(i_2, tl.int64) * stride_2
    # != 0: in Triton's interpreter a scalar condition & a tile's condition is an integer, no mask.
    return tl.load(ptr, mask=inside != 0, other=0)


@triton.jit
def _load_tile(
    src,
    stride_row,
    batch,
    head,
    row,
    num_rows,
    COL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Rows [row, row + ROWS) and columns [COL, COL + COLS) of one head; past the end it reads 0.

    src is a (batch, heads, rows, cols) descriptor with USE_TMA, else a pointer to the head.
    """
    if USE_TMA:
        return src.load([batch, head, row, COL]).reshape(ROWS, COLS)
    else:
        rows = tl.arange(0, ROWS)
        cols = COL + tl.arange(0, COLS)
        # The offset of the tile's first row can exceed 2^31 elements; offsets in a tile cannot.
        tile = src + row.to(tl.int64) * stride_row + (rows[:, None] * stride_row + cols[None, :])
        inside = (rows < num_rows - row)[:, None]
        return tl.load(tile, mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=[
        "num_q_heads",
        "q_len",
        "kv_len",
        "layout_size_0",
        "layout_size_1",
        "layout_size_2",
        "layout_stride_0",
        "layout_stride_1",
    ]
)
def _list_tiles(
    tiles_ptr,
    num_q_heads,
    q_len,
    kv_len,
    layout_ptr,
    layout_size_0,
    layout_size_1,
    layout_size_2,
    layout_stride_0,
    layout_stride_1,
    layout_stride_2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: the key tiles that one tile of queries visits, CHUNK at a time.

    tiles_ptr: (num_q_heads, query tiles, 1 + key tiles) int32: the number of tiles, then in
    ascending order 2 * tile, plus 1 if some query of the tile does not see one of its keys.
    """
    num_tiles_m = tl.cdiv(q_len, BLOCK_M)
    num_tiles_n = tl.cdiv(kv_len, BLOCK_N)
    pid = tl.program_id(0)
    tile_m = pid % num_tiles_m
    head = pid // num_tiles_m
    q_first = tile_m * BLOCK_M
    q_last = min(q_first + BLOCK_M, q_len) - 1
    layout = (
        layout_ptr,
        layout_size_0,
        layout_size_1,
        layout_size_2,
        layout_stride_0,
        layout_stride_1,
        layout_stride_2,
    )
    tiles_ptr += pid.to(tl.int64) * (num_tiles_n + 1)
    count = 0
    for first in tl.range(0, num_tiles_n, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        kv_first = tile * BLOCK_N
        kv_last = tl.minimum(kv_first + BLOCK_N, kv_len) - 1
        # Whether any block that the tile touches is shown, and whether all are.
        some_shown = tl.zeros([CHUNK], tl.int1)
        all_shown = tl.full([CHUNK], 1, tl.int1)
        first_column = kv_first // 16
        last_column = kv_last // 16
        columns = tl.max(last_column - first_column, 0) + 1
        for block_row in tl.range(q_first // 16, q_last // 16 + 1):
            for column in tl.range(0, columns):
                block_column = tl.minimum(first_column + column, last_column)
                shown = _at_3d(layout, head, block_row, block_column) != 0
                some_shown |= shown
                all_shown &= shown
        visited = tile < num_tiles_n
        visited &= some_shown
        visited &= q_last + kv_len >= kv_first + q_len
        full = kv_first + BLOCK_N <= kv_len
        full &= all_shown
        full &= q_first + kv_len >= kv_last + q_len
        entry = 2 * tile + tl.where(full, 0, 1)
        visited = visited.to(tl.int32)
        tl.store(tiles_ptr + count + tl.cumsum(visited, 0), entry, mask=visited != 0)
        count += tl.sum(visited, 0)
    tl.store(tiles_ptr, count)


# Lengths, head counts and the mask's parameters never cause a recompile.
@triton.jit(
    do_not_specialize=[
        "num_q_heads",
        "num_kv_heads",
        "q_len",
        "kv_len",
        "layout_size_0",
        "layout_size_1",
        "layout_size_2",
        "layout_stride_0",
        "layout_stride_1",
    ]
)
def _attention_forward(
    q_src,
    k_src,
    v_src,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    num_q_heads,
    num_kv_heads,
    q_len,
    kv_len,
    qk_scale,
    layout_ptr,
    layout_size_0,
    layout_size_1,
    layout_size_2,
    layout_stride_0,
    layout_stride_1,
    layout_stride_2,
    tiles_ptr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """One program: BLOCK_M queries of one head.

    out (batch, heads, q_len, 16) and lse (batch, heads, q_len) are contiguous.
    qk_scale is scale * log2(e): the softmax runs in base 2.
    """
    num_tiles_m = tl.cdiv(q_len, BLOCK_M)
    pid = tl.program_id(0)
    # Tiles of all heads with about the same work run side by side, those with most work first.
    batch = pid // num_q_heads // num_tiles_m
    head = pid % num_q_heads
    tile_m = num_tiles_m - 1 - pid // num_q_heads % num_tiles_m
    kv_head = head // (num_q_heads // num_kv_heads)
    q_first = tile_m * BLOCK_M
    offs_m = q_first + tl.arange(0, BLOCK_M)
    layout = (
        layout_ptr,
        layout_size_0,
        layout_size_1,
        layout_size_2,
        layout_stride_0,
        layout_stride_1,
        layout_stride_2,
    )
    if not USE_TMA:
        q_src += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        k_src += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v_src += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh

    # The tiles of keys to visit are listed: see _list_tiles.
    listed = head * num_tiles_m + tile_m
    tiles_ptr += listed.to(tl.int64) * (tl.cdiv(kv_len, BLOCK_N) + 1)
    num_visits = tl.load(tiles_ptr)

    q = _load_tile(q_src, stride_qm, batch, head, q_first, q_len, 0, BLOCK_M, 16, USE_TMA)
    acc = tl.zeros([BLOCK_M, 16], tl.float32)
    q_idx = offs_m[:, None]
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)
    for visit in tl.range(0, num_visits):
        entry = tl.load(tiles_ptr + 1 + visit)
        tile = entry >> 1
        start_n = tile * BLOCK_N
        k = _load_tile(k_src, stride_kn, batch, kv_head, start_n, kv_len, 0, BLOCK_N, 16, USE_TMA)
        scores = tl.dot(q, k.T)
        # Only a tile that holds a hidden key, or reaches past kv_len, evaluates the mask.
        masked = entry % 2 == 1
        if masked:
            kv_idx = start_n + tl.arange(0, BLOCK_N)[None, :]
            shown = tl.zeros([BLOCK_M, BLOCK_N], tl.int1)
            for i in tl.static_range((BLOCK_N + 15) // 16):  # the blocks of the tile
                block_column = start_n // 16 + i
                shown_rows = tl.zeros([BLOCK_M, 1], tl.int1)
                for j in tl.static_range((BLOCK_M + 15) // 16):
                    block_row = q_first // 16 + j
                    shown_rows |= (q_idx // 16 == block_row) & (
                        _at_3d(layout, head, block_row, block_column) != 0
                    )
                shown |= (kv_idx // 16 == block_column) & shown_rows
            visible = q_idx + kv_len - q_len >= kv_idx
            visible &= shown
            seen = tl.where(visible, scores, float("-inf"))
        else:
            seen = scores
        # The same as `seen`, in one basic block with both products: they then share a layout.
        scores = tl.where(masked, seen, scores)

        # Online softmax in base 2. m_i starts finite, so a row that has seen no key yet
        # keeps weights of exactly 0 instead of NaN.
        m_new = tl.maximum(m_i, tl.max(scores, 1) * qk_scale)
        p = tl.math.exp2(scores * qk_scale - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new

        v = _load_tile(v_src, stride_vn, batch, kv_head, start_n, kv_len, 0, BLOCK_N, 16, USE_TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])

    # Every key can be hidden from a query: such a row is 0 with an LSE of -inf.
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    lse = (m_i + tl.math.log2(l_i)) * 0.6931471805599453  # ln 2: back to the natural logarithm
    lse = tl.where(empty, float("-inf"), lse)
    scale_out = (1.0 / l_i)[:, None]
    row = (batch * num_q_heads + head).to(tl.int64) * q_len
    in_rows = offs_m < q_len
    tl.store(lse_ptr + row + offs_m, lse, mask=in_rows)
    offs_d = tl.arange(0, 16)
    out = (acc * scale_out).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (row + offs_m)[:, None] * 16 + offs_d[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None])

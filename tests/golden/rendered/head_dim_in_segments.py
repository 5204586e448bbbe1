"""A golden."""

import triton
import triton.language as tl


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


# Lengths, head counts and the mask's parameters never cause a recompile.
@triton.jit(do_not_specialize=["num_q_heads", "num_kv_heads", "q_len", "kv_len"])
def _attention_forward(
    q_src_0,
    q_src_1,
    k_src_0,
    k_src_1,
    v_src_0,
    v_src_1,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """One program: BLOCK_M queries of one head.

    out (batch, heads, q_len, 96) and lse (batch, heads, q_len) are contiguous.
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
    q_last = min(q_first + BLOCK_M, q_len) - 1
    offs_m = q_first + tl.arange(0, BLOCK_M)
    if not USE_TMA:
        q_src_0 += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        q_src_1 += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        k_src_0 += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        k_src_1 += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v_src_0 += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
        v_src_1 += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh

    # Keys that some of these queries see, and keys that all of them see, derived from the mask.
    some_end = max(0, q_last + kv_len - q_len + 1)
    all_end = max(0, q_first + kv_len - q_len + 1)
    # The same in tiles.
    kv_end = tl.cdiv(some_end, BLOCK_N)
    full_end = all_end // BLOCK_N

    q_0 = _load_tile(q_src_0, stride_qm, batch, head, q_first, q_len, 0, BLOCK_M, 64, USE_TMA)
    q_1 = _load_tile(q_src_1, stride_qm, batch, head, q_first, q_len, 64, BLOCK_M, 32, USE_TMA)
    acc_0 = tl.zeros([BLOCK_M, 64], tl.float32)
    acc_1 = tl.zeros([BLOCK_M, 32], tl.float32)
    q_idx = offs_m[:, None]
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)
    for tile in tl.range(0, kv_end):
        start_n = tile * BLOCK_N
        k_0 = _load_tile(
            k_src_0, stride_kn, batch, kv_head, start_n, kv_len, 0, BLOCK_N, 64, USE_TMA
        )
        scores = tl.dot(q_0, k_0.T)
        k_1 = _load_tile(
            k_src_1, stride_kn, batch, kv_head, start_n, kv_len, 64, BLOCK_N, 32, USE_TMA
        )
        scores = tl.dot(q_1, k_1.T, scores)
        # Only a tile that holds a hidden key, or reaches past kv_len, evaluates the mask.
        masked = tile >= full_end
        if masked:
            kv_idx = start_n + tl.arange(0, BLOCK_N)[None, :]
            visible = q_idx + kv_len - q_len >= kv_idx
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

        v_0 = _load_tile(
            v_src_0, stride_vn, batch, kv_head, start_n, kv_len, 0, BLOCK_N, 64, USE_TMA
        )
        acc_0 = tl.dot(p.to(v_0.dtype), v_0, acc_0 * alpha[:, None])
        v_1 = _load_tile(
            v_src_1, stride_vn, batch, kv_head, start_n, kv_len, 64, BLOCK_N, 32, USE_TMA
        )
        acc_1 = tl.dot(p.to(v_1.dtype), v_1, acc_1 * alpha[:, None])

    # Every key can be hidden from a query: such a row is 0 with an LSE of -inf.
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    lse = (m_i + tl.math.log2(l_i)) * 0.6931471805599453  # ln 2: back to the natural logarithm
    lse = tl.where(empty, float("-inf"), lse)
    scale_out = (1.0 / l_i)[:, None]
    row = (batch * num_q_heads + head).to(tl.int64) * q_len
    in_rows = offs_m < q_len
    tl.store(lse_ptr + row + offs_m, lse, mask=in_rows)
    offs_d = tl.arange(0, 64)
    out = (acc_0 * scale_out).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (row + offs_m)[:, None] * 96 + offs_d[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None])
    offs_d = 64 + tl.arange(0, 32)
    out = (acc_1 * scale_out).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (row + offs_m)[:, None] * 96 + offs_d[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None])

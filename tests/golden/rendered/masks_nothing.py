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
    # Tiles of one head run side by side: they share keys in L2.
    batch = pid // num_tiles_m // num_q_heads
    head = pid // num_tiles_m % num_q_heads
    tile_m = pid % num_tiles_m
    kv_head = head // (num_q_heads // num_kv_heads)
    q_first = tile_m * BLOCK_M
    offs_m = q_first + tl.arange(0, BLOCK_M)
    if not USE_TMA:
        q_src += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        k_src += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v_src += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh

    # Keys that some of these queries see, and keys that all of them see, derived from the mask.
    some_end = kv_len
    all_end = kv_len
    # The same in tiles.
    kv_end = tl.cdiv(some_end, BLOCK_N)
    full_end = all_end // BLOCK_N

    q = _load_tile(q_src, stride_qm, batch, head, q_first, q_len, 0, BLOCK_M, 16, USE_TMA)
    acc = tl.zeros([BLOCK_M, 16], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)
    for tile in tl.range(0, kv_end):
        start_n = tile * BLOCK_N
        k = _load_tile(k_src, stride_kn, batch, kv_head, start_n, kv_len, 0, BLOCK_N, 16, USE_TMA)
        scores = tl.dot(q, k.T)
        # Only a tile that holds a hidden key, or reaches past kv_len, evaluates the mask.
        masked = tile >= full_end
        if masked:
            kv_idx = start_n + tl.arange(0, BLOCK_N)[None, :]
            visible = kv_idx < kv_len
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

    lse = (m_i + tl.math.log2(l_i)) * 0.6931471805599453  # ln 2: back to the natural logarithm
    scale_out = (1.0 / l_i)[:, None]
    row = (batch * num_q_heads + head).to(tl.int64) * q_len
    in_rows = offs_m < q_len
    tl.store(lse_ptr + row + offs_m, lse, mask=in_rows)
    offs_d = tl.arange(0, 16)
    out = (acc * scale_out).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (row + offs_m)[:, None] * 16 + offs_d[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None])

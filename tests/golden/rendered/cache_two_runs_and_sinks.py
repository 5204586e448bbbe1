"""A golden."""

import triton
import triton.language as tl


@triton.jit
def _at_1d(tensor, i_0):
    """tensor[i_0, ...] for indices that broadcast, 0 outside of it."""
    ptr, size_0, stride_0 = tensor
    inside = (i_0 >= 0) & (i_0 < size_0)
    ptr += tl.cast(i_0, tl.int64) * stride_0
    return tl.load(ptr, mask=inside, other=0)


@triton.jit
def _cache_lengths(
    batch,
    kv_lens_ptr,
    cu_seqlens_ptr,
    num_sequences,
    num_tokens,
    q_len,
    capacity,
    PACKED: tl.constexpr,
):
    """(first token, q_len, kv_len) of a sequence, or of a vector of them, cut to what there is.

    And whether one was cut, as an integer. q_len is the most queries of a sequence.
    """
    there = batch < num_sequences
    keys = tl.load(kv_lens_ptr + batch, mask=there, other=0)
    kv_len = tl.minimum(tl.maximum(keys, 0), capacity)
    cut = (keys != kv_len).to(tl.int32)
    if PACKED:
        start = tl.load(cu_seqlens_ptr + batch, mask=there, other=0)
        stop = tl.load(cu_seqlens_ptr + batch + 1, mask=there, other=0)
        start = tl.minimum(tl.maximum(start, 0), num_tokens)
        tokens = tl.maximum(tl.minimum(stop, num_tokens) - start, 0)
        # A sequence with too many queries has no keys: its shares could pass 32 bits.
        long = tokens > q_len
        return start, tokens, tl.where(long, 0, kv_len), cut | long.to(tl.int32)
    else:
        return batch * 0, tl.where(there, q_len, 0), kv_len, cut


@triton.jit
def _tokens_at_fault(batch, cu_seqlens_ptr, num_tokens, SEQUENCES: tl.constexpr):
    """(Whether a packed sequence's tokens are wrong, the first that is no other sequence's)."""
    start, stop = tl.load(cu_seqlens_ptr + batch), tl.load(cu_seqlens_ptr + batch + 1)
    # Sequences before this one, whose tokens it may not touch, end here.
    own = batch * 0
    for first in tl.range(0, batch + 1, SEQUENCES):
        index = first + tl.arange(0, SEQUENCES)
        ends = tl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        own = tl.maximum(own, tl.max(ends, 0))
    fault = (start < own) | (stop < start) | (stop > num_tokens)
    return fault | ((batch == 0) & (start != 0)), own


@triton.jit
def _cache_runs(
    batch,
    q_first,
    q_last,
    q_len,
    kv_len,
    num_q_heads,
    left,
    BLOCK_N: tl.constexpr,
):
    """The tiles of keys that the queries q_first to q_last visit, and those that need no mask.

    For one tile of queries, or for a vector of them. Of each run: the keys that some query sees,
    from begin to before end; its first tile, the number of visits up to its end, the first tile
    that needs no mask, and the first one after it that does.
    """
    begin_0 = 0
    end_0 = tl.minimum(4, kv_len)
    full_begin_0 = tl.cdiv(0, BLOCK_N)
    full_end_0 = (tl.minimum(4, kv_len)) // BLOCK_N
    first_0 = begin_0 // BLOCK_N
    last_0 = tl.where(begin_0 < end_0, tl.cdiv(end_0, BLOCK_N), first_0)
    begin_1 = tl.maximum(0, q_first + kv_len - q_len - left)
    end_1 = tl.maximum(0, q_last + kv_len - q_len + 1)
    full_begin_1 = tl.cdiv(tl.maximum(0, q_last + kv_len - q_len - left), BLOCK_N)
    full_end_1 = (tl.maximum(0, q_first + kv_len - q_len + 1)) // BLOCK_N
    first_1 = begin_1 // BLOCK_N
    last_1 = tl.where(begin_1 < end_1, tl.cdiv(end_1, BLOCK_N), first_1)
    # Runs can overlap: each starts where the previous one ended.
    visits_0 = last_0 - first_0
    first_1 = tl.maximum(first_1, last_0)
    last_1 = tl.maximum(last_1, first_1)
    visits_1 = visits_0 + last_1 - first_1
    return (
        begin_0,
        end_0,
        first_0,
        visits_0,
        full_begin_0,
        full_end_0,
        begin_1,
        end_1,
        first_1,
        visits_1,
        full_begin_1,
        full_end_1,
    )


@triton.jit
def _cache_shares(
    batch,
    q_len,
    kv_len,
    num_q_heads,
    tiles_of_a_share,
    left,
    BLOCK_N: tl.constexpr,
):
    """The shares of work of a tile of queries, at least 1, for a sequence or a vector of them."""
    runs = _cache_runs(
        batch, 0, tl.maximum(q_len - 1, 0), q_len, kv_len, num_q_heads, left, BLOCK_N
    )
    visits = runs[9]
    return tl.maximum(tl.cdiv(visits, tiles_of_a_share), 1)


@triton.jit
def _part(count, shares, all_shares):
    """The part of a count: count * shares // all_shares, for products of over 32 bits."""
    return count // all_shares * shares + count % all_shares * shares // all_shares


@triton.jit
def _cache_finish(
    acc_0,
    acc_1,
    m_i,
    l_i,
    out_ptr,
    lse_ptr,
    stride_ob,
    stride_om,
    stride_oh,
    batch,
    first_row,
    kv_head,
    token,
    own,
    q_len,
    kv_len,
    num_q_heads,
    num_kv_heads,
    max_q_len,
    slopes,
    sinks,
    writes,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    WRITES_LSE: tl.constexpr,
):
    """Stores ROWS rows of a tile of queries: their outputs and, if they are wanted, LSEs."""
    group = num_q_heads // num_kv_heads
    row = first_row + tl.arange(0, ROWS)
    offs_m = row // group
    head = kv_head * group + row % group
    q_first = first_row // group
    in_rows = (offs_m < q_len) & (token + offs_m >= own) & writes
    # A score's terms that depend on the row alone change no weight: they are added to the LSE only.
    shift = 1.4426950408889634 * tl.cast(q_first - offs_m, tl.float32) * _at_1d(slopes, head)
    # The sink is one more key, with a value of 0.
    sink_logit = tl.zeros([ROWS], tl.float32) + 1.4426950408889634 * _at_1d(sinks, head) - shift
    m_all = tl.maximum(m_i, tl.maximum(sink_logit, -3.0e38))
    alpha = tl.math.exp2(m_i - m_all)
    l_i = l_i * alpha + tl.math.exp2(sink_logit - m_all)
    m_i = m_all
    # A row without keys is 0 with an LSE of -inf.
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    m_i += shift
    lse = (m_i + tl.math.log2(l_i)) * 0.6931471805599453  # ln 2: back to the natural logarithm
    scale_out = (alpha / l_i)[:, None]
    lse = tl.where(empty, float("-inf"), lse)
    out_ptr += batch.to(tl.int64) * stride_ob
    if WRITES_LSE:  # contiguous: (batch, q_len, heads), or (tokens, heads)
        row_of_lse = (token if PACKED else batch.to(tl.int64) * max_q_len) + offs_m
        tl.store(lse_ptr + row_of_lse.to(tl.int64) * num_q_heads + head, lse, mask=in_rows)
    row_of_out = (token + offs_m).to(tl.int64) * stride_om + head * stride_oh
    offs_d = tl.arange(0, 64)
    out = (acc_0 * scale_out).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + row_of_out[:, None] + offs_d[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None])
    offs_d = 64 + tl.arange(0, 16)
    out = (acc_1 * scale_out).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + row_of_out[:, None] + offs_d[None, :]
    tl.store(out_ptrs, out, mask=in_rows[:, None] & (offs_d < 72)[None, :])


@triton.jit
def _cache_merge(
    parts_ptr,
    sums_ptr,
    first_program,
    num_parts,
    out_ptr,
    lse_ptr,
    stride_ob,
    stride_om,
    stride_oh,
    batch,
    first_row,
    kv_head,
    token,
    own,
    q_len,
    kv_len,
    num_q_heads,
    num_kv_heads,
    max_q_len,
    slopes,
    sinks,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    WRITES_LSE: tl.constexpr,
):
    """Merges the parts of a unit, PARTS at a time, and stores its rows."""
    rows = tl.arange(0, ROWS)
    in_unit = first_row + rows < q_len * (num_q_heads // num_kv_heads)
    m_i = tl.full([ROWS], -3.0e38, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    offs_v_0 = tl.arange(0, 64)
    acc_0 = tl.zeros([ROWS, 64], tl.float32)
    offs_v_1 = 64 + tl.arange(0, 16)
    acc_1 = tl.zeros([ROWS, 16], tl.float32)
    for first_part in tl.range(0, num_parts, PARTS):
        # The first program has its part in the second of its slots.
        number = first_part + tl.arange(0, PARTS)
        slot = 2 * (first_program + number * num_kv_heads) + tl.where(number == 0, 1, 0)
        there = (number < num_parts)[:, None]
        sums = sums_ptr + slot[:, None] * (2 * ROWS) + rows[None, :]
        # From L2: no other SM's stores are in this one's L1.
        m_part = tl.load(sums, mask=there, other=-3.0e38, cache_modifier=".cg")
        l_part = tl.load(sums + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        part_rows = (slot.to(tl.int64)[:, None] * ROWS + rows[None, :]) * 72
        held = (there & in_unit[None, :])[:, :, None]
        part_0 = tl.load(
            parts_ptr + part_rows[:, :, None] + offs_v_0[None, None, :],
            mask=held,
            other=0.0,
            cache_modifier=".cg",
        )
        part_1 = tl.load(
            parts_ptr + part_rows[:, :, None] + offs_v_1[None, None, :],
            mask=held & (offs_v_1 < 72)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m_i, tl.max(m_part, 0))
        weight = tl.math.exp2(m_part - m_new[None, :])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(l_part * weight, 0)
        m_i = m_new
        acc_0 = acc_0 * alpha[:, None] + tl.sum(part_0 * weight[:, :, None], 0)
        acc_1 = acc_1 * alpha[:, None] + tl.sum(part_1 * weight[:, :, None], 0)
    _cache_finish(
        acc_0,
        acc_1,
        m_i,
        l_i,
        out_ptr,
        lse_ptr,
        stride_ob,
        stride_om,
        stride_oh,
        batch,
        first_row,
        kv_head,
        token,
        own,
        q_len,
        kv_len,
        num_q_heads,
        num_kv_heads,
        max_q_len,
        slopes,
        sinks,
        True,
        ROWS,
        PACKED,
        WRITES_LSE,
    )


@triton.jit
def _pages(places, start_n, kv_len, there, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a tile of keys, or of each key of it; 0 where there is no tile, or no key."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(places + start_n // PAGE_SIZE, mask=there, other=0)
    else:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        return tl.load(places + offs_n // PAGE_SIZE, mask=there & (offs_n < kv_len), other=0)


@triton.jit
def _cache_visits(
    q_0,
    q_1,
    acc_0,
    acc_1,
    m_i,
    l_i,
    wrong_pages,
    first_visit,
    last_visit,
    begin_0,
    end_0,
    first_0,
    visits_0,
    full_begin_0,
    full_end_0,
    begin_1,
    end_1,
    first_1,
    visits_1,
    full_begin_1,
    full_end_1,
    k_head,
    v_head,
    places,
    stride_kp,
    stride_kn,
    stride_vp,
    stride_vn,
    num_places,
    batch,
    head_rows,
    q_rows,
    q_first,
    q_len,
    kv_len,
    num_q_heads,
    num_kv_heads,
    scale,
    left,
    slopes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds the tiles of some visits to a tile's outputs, maxima and sums.

    Keys whose page is missing are noted in wrong_pages.
    """
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    offs_qk_0 = tl.arange(0, 64)
    offs_qk_1 = 64 + tl.arange(0, 16)
    offs_v_0 = tl.arange(0, 64)
    offs_v_1 = 64 + tl.arange(0, 16)
    head = head_rows[:, None]
    q_idx = q_rows[:, None]
    scalar_slopes = _at_1d(slopes, head)
    scalar_0 = scalar_slopes / scale
    qk_scale = 1.4426950408889634 * scale
    next_page = 0
    if PAGE_SIZE != 0:
        tile = first_0 + first_visit
        tile = tl.where(first_visit < visits_0, tile, first_1 + first_visit - visits_0)
        next_page = _pages(
            places, tile * BLOCK_N, kv_len, first_visit < last_visit, PAGE_SIZE, BLOCK_N
        )
    for visit in tl.range(first_visit, last_visit):
        page = next_page
        if PAGE_SIZE != 0:  # one visit ahead of the loads that need it
            tile = first_0 + visit + 1
            tile = tl.where(visit + 1 < visits_0, tile, first_1 + visit + 1 - visits_0)
            next_page = _pages(
                places, tile * BLOCK_N, kv_len, visit + 1 < last_visit, PAGE_SIZE, BLOCK_N
            )
        tile = first_0 + visit
        tile = tl.where(visit < visits_0, tile, first_1 + visit - visits_0)
        start_n = tile * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        held = offs_n < kv_len
        if PAGE_SIZE != 0:
            # Pages without visible keys may be missing or another's: none of them is read.
            seen_here = (offs_n >= begin_0) & (offs_n < end_0)
            seen_here |= (offs_n >= begin_1) & (offs_n < end_1)
            held &= seen_here
        if PAGE_SIZE == 0:
            k_rows = offs_n.to(OFFSET) * stride_kn
            v_rows = offs_n.to(OFFSET) * stride_vn
        else:
            # In place of a missing page another one is read: what comes of it is NaN.
            missing = (page < 0) | (page >= num_places)
            wrong_pages |= seen_here & missing
            page = tl.where(missing, 0, page).to(OFFSET)
            if PAGE_SIZE % BLOCK_N == 0:
                in_page = (start_n % PAGE_SIZE + tl.arange(0, BLOCK_N)).to(OFFSET)
            else:
                in_page = (offs_n % PAGE_SIZE).to(OFFSET)
            k_rows = page * stride_kp + in_page * stride_kn
            v_rows = page * stride_vp + in_page * stride_vn
        k_0 = tl.load(
            k_head + (k_rows[:, None] + offs_qk_0[None, :]), mask=held[:, None], other=0.0
        )
        scores = tl.dot(q_0, k_0.T)
        k_1 = tl.load(
            k_head + (k_rows[:, None] + offs_qk_1[None, :]),
            mask=held[:, None] & (offs_qk_1 < 72)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_1, k_1.T, scores)
        kv_idx = offs_n[None, :]
        col_0 = tl.cast(kv_idx + q_len - q_first - kv_len, tl.float32)
        col_1 = col_0 * scalar_0
        # score + (kv_idx + q_len - q_idx - kv_len) * slopes[h], over qk_scale and without what the
        # row alone adds.
        scores = scores + col_1
        # Only a tile that holds a hidden key, or reaches past kv_len, evaluates the mask.
        masked = (tile < full_begin_0) | (tile >= full_end_0)
        masked &= (tile < full_begin_1) | (tile >= full_end_1)
        if masked:
            visible = kv_idx < kv_len
            visible &= (kv_idx < 4) | (
                (q_idx + kv_len - q_len >= kv_idx) & (kv_idx >= q_idx + kv_len - q_len - left)
            )
            seen = tl.where(visible, scores, float("-inf"))
        else:
            seen = scores
        # The same as `seen`, in one basic block with both products: they then share a layout.
        scores = tl.where(masked, seen, scores)

        v_0 = tl.load(v_head + (v_rows[:, None] + offs_v_0[None, :]), mask=held[:, None], other=0.0)
        v_1 = tl.load(
            v_head + (v_rows[:, None] + offs_v_1[None, :]),
            mask=held[:, None] & (offs_v_1 < 72)[None, :],
            other=0.0,
        )
        # Online softmax in base 2. m_i starts finite, so a row that has seen no key yet
        # keeps weights of exactly 0 instead of NaN.
        scores *= qk_scale
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.math.exp2(scores - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        acc_0 = tl.dot(p.to(v_0.dtype), v_0, acc_0 * alpha[:, None])
        acc_1 = tl.dot(p.to(v_1.dtype), v_1, acc_1 * alpha[:, None])
    return acc_0, acc_1, m_i, l_i, wrong_pages


@triton.jit(
    do_not_specialize=[
        "stride_places",
        "num_q_heads",
        "num_kv_heads",
        "num_sequences",
        "num_tokens",
        "max_q_len",
        "capacity",
        "num_places",
        "least",
        "tiles_of_a_share",
        "left",
        "slopes_size_0",
        "sinks_size_0",
    ]
)
def _cache_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    counters_ptr,
    kv_lens_ptr,
    cu_seqlens_ptr,
    places_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_ob,
    stride_om,
    stride_oh,
    stride_places,
    num_q_heads,
    num_kv_heads,
    num_sequences,
    num_tokens,
    max_q_len,
    capacity,
    num_places,
    least,
    tiles_of_a_share,
    scale,
    left,
    slopes_ptr,
    slopes_size_0,
    slopes_stride_0,
    sinks_ptr,
    sinks_size_0,
    sinks_stride_0,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ONE_VECTOR: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    PACKED: tl.constexpr,
    PLACED: tl.constexpr,
    WRITES_LSE: tl.constexpr,
):
    """One program: an equal part of all tiles of keys of all sequences, for one head of keys.

    q (sequences, q_len, heads, 72), or with PACKED (tokens, heads, 72), a sequence b from
    token cu_seqlens[b] on. k and v (places, rows, kv_heads, dim): with PAGE_SIZE, pages of so many
    rows, places[b, i] the page of keys from i * PAGE_SIZE on; else sequences, with PLACED places[b]
    the one of sequence b. Without WIDE offsets within a sequence's rows, or from the first page on,
    have 32 bits. kv_lens (sequences,) counts the keys of each, at most capacity.

    Parts of a unit's rows, the first ROWS of its tile, are float32 from parts_ptr on: outputs
    (2 * programs, ROWS, 72), then maxima and sums of weights (2 * programs, 2, ROWS). counters
    (programs,) int32 of 0 counts the parts of the unit that a program begins and does not end; they
    end at 0. Without WRITES_LSE lse is not written.
    PARTS of them are merged at a time. There are as many programs for each head of keys; one has at
    least `least` shares. SEQUENCES are looked at together: all of them with ONE_VECTOR.
    """
    pid = tl.program_id(0)
    sums_ptr = parts_ptr + tl.num_programs(0).to(tl.int64) * (2 * ROWS * 72)
    group = num_q_heads // num_kv_heads
    # Programs side by side have the same shares, each of another head of keys: heads of one key are
    # neighbours in memory, and DRAM reads them together.
    team = pid // num_kv_heads
    kv_head = pid % num_kv_heads
    slopes = (slopes_ptr, slopes_size_0, slopes_stride_0)
    sinks = (sinks_ptr, sinks_size_0, sinks_stride_0)
    # The shares of all units, in the order of sequences and tiles of queries.
    all_shares = 0
    if ONE_VECTOR:
        index = tl.arange(0, SEQUENCES)
        tokens, q_lens, kv_lens, cuts = _cache_lengths(
            index,
            kv_lens_ptr,
            cu_seqlens_ptr,
            num_sequences,
            num_tokens,
            max_q_len,
            capacity,
            PACKED,
        )
        shares = _cache_shares(index, q_lens, kv_lens, num_q_heads, tiles_of_a_share, left, BLOCK_N)
        shares *= tl.cdiv(q_lens * group, BLOCK_M)
        ends = tl.cumsum(shares, 0)
        all_shares = tl.sum(shares, 0)
    else:
        for first_sequence in tl.range(0, num_sequences, SEQUENCES):
            index = first_sequence + tl.arange(0, SEQUENCES)
            _, q_lens, kv_lens, _ = _cache_lengths(
                index,
                kv_lens_ptr,
                cu_seqlens_ptr,
                num_sequences,
                num_tokens,
                max_q_len,
                capacity,
                PACKED,
            )
            shares = _cache_shares(
                index, q_lens, kv_lens, num_q_heads, tiles_of_a_share, left, BLOCK_N
            )
            all_shares += tl.sum(shares * tl.cdiv(q_lens * group, BLOCK_M), 0)
    own_shares = tl.maximum(tl.cdiv(all_shares, tl.num_programs(0) // num_kv_heads), least)
    first_share = team * own_shares
    share = first_share
    end_share = tl.minimum(first_share + own_shares, all_shares)

    while share < end_share:
        # The sequence of this share.
        if ONE_VECTOR:
            earlier = ends <= share
            batch = tl.sum(earlier.to(tl.int32), 0)
            before = tl.sum(tl.where(earlier, shares, 0), 0)
            here = index == batch
            token = tl.sum(tl.where(here, tokens, 0), 0)
            q_len = tl.sum(tl.where(here, q_lens, 0), 0)
            kv_len = tl.sum(tl.where(here, kv_lens, 0), 0)
            at_fault = tl.sum(tl.where(here, cuts, 0), 0) > 0
        else:
            batch = 0
            before = 0
            passed = 0
            for first_sequence in tl.range(0, num_sequences, SEQUENCES):
                index = first_sequence + tl.arange(0, SEQUENCES)
                _, q_lens, kv_lens, _ = _cache_lengths(
                    index,
                    kv_lens_ptr,
                    cu_seqlens_ptr,
                    num_sequences,
                    num_tokens,
                    max_q_len,
                    capacity,
                    PACKED,
                )
                shares = _cache_shares(
                    index, q_lens, kv_lens, num_q_heads, tiles_of_a_share, left, BLOCK_N
                )
                shares *= tl.cdiv(q_lens * group, BLOCK_M)
                earlier = passed + tl.cumsum(shares, 0) <= share
                batch += tl.sum(earlier.to(tl.int32), 0)
                before += tl.sum(tl.where(earlier, shares, 0), 0)
                passed += tl.sum(shares, 0)
            token, q_len, kv_len, cut = _cache_lengths(
                batch,
                kv_lens_ptr,
                cu_seqlens_ptr,
                num_sequences,
                num_tokens,
                max_q_len,
                capacity,
                PACKED,
            )
            at_fault = cut > 0
        own = batch * 0
        if PACKED:
            wrong_tokens, own = _tokens_at_fault(batch, cu_seqlens_ptr, num_tokens, SEQUENCES)
            at_fault |= wrong_tokens
        unit_shares = _cache_shares(
            batch, q_len, kv_len, num_q_heads, tiles_of_a_share, left, BLOCK_N
        )
        unit = (share - before) // unit_shares
        unit_first = before + unit * unit_shares
        unit_end = unit_first + unit_shares
        piece_end = tl.minimum(unit_end, end_share)
        first_row = unit * BLOCK_M

        # Rows of the tile: heads of a query side by side.
        row = first_row + tl.arange(0, BLOCK_M)
        q_rows = tl.minimum(row // group, q_len - 1)
        head_rows = kv_head * group + row % group
        q_first = first_row // group
        q_last = tl.minimum((first_row + BLOCK_M - 1) // group, q_len - 1)
        (
            begin_0,
            end_0,
            first_0,
            visits_0,
            full_begin_0,
            full_end_0,
            begin_1,
            end_1,
            first_1,
            visits_1,
            full_begin_1,
            full_end_1,
        ) = _cache_runs(batch, q_first, q_last, q_len, kv_len, num_q_heads, left, BLOCK_N)
        # The visits of this piece, in proportion to its shares.
        visits = visits_1
        first_visit = share - unit_first
        last_visit = piece_end - unit_first
        if visits != unit_shares:
            first_visit = _part(visits, first_visit, unit_shares)
            last_visit = _part(visits, last_visit, unit_shares)
        last_visit = tl.where(at_fault, first_visit, last_visit)

        q_row = batch.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qm
        q_row += q_rows.to(tl.int64) * stride_qm + head_rows * stride_qh
        in_rows = row < q_len * group
        place = batch
        misplaced = batch < 0
        places = places_ptr
        if PAGE_SIZE == 0:
            if PLACED:
                place = tl.load(places_ptr + batch)
                misplaced = (place < 0) | (place >= num_places)
                place = tl.where(misplaced, 0, place)
                last_visit = tl.where(misplaced, first_visit, last_visit)
        else:
            places += batch.to(tl.int64) * stride_places
        k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
        v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
        if PAGE_SIZE == 0:
            k_head += place.to(tl.int64) * stride_kp
            v_head += place.to(tl.int64) * stride_vp
        offs_qk_0 = tl.arange(0, 64)
        q_0 = tl.load(q_ptr + q_row[:, None] + offs_qk_0[None, :], mask=in_rows[:, None], other=0.0)
        offs_qk_1 = 64 + tl.arange(0, 16)
        q_1 = tl.load(
            q_ptr + q_row[:, None] + offs_qk_1[None, :],
            mask=in_rows[:, None] & (offs_qk_1 < 72)[None, :],
            other=0.0,
        )
        offs_v_0 = tl.arange(0, 64)
        acc_0 = tl.zeros([BLOCK_M, 64], tl.float32)
        offs_v_1 = 64 + tl.arange(0, 16)
        acc_1 = tl.zeros([BLOCK_M, 16], tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)
        wrong_pages = tl.zeros([BLOCK_N], tl.int1)
        acc_0, acc_1, m_i, l_i, wrong_pages = _cache_visits(
            q_0,
            q_1,
            acc_0,
            acc_1,
            m_i,
            l_i,
            wrong_pages,
            first_visit,
            last_visit,
            begin_0,
            end_0,
            first_0,
            visits_0,
            full_begin_0,
            full_end_0,
            begin_1,
            end_1,
            first_1,
            visits_1,
            full_begin_1,
            full_end_1,
            k_head,
            v_head,
            places,
            stride_kp,
            stride_kn,
            stride_vp,
            stride_vn,
            num_places,
            batch,
            head_rows,
            q_rows,
            q_first,
            q_len,
            kv_len,
            num_q_heads,
            num_kv_heads,
            scale,
            left,
            slopes,
            BLOCK_M,
            BLOCK_N,
            PAGE_SIZE,
            WIDE,
        )

        # What is computed from wrong lengths or places is NaN.
        wrong = tl.max(wrong_pages.to(tl.int32), 0) > 0
        nothing = tl.where(at_fault | misplaced | wrong, float("nan"), 0.0)
        l_i += nothing
        acc_0 += nothing
        acc_1 += nothing
        # The programs that have parts of this unit.
        first_team = unit_first // own_shares
        num_parts = (unit_end - 1) // own_shares - first_team + 1
        first_program = first_team * num_kv_heads + kv_head
        if (num_parts == 1) | at_fault:
            _cache_finish(
                acc_0,
                acc_1,
                m_i,
                l_i,
                out_ptr,
                lse_ptr,
                stride_ob,
                stride_om,
                stride_oh,
                batch,
                first_row,
                kv_head,
                token,
                own,
                q_len,
                kv_len,
                num_q_heads,
                num_kv_heads,
                max_q_len,
                slopes,
                sinks,
                share == unit_first,
                BLOCK_M,
                PACKED,
                WRITES_LSE,
            )
        else:
            # A program has at most one unit that it does not begin, and one that it does not end.
            slot = 2 * pid + tl.where(unit_first < first_share, 0, 1)
            rows = tl.arange(0, BLOCK_M)
            sums = sums_ptr + slot * (2 * ROWS)
            tl.store(sums + rows, m_i, mask=rows < ROWS)
            tl.store(sums + ROWS + rows, l_i, mask=rows < ROWS)
            part_rows = (slot.to(tl.int64) * ROWS + rows) * 72
            kept = (rows < ROWS)[:, None] & in_rows[:, None]
            tl.store(parts_ptr + part_rows[:, None] + offs_v_0[None, :], acc_0, mask=kept)
            tl.store(
                parts_ptr + part_rows[:, None] + offs_v_1[None, :],
                acc_1,
                mask=kept & (offs_v_1 < 72)[None, :],
            )
            # All of the program's stores come before its arrival; the last to arrive merges.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters_ptr + first_program, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                tl.store(counters_ptr + first_program, 0)
                _cache_merge(
                    parts_ptr,
                    sums_ptr,
                    first_program,
                    num_parts,
                    out_ptr,
                    lse_ptr,
                    stride_ob,
                    stride_om,
                    stride_oh,
                    batch,
                    first_row,
                    kv_head,
                    token,
                    own,
                    q_len,
                    kv_len,
                    num_q_heads,
                    num_kv_heads,
                    max_q_len,
                    slopes,
                    sinks,
                    ROWS,
                    PARTS,
                    PACKED,
                    WRITES_LSE,
                )
        share = piece_end


@triton.jit
def _rotated(
    x_ptr,
    columns,
    x,
    cos_ptr,
    sin_ptr,
    there,
    ROTARY: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Rows (heads, columns) of a token with their first ROTARY columns rotated, in float32.

    x_ptr (heads, 1) points to the rows x. With PAIRED neighbouring columns are rotated together,
    else those half of ROTARY apart. There is one cosine, and one sine, for each such pair; without
    `there` the tables lack the token's position, and the rows are NaN.
    """
    half: tl.constexpr = ROTARY // 2
    turned = columns < ROTARY
    if PAIRED:
        partner = columns ^ 1
        angle = columns // 2
        first = columns % 2 == 0
    else:
        first = columns < half
        partner = tl.where(first, columns + half, columns - half)
        angle = columns % half
    cos = tl.load(cos_ptr + angle, mask=turned & there, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned & there, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=turned, other=0.0).to(tl.float32)
    turned_x = tl.where(turned, x * cos + tl.where(first, -other, other) * sin, x)
    return tl.where(there, turned_x, float("nan"))


@triton.jit(
    do_not_specialize=[
        "stride_places",
        "num_sequences",
        "num_tokens",
        "num_new",
        "capacity",
        "num_places",
        "num_angles",
        "num_q_heads",
        "num_kv_heads",
    ]
)
def _append_rows(
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    q_ptr,
    q_out_ptr,
    kv_lens_ptr,
    cu_seqlens_ptr,
    places_ptr,
    cos_ptr,
    sin_ptr,
    stride_knt,
    stride_knh,
    stride_vnt,
    stride_vnh,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_places,
    stride_cos,
    stride_sin,
    num_sequences,
    num_tokens,
    num_new,
    capacity,
    num_places,
    num_angles,
    num_q_heads,
    num_kv_heads,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PLACED: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """One program: HEADS heads of one token, of its keys and values or, beyond them, its queries.

    The tokens of a sequence are its last keys: the last one is at position kv_lens - 1. Places are
    those of `_cache_attention`. A token without a place is not written, and its queries are NaN.
    """
    token = tl.program_id(0)
    if PACKED:
        # The last sequence that begins at this token or before it.
        batch = -1
        for first in tl.range(0, num_sequences, SEQUENCES):
            index = first + tl.arange(0, SEQUENCES)
            begins = tl.load(cu_seqlens_ptr + index, mask=index < num_sequences, other=num_tokens)
            batch += tl.sum((begins <= token).to(tl.int32), 0)
        held = batch >= 0
        batch = tl.maximum(batch, 0)
        begin = tl.load(cu_seqlens_ptr + batch, mask=held, other=0)
        end = tl.load(cu_seqlens_ptr + batch + 1, mask=held, other=0)
        held &= (begin >= 0) & (token >= begin) & (token < end) & (end <= num_tokens)
    else:
        batch = token // num_new
        begin = batch * num_new
        end = begin + num_new
        held = batch < num_sequences
    kv_len = tl.load(kv_lens_ptr + batch, mask=held, other=0)
    kv_len = tl.maximum(kv_len, -1)  # else the position could wrap around
    position = kv_len - end + token
    held &= (kv_len <= capacity) & (position >= 0)
    position = tl.where(held, position, 0)
    place = batch
    row = position
    if PAGE_SIZE > 0:
        table = places_ptr + batch.to(tl.int64) * stride_places
        place = tl.load(table + position // PAGE_SIZE, mask=held, other=-1)
        row = position % PAGE_SIZE
    elif PLACED:
        place = tl.load(places_ptr + batch, mask=held, other=-1)
    held &= (place >= 0) & (place < num_places)
    place = tl.where(held, place, 0).to(tl.int64)

    columns = tl.arange(0, WIDTH)[None, :]
    first_head = tl.program_id(1) * HEADS
    there = held & (position < num_angles)
    cos_ptr += position.to(tl.int64) * stride_cos
    sin_ptr += position.to(tl.int64) * stride_sin
    if first_head < num_kv_heads:
        heads = (first_head + tl.arange(0, HEADS))[:, None]
        written = held & (heads < num_kv_heads)
        heads = tl.minimum(heads, num_kv_heads - 1)
        of_k = columns < 72
        k_rows = k_new_ptr + token.to(tl.int64) * stride_knt + heads * stride_knh
        k = tl.load(k_rows + columns, mask=of_k, other=0.0)
        if ROTARY > 0:
            k = _rotated(k_rows, columns, k.to(tl.float32), cos_ptr, sin_ptr, there, ROTARY, PAIRED)
        k_rows = k_ptr + place * stride_kp + row.to(tl.int64) * stride_kn + heads * stride_kh
        tl.store(k_rows + columns, k.to(k_ptr.dtype.element_ty), mask=written & of_k)
        of_v = columns < 72
        v_rows = v_new_ptr + token.to(tl.int64) * stride_vnt + heads * stride_vnh
        v = tl.load(v_rows + columns, mask=of_v, other=0.0)
        v_rows = v_ptr + place * stride_vp + row.to(tl.int64) * stride_vn + heads * stride_vh
        tl.store(v_rows + columns, v, mask=written & of_v)
    else:
        heads = (first_head - tl.cdiv(num_kv_heads, HEADS) * HEADS + tl.arange(0, HEADS))[:, None]
        of_q = (columns < 72) & (heads < num_q_heads)
        heads = tl.minimum(heads, num_q_heads - 1)
        q_rows = q_ptr + token.to(tl.int64) * stride_qt + heads * stride_qh
        q = tl.load(q_rows + columns, mask=of_q, other=0.0).to(tl.float32)
        q = _rotated(q_rows, columns, q, cos_ptr, sin_ptr, there, ROTARY, PAIRED)
        out_rows = q_out_ptr + token.to(tl.int64) * stride_ot + heads * stride_oh
        tl.store(out_rows + columns, q.to(q_out_ptr.dtype.element_ty), mask=of_q)

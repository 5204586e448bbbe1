"""Slips in the portable kernels and in what launches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flashgen import Int, sliding_window
from flashgen.plan import KernelPlan, lower
from support.mutants.mutant import Mutant, slips


def _interval(**edits: Callable[[Any], Any]) -> Callable[[KernelPlan], KernelPlan]:
    """A plan whose only interval of keys has fields changed."""

    def edit(plan: KernelPlan) -> KernelPlan:
        (interval,) = plan.bounds.intervals
        fields = {name: change(getattr(interval, name)) for name, change in edits.items()}
        return replace(plan, bounds=replace(plan.bounds, intervals=(replace(interval, **fields),)))

    return edit


PLANS = [
    Mutant("begin+1", "forward", edit_plan=_interval(begin=lambda key: key + 1)),
    Mutant("end-1", "forward", edit_plan=_interval(end=lambda key: key - 1)),
    Mutant("full_begin-1", "forward", edit_plan=_interval(full_begin=lambda key: key - 1)),
    Mutant("full_end+1", "forward", edit_plan=_interval(full_end=lambda key: key + 1)),
    Mutant(
        "no row is empty",
        "forward",
        edit_plan=lambda plan: replace(plan, bounds=replace(plan.bounds, rows_can_be_empty=False)),
    ),
]

FORWARD = slips(
    "forward",
    "_attention_forward",
    # Which tiles.
    ("tl.cdiv(some_end, BLOCK_N)", "some_end // BLOCK_N"),
    ("some_begin // BLOCK_N", "tl.cdiv(some_begin, BLOCK_N)"),
    ("full_begin = tl.cdiv(all_begin, BLOCK_N)", "full_begin = all_begin // BLOCK_N"),
    ("full_end = all_end // BLOCK_N", "full_end = tl.cdiv(all_end, BLOCK_N)"),
    ("q_last = min(q_first + BLOCK_M, q_len) - 1", "q_last = q_first + BLOCK_M - 2"),
    ("(tile < full_begin) | ", ""),
    (" | (tile >= full_end)", ""),
    ("start_n = tile * BLOCK_N", "start_n = tile * BLOCK_M"),
    # What they hide.
    ("visible = q_idx", "visible = 1 + q_idx"),
    ("visible &= kv_idx", "visible &= 1 + kv_idx"),
    ("kv_idx = start_n + tl", "kv_idx = start_n + 1 + tl"),
    # Online softmax.
    ("m_new = tl.maximum(m_i, tl.max(scores, 1) * qk_scale)", "m_new = m_i"),
    ("tl.max(scores, 1) * qk_scale)", "tl.max(scores, 1))"),
    ("l_i = l_i * alpha + tl.sum(p, 1)", "l_i += tl.sum(p, 1)"),
    ("acc * alpha[:, None]", "acc"),
    ("lse = (m_i + tl.math.log2(l_i))", "lse = (m_i + tl.math.log(l_i))"),
    ("lse = (m_i + tl.math.log2(l_i))", "lse = tl.math.log2(l_i)"),
    ("(1.0 / l_i)", "(1.0 / (l_i + 1.0e-2))"),
    # Whose rows.
    ("kv_head = head // (num_q_heads // num_kv_heads)", "kv_head = head % num_kv_heads"),
    ("head = pid // num_tiles_m % num_q_heads", "head = pid // num_tiles_m % num_kv_heads"),
    ("batch = pid // num_tiles_m // num_q_heads", "batch = 0 * pid"),
    ("kv_head.to(tl.int64) * stride_vh", "kv_head.to(tl.int64) * stride_kn"),
    ("batch.to(tl.int64) * stride_kb", "batch.to(tl.int64)"),
    ("in_rows = offs_m < q_len", "in_rows = offs_m < q_len - 1"),
    ("(batch * num_q_heads + head)", "(batch * num_kv_heads + head)"),
) + slips(
    "forward",
    "_load_tile",
    ("rows < num_rows - row", "rows <= num_rows - row"),
    ("COL + tl.arange(0, COLS)", "tl.arange(0, COLS) // 2 * 2"),
)

#: Keys past the end are hidden by their number alone where every query sees every key.
FORWARD += slips(
    "forward",
    "_attention_forward",
    ("visible = kv_idx < kv_len", "visible = kv_idx <= kv_len"),
    ("kv_end = tl.cdiv(some_end, BLOCK_N)", "kv_end = some_end // BLOCK_N"),
    spec="full_d128",
)

_KEYS_AND_QUERIES = (
    ("scores * qk_scale", "scores * scale"),
    ("ds = p * (dp", "ds = (dp"),
    (" * scale).to(grad", ").to(grad"),
    ("rows_len = tl.cdiv(q_len, 128) * 128", "rows_len = q_len"),
    ("(tile < full_begin) | ", ""),
    (" | (tile >= full_end)", ""),
    ("visible = q_idx", "visible = 1 + q_idx"),
    ("visible &= kv_idx", "visible &= 1 + kv_idx"),
    ("kv_head.to(tl.int64) * stride_vh", "kv_head.to(tl.int64) * stride_kh"),
    ("batch.to(tl.int64) * stride_vb", "batch.to(tl.int64)"),
    ("head.to(tl.int64) * stride_oh", "head.to(tl.int64) * stride_om"),
    ("stride_om, batch, head, q_first", "stride_qm, batch, head, q_first"),
)

BACKWARD = [
    *slips(
        "backward",
        "_backward_rows",
        ("inside = offs_m < q_len", "inside = offs_m < q_len - 1"),
        ("-grad_lse)", "grad_lse)"),
        ("delta += tl.sum(out * grad_out, 1)", "delta += 0.0"),
        ("lse * 1.4426950408889634", "lse"),
        ("head.to(tl.int64) * stride_oh", "head.to(tl.int64) * stride_om"),
        ("batch, head = batch_head // num_q_heads", "batch, head = 0 * batch_head"),
        ("rows_ptr + num_rows + rows", "rows_ptr + rows"),
        ("batch_head.to(tl.int64) * rows_len", "batch_head.to(tl.int64) * q_len"),
    ),
    *slips(
        "backward",
        "_backward_of_keys",
        *_KEYS_AND_QUERIES,
        ("tl.cdiv(some_end, BLOCK_M)", "some_end // BLOCK_M"),
        ("some_begin // BLOCK_M", "tl.cdiv(some_begin, BLOCK_M)"),
        ("full_begin = tl.cdiv(all_begin, BLOCK_M)", "full_begin = all_begin // BLOCK_M"),
        ("full_end = all_end // BLOCK_M", "full_end = tl.cdiv(all_end, BLOCK_M)"),
        ("kv_last = min(kv_first + BLOCK_N, kv_len) - 1", "kv_last = kv_first + BLOCK_N - 2"),
        ("some_end = max(0, min(q_len, ", "some_end = max(0, min(q_len - 1, "),
        ("dp - delta[None, :]", "dp"),
        ("- lse[None, :]", "- lse[None, :] * 0.99"),
        ("head = kv_head * group + member", "head = kv_head * group"),
        ("tl.range(0, group)", "tl.range(0, 1)"),
        ("kv_head = pid // num_tiles_n % num_kv_heads", "kv_head = pid % num_kv_heads"),
        ("in_rows = offs_n < kv_len", "in_rows = offs_n < kv_len - 1"),
        ("(batch * num_kv_heads + kv_head)", "(0 * batch + kv_head)"),
        ("delta_ptr = lse_ptr + tl", "delta_ptr = lse_ptr + 1 + tl"),
        ("grad_out, grad_v)", "grad_out)"),
    ),
    *slips(
        "backward",
        "_backward_of_queries",
        *_KEYS_AND_QUERIES,
        ("tl.cdiv(some_end, BLOCK_N)", "some_end // BLOCK_N"),
        ("some_begin // BLOCK_N", "tl.cdiv(some_begin, BLOCK_N)"),
        ("full_begin = tl.cdiv(all_begin, BLOCK_N)", "full_begin = all_begin // BLOCK_N"),
        ("full_end = all_end // BLOCK_N", "full_end = tl.cdiv(all_end, BLOCK_N)"),
        ("q_last = min(q_first + BLOCK_M, q_len) - 1", "q_last = q_first + BLOCK_M - 2"),
        ("dp - delta[:, None]", "dp"),
        ("- lse[:, None]", "- lse[:, None] * 0.99"),
        ("kv_head = head // (num_q_heads // num_kv_heads)", "kv_head = head % num_kv_heads"),
        ("in_rows = offs_m < q_len", "in_rows = offs_m < q_len - 1"),
        ("rows_ptr + num_rows + offs_m", "rows_ptr + offs_m"),
        ("grad_q = tl.dot(ds.to(k.dtype), k, grad_q)", "grad_q = tl.dot(ds.to(k.dtype), k)"),
    ),
]

LAUNCHER = [
    *slips(
        "forward",
        "_launch",
        ("qk_scale = scale * 1.4426950408889634", "qk_scale = scale"),
        ("*k.stride()[:3]", "*q.stride()[:3]"),
        ("*v.stride()[:3]", "*k.stride()[:3]"),
        ("num_kv_heads, kv_len = k.shape[1:3]", "kv_len, num_kv_heads = q_len, k.shape[1]"),
        ("block_m) * batch * num_q_heads", "block_m) * batch"),
        ("triton.cdiv(q_len, block_m)", "max(q_len // block_m, 1)"),
        ("numbers = (qk_scale, left)", "numbers = (qk_scale, left + 1)"),
    ),
    *slips(
        "backward",
        "_backward_kernels",
        ("*k.stride()[:3]", "*q.stride()[:3]"),
        ("*v.stride()[:3]", "*k.stride()[:3]"),
        ("*grad_out.stride()[:3]", "*q.stride()[:3]"),
        ("float(scale)", "1.0"),
        ("triton.cdiv(kv_len, block_n) * batch", "max(kv_len // block_n, 1) * batch"),
        ("triton.cdiv(q_len, block_m) * batch", "max(q_len // block_m, 1) * batch"),
        ("        left,\n", "        left + 1,\n"),
    ),
    *slips(
        "backward",
        "_rows",
        ("grad_lse.contiguous()", "0 * grad_lse.contiguous()"),
        ("-(-q_len // 128) * 128", "-(-q_len // 32) * 32"),
        ("(triton.cdiv(rows_len, 32) * batch", "(triton.cdiv(q_len, 32) * batch"),
        ("*grad_out.stride()[:3]", "*out.stride()[:3]"),
    ),
]


def _of_another_window(left: int, right: int) -> Callable[[KernelPlan], KernelPlan]:
    """The plan of a wider or a narrower window: the oracle runs the user's own function."""
    wider = sliding_window(Int("left", 1024, min=0) + left, right, align="bottom_right")
    return lambda plan: lower(replace(plan.spec, mask=wider), plan.name)


MASKS = [
    Mutant(
        f"a window of {left} more and {right} ahead",
        "forward",
        edit_plan=_of_another_window(left, right),
    )
    for left, right in ((1, 0), (-1, 0), (0, 1))
]

MUTANTS = [*PLANS, *MASKS, *FORWARD, *BACKWARD, *LAUNCHER]

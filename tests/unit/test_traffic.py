"""Tiles, FLOPs and bytes: against a count of the mask itself, and against formulas of the text."""

import pytest

from flashgen import AttentionSpec, Tensor, causal, full, sliding_window
from flashgen.budget.targets import get_target
from flashgen.budget.traffic import Visit, Workload, traffic, visited_tiles
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan, lower

H200 = get_target("sm_90")


def plan(mask=None, head_dim=64) -> KernelPlan:
    return lower(AttentionSpec(head_dim, mask=full() if mask is None else mask), "x")


def square(length: int) -> Workload:
    return Workload(1, 1, 1, length, length)


def counted(sees, config: KernelConfig, q_len: int, kv_len: int) -> list[Visit]:
    """Tiles with a visible key, and among them those whose every key every row sees."""
    visits = []
    for q in range(0, q_len, config.BLOCK_M):
        rows = range(q, min(q + config.BLOCK_M, q_len))
        full_tiles = masked_tiles = 0
        for k in range(0, kv_len, config.BLOCK_N):
            seen = [j < kv_len and sees(i, j) for i in rows for j in range(k, k + config.BLOCK_N)]
            full_tiles += all(seen)
            masked_tiles += any(seen) and not all(seen)
        visits.append(Visit(full_tiles, masked_tiles))
    return visits


MASKS = {
    "full": (full(), lambda i, j: True),
    "causal": (causal(align="top_left"), lambda i, j: i >= j),
    "window": (sliding_window(20, 3, align="top_left"), lambda i, j: i - 20 <= j <= i + 3),
    "two windows": (
        (sliding_window(7, 0, align="top_left") | ~causal(align="top_left")),
        lambda i, j: i - 7 <= j <= i or j > i,
    ),
    "sink and window": (
        causal(align="top_left") & (lambda b, h, q, k: (k < 10) | (k >= q - 12)),
        lambda i, j: i >= j and (j < 10 or j >= i - 12),
    ),
}


@pytest.mark.parametrize("lengths", [(64, 64), (70, 50), (33, 97), (1, 5)], ids=str)
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_visited_tiles_are_those_that_the_mask_shows(name, blocks, lengths) -> None:
    mask, sees = MASKS[name]
    config = KernelConfig(*blocks, num_warps=4, num_stages=2)
    work = Workload(1, 1, 1, *lengths)
    assert list(visited_tiles(plan(mask), *blocks, work)) == counted(sees, config, *lengths)


def test_a_full_square_takes_4_s_s_d_flops() -> None:
    account = traffic(plan(), KernelConfig(128, 64, 4, 2), H200, square(1024))
    assert account.flops == 4 * 1024 * 1024 * 64
    assert account.exponentials == 1024 * 1024 + 1024 * (1024 // 64)
    assert (account.programs, account.full_tiles, account.masked_tiles) == (8, 8 * 16, 0)


def test_padding_columns_are_computed_but_not_read() -> None:
    """A head of 72 is computed as 64 + 16 columns."""
    config = KernelConfig(128, 64, 4, 2)
    account = traffic(plan(head_dim=72), config, H200, square(1024))
    assert account.flops == 4 * 1024 * 1024 * 80
    once = 4 * 1024 * 72 * 2 + 4 * 1024
    assert account.dram_bytes == once


def test_l2_gives_keys_to_every_query_tile_and_dram_to_none_twice() -> None:
    config = KernelConfig(128, 64, 4, 2)
    work = Workload(batch=2, num_q_heads=8, num_kv_heads=2, q_len=1024, kv_len=2048)
    account = traffic(plan(), config, H200, work)
    queries, keys = 2 * 8 * 1024 * 64 * 2, 2 * 2 * 2048 * 64 * 2
    lse = 2 * 8 * 1024 * 4
    assert account.dram_bytes == 2 * queries + lse + 2 * keys
    per_head = 2 * 2048 * 64 * 2
    assert account.l2_bytes == 2 * queries + lse + 2 * 8 * (1024 // 128) * per_head


def test_keys_that_l2_cannot_hold_come_again_for_every_round_of_programs() -> None:
    config = KernelConfig(128, 64, 4, 2)
    small_l2 = get_target("sm_86")
    long = square(1 << 17)  # 32 MiB of keys and values beside 6 MiB of L2
    account = traffic(plan(), config, small_l2, long)
    keys = 2 * (1 << 17) * 64 * 2
    rounds = (account.dram_bytes - keys - 4 * (1 << 17)) / keys
    assert rounds == pytest.approx((1 << 17) / 128 / small_l2.num_sms, rel=1e-3)
    assert traffic(plan(), config, get_target("sm_89"), long).dram_bytes < account.dram_bytes


def test_a_parameter_has_the_workloads_value() -> None:
    from flashgen import Int

    kernel = plan(sliding_window(Int("left", default=1024), 0))
    config = KernelConfig(64, 64, 4, 2)
    wide = Workload(1, 1, 1, 4096, 4096, (("left", 1024),))
    narrow = Workload(1, 1, 1, 4096, 4096, (("left", 64),))
    assert (
        traffic(kernel, config, H200, wide).flops > 6 * traffic(kernel, config, H200, narrow).flops
    )


BIAS = Tensor("bias", ("batch", "num_q_heads", "q_len", "kv_len"), "bfloat16")
OF_KEYS = Tensor("of_keys", ("batch", "kv_len"))
OF_ROWS = Tensor("of_rows", ("batch", "q_len"))
BY_DISTANCE = Tensor("by_distance", ("num_q_heads", None), "float16")
LEVELS = Tensor("levels", ("q_len", "kv_len"), "int32")


def biased(score, mask=None) -> KernelPlan:
    return lower(AttentionSpec(64, mask=full() if mask is None else mask, score=score), "x")


@pytest.mark.parametrize(
    ("score", "of_a_tile", "once"),
    [
        (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], 128 * 64 * 2, 2 * 4 * 300 * 200 * 2),
        (lambda s, b, h, q, kv: s + BY_DISTANCE[h, q - kv + 199], 128 * 64 * 2, 4 * 500 * 2),
        (lambda s, b, h, q, kv: s + OF_KEYS[b, kv], 64 * 4, 2 * 200 * 4),
        (lambda s, b, h, q, kv: s * (1 + OF_ROWS[b, q] * OF_ROWS[b, q]), 0, 0),
    ],
    ids=["scores", "distances", "columns", "rows"],
)
def test_elements_are_read_for_each_tile_and_once_from_dram(score, of_a_tile, once) -> None:
    """24 programs of 4 tiles each; a tensor of any size has an entry for each distance."""
    config, work = KernelConfig(128, 64, 4, 2), Workload(2, 4, 2, 300, 200)
    account, plain = (traffic(p, config, H200, work) for p in (biased(score), plan()))
    assert account.element_bytes == 24 * 4 * of_a_tile
    assert account.l2_bytes - plain.l2_bytes == account.element_bytes
    assert account.dram_bytes - plain.dram_bytes == once


def test_elements_that_no_tile_reads_do_not_come_from_dram() -> None:
    config, window = KernelConfig(64, 64, 4, 2), sliding_window(100, 0)
    kernel = biased(lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], window)
    account, plain = (traffic(p, config, H200, square(4096)) for p in (kernel, plan(window)))
    assert account.dram_bytes - plain.dram_bytes == account.element_bytes < 4096 * 4096 * 2 / 10


def test_what_the_mask_alone_reads_is_read_where_it_masks() -> None:
    kernel = plan(causal() | (lambda b, h, q, kv: LEVELS[q, kv] > 3))
    account = traffic(kernel, KernelConfig(64, 64, 4, 2), H200, square(1024))
    assert account.full_tiles == 16 * 15 // 2 and account.masked_tiles == 16 * 17 // 2
    assert account.element_bytes == account.masked_tiles * 64 * 64 * 4

"""The account of other algorithms: the figures of a notebook, of an article and of a paper."""

from dataclasses import replace

import pytest

from flashgen.budget.targets import get_target
from flashgen.explain.algorithms import (
    ALGORITHMS,
    FLASH_1,
    FLASH_1_SCORES,
    FLASH_1_TILES,
    ONE_D,
    ONLINE,
    ONLINE_PEAK,
    STANDARD,
    TWO_D,
    largest_side,
)
from flashgen.explain.limits import bound_of, crossover, seconds_of
from flashgen.explain.training import FLASH_1_STEP, STANDARD_STEP
from flashgen.symbols import evaluate

#: The notebook's simulated A100, which counts in floats, and has no cache.
SRAM = 131_072
ONE_HEAD = {
    "heads": 1, "key_heads": 1, "qk_head_dim": 128, "v_head_dim": 128, "itemsize": 1,
    "masks": 0, "scores": 0, "drops": 0,
}  # fmt: skip


def moved(algorithm, length: int) -> tuple[int, int]:
    """Floats read and written by its largest tiles."""
    values = {**ONE_HEAD, "q_len": length, "kv_len": length}
    values["side"] = largest_side(algorithm.sram, SRAM, values)
    return tuple(evaluate(x.of_sms, values) for x in (algorithm.read, algorithm.written))


def test_the_notebooks_largest_tiles() -> None:
    tiled = largest_side(TWO_D.sram, SRAM, ONE_HEAD)
    online = largest_side(ONLINE.sram, SRAM, ONE_HEAD)
    assert (tiled, online) == (217, 158)
    used = evaluate(TWO_D.sram, {**ONE_HEAD, "side": tiled})
    peak = evaluate(ONLINE_PEAK, {**ONE_HEAD, "side": online})
    assert (f"{used / SRAM:.0%}", f"{peak / SRAM:.0%}") == ("100%", "85%")


def test_the_notebooks_traffic() -> None:
    assert moved(TWO_D, 32_768) == (3_426_746_368, 2_151_677_952)
    assert moved(ONLINE, 32_768) == (1_749_024_768, 4_194_304)


@pytest.mark.parametrize(
    ("length", "tiled", "online", "ratio"),
    [
        (1024, 11, 4, 2.8),
        (4096, 168, 54, 3.1),
        (16384, 2664, 840, 3.2),
        (32768, 10640, 3344, 3.2),
        (65536, 42496, 13312, 3.2),
        (131072, 169856, 53184, 3.2),
    ],
)
def test_the_notebooks_table(length, tiled, online, ratio) -> None:
    """In MB of two-byte floats."""
    totals = [sum(moved(algorithm, length)) for algorithm in (TWO_D, ONLINE)]
    assert [round(2 * total / 2**20) for total in totals] == [tiled, online]
    assert round(totals[0] / totals[1], 1) == ratio


def test_1d_tiling_reads_everything_once_and_ends_where_keys_fill_the_sram() -> None:
    """The notebook's words for it: O(N) traffic, but K and V overflow."""
    assert moved(ONE_D, 256) == (3 * 256 * 128, 256 * 128)
    values = {**ONE_HEAD, "q_len": 1, "kv_len": 511}
    assert largest_side(ONE_D.sram, SRAM, {**values, "kv_len": 510}) == 0
    assert largest_side(ONE_D.sram, SRAM, {**values, "kv_len": 508}) == 1


def test_the_articles_sram() -> None:
    """48 KB of tiles and 32 KB of scores: 128 x 128, d=64, in two bytes."""
    values = {"BLOCK_M": 128, "BLOCK_N": 128, "qk_head_dim": 64, "v_head_dim": 64, "itemsize": 2}
    assert evaluate(FLASH_1_TILES, values) == 48 * 1024
    assert evaluate(FLASH_1_SCORES, values) == 32 * 1024
    assert evaluate(FLASH_1.sram, values) == 80 * 1024


def test_the_articles_crossover() -> None:
    """161 FLOP a byte, of an A100 with 312 TFLOP/s and 1,935 GB/s: the PCIe board's memory."""
    a100 = replace(get_target("sm_80"), dram_gbps=1935)
    assert round(crossover(a100, "bf16")) == 161
    assert crossover(get_target("sm_80"), "bf16") == 312e3 / 2039


def test_beyond_the_crossover_products_take_longest() -> None:
    target = get_target("sm_80")
    at = crossover(target, "bf16")
    for intensity, unit in ((0.9 * at, "memory"), (1.1 * at, "compute")):
        seconds = seconds_of(target, "bf16", flops=intensity * 1e9, dram=1e9, exponentials=0, l2=0)
        assert bound_of(seconds) == unit


#: GPT-2 medium on an A100, as the FlashAttention paper's table has it: a step of 64 sequences of
#: 1024 tokens, forward and backward, causal, with dropout. Key tiles of 256.
PAPER = {
    "heads": 64 * 16, "key_heads": 64 * 16, "q_len": 1024, "kv_len": 1024,
    "qk_head_dim": 64, "v_head_dim": 64, "itemsize": 2, "masks": 1, "scores": 0, "drops": 1,
    "BLOCK_M": 128, "BLOCK_N": 256, "full_tiles": 64 * 16 * 8 * 4, "masked_tiles": 0,
}  # fmt: skip


def test_the_papers_bytes() -> None:
    """40.3 GB is met. 4.4 GB is 3 % less than Algorithm 1 and 4 move, with statistics of rows."""
    standard, flash = (evaluate(step.bytes, PAPER) / 1e9 for step in (STANDARD_STEP, FLASH_1_STEP))
    assert round(standard, 1) == 40.3
    assert flash == pytest.approx(4.4, rel=0.03)
    assert round(standard / flash) == 9


def test_the_papers_flops() -> None:
    """66.6 and 75.2 are not met: by the shapes that the table states, they are of another shape.

    One product of those shapes is 137 GFLOP, so that a step of 6 is 825 and not 66.6. What does
    agree is what FlashAttention does more, one product to make the scores again, if it is of one
    head instead of 16: 8.6 GFLOP. Of one head a step is 51.5 and 60.1 GFLOP in products, three
    quarters and four fifths of the table's. The rest is not said; softmax, mask and dropout would
    have to take 220 FLOPs a score, and take about a dozen.
    """
    standard, flash = (evaluate(step.flops, PAPER) / 1e9 for step in (STANDARD_STEP, FLASH_1_STEP))
    product = 2 * 1024 * 1024 * 64 * 64 * 16 / 1e9
    assert (standard, flash) == pytest.approx((6 * product, 7 * product))
    assert round((flash - standard) / 16, 1) == round(75.2 - 66.6, 1)
    assert flash / standard == pytest.approx(75.2 / 66.6, rel=0.04)
    assert standard / 16 == pytest.approx(66.6, rel=0.23)
    assert flash / 16 == pytest.approx(75.2, rel=0.21)


def test_the_loop_orders_differ_by_what_is_of_queries() -> None:
    """FlashAttention-1 reads keys once and queries for each key tile; its successor vice versa."""
    values = {**PAPER, "side": 256, "num_sms": 108, "full_tiles": 64 * 16 * 8 * 4}
    q = out = 64 * 16 * 1024 * 64 * 2
    statistics = 64 * 16 * 1024 * 8
    assert evaluate(FLASH_1.read.of_sms, values) == 2 * q + 4 * q + 3 * (out + statistics)
    assert evaluate(FLASH_1.written.of_sms, values) == 4 * (out + statistics)
    assert evaluate(ONLINE.read.of_sms, values) == q + 4 * 2 * q
    assert evaluate(ONLINE.written.of_sms, values) == out


def test_dram_sees_once_what_l2_holds() -> None:
    values = {**PAPER, "side": 256, "num_sms": 108}
    values["sharers"] = evaluate(ONLINE.sharers, values)
    assert values["sharers"] == 4
    q = 64 * 16 * 1024 * 64 * 2
    assert evaluate(ONLINE.read.of_dram(True), values) == 3 * q
    # Four tiles of queries side by side share what they read.
    assert evaluate(ONLINE.read.of_dram(False), values) == 3 * q
    assert evaluate(ONLINE.read.of_dram(False), {**values, "sharers": 2}) == q + 2 * 2 * q


@pytest.mark.parametrize("extra", ["masks", "scores", "drops"])
def test_standard_attention_pays_for_each_step_by_itself(extra) -> None:
    bare = {**PAPER, "masks": 0, "drops": 0}
    more = {**bare, extra: 1}
    scores = 64 * 16 * 1024 * 1024
    for flow in (STANDARD.read, STANDARD.written):
        kept = scores if extra == "drops" and flow is STANDARD.written else 0
        assert evaluate(flow.of_sms, more) - evaluate(flow.of_sms, bare) == 2 * scores + kept


def test_each_algorithm_has_a_name_of_its_own() -> None:
    assert len({algorithm.name for algorithm in ALGORITHMS}) == len(ALGORITHMS) == 5

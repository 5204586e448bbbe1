"""Many queries of a cache's sequences: which of them the Gluon forward kernel computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.budget.targets import get_target
from flashgen.config import HOPPER, KernelChoice, KernelConfig
from flashgen.forms.base import Held
from flashgen.forms.varlen import MORE_SHARED, packed_gluon, why_no_gluon
from flashgen.kernels.forward_hopper.kernel import ForwardHopper
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.forward_hopper.shared_memory import worst_hopper_usage
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import KernelPlan
from flashgen.symbolic.printer import torch_source
from flashgen.symbols import KV_LEN, Q_FIRST, Q_LAST, Q_LEN, Load

#: Rows of a sequence in tiles of one head, or of several that share keys, and keys of a page from
#: which on the Gluon kernel may compute a call. A tile of two consumers is then half full.
LEAST_ROWS, LEAST_PAGE = 64, 16

#: Rows of a tile of two consumers, and the rows that three compute in the same time: on an H100
#: tiles of 192 had up to 15% the rate of tiles of 128 more. That is of tiles of as many keys. Two
#: consumers leave registers for tiles of twice as many, by which they gain 4% at d=128.
TWO_CONSUMERS, SLOWER, SLOWER_OF_MORE_KEYS = 128, 147, 141

#: What a tile of queries takes besides its tiles of keys, in their time: to load its first
#: operands, and to store its output. A part's output has twice the bytes, and leaves registers
#: through pointers. Fitted to an H100's times of 1, 2, 3 and 8 parts, as LAUNCH is.
OF_TILE, OF_PART = 2, 10

#: Of an H100: FLOP/s of the kernel, bytes a second that the kernel which merges parts reads after
#: the other one has written them, most of them in L2, and seconds until it begins.
FLOPS, BYTES, LAUNCH, SMS = 740e12, 3e12, 12e-6, 132

#: What a call whose tiles fill less than half of the SMs needs for the Gluon kernel: rows of a
#: sequence for a full tile, and pairs of rows and keys. On an H100 it took 75 and 68 us of 2^26
#: pairs where the other kernel took 92 and 87, and 40 of 2^24 where that took 37.
FULL_ROWS, LEAST_PAIRS = 128, 2**25

#: The most rounds of tiles for which keys are divided into parts: with more the last round counts
#: for little.
MOST_ROUNDS = 4

#: How many times as fast parts have to be by this model.
AT_LEAST = 1.05

#: Rows of a program that merges parts.
ROWS_MERGED = 16

#: The kernel that computes them.
Kernel = ForwardHopper


def gluon_kernel(plan: KernelPlan, held: Held) -> Kernel | None:
    """The Gluon forward kernel of a module's packed sequences, if it has one."""
    kernels = packed_gluon(plan, held)
    return next((kernel for kernel in kernels if isinstance(kernel, Kernel)), None)


@dataclass(frozen=True)
class Call:
    """The shapes of a call, by which a module chooses the kernel.

    Attributes:
        batch: sequences.
        q_len: queries of each.
        num_q_heads, num_kv_heads: heads.
        capacity: the most keys that a sequence can have.
        page_size: keys of a page, 0 for none.
        sms: SMs of the GPU.
    """

    batch: int
    q_len: int
    num_q_heads: int
    num_kv_heads: int
    capacity: int
    page_size: int
    sms: int

    def packed(self, plan: KernelPlan) -> int:
        """The heads that have rows in a tile."""
        group = self.num_q_heads // self.num_kv_heads
        return min(group & -group, 64) if HopperNames(plan, True, True).packs else 1


def serves(plan: KernelPlan, call: Call) -> bool:
    """Whether it may compute a call: by its variant, its pages and the rows of a tile."""
    if Kernel().why_not(plan) or why_no_gluon(plan):
        return False
    if call.page_size and (call.page_size < LEAST_PAGE or not plan.tiles.from_key_0):
        return False
    return call.q_len * call.packed(plan) >= LEAST_ROWS


def fills(plan: KernelPlan, call: Call) -> bool:
    """Whether its tiles keep enough SMs busy, or have enough to do: else it takes longer."""
    packed = call.packed(plan)
    of_sequence = call.q_len * packed
    tiles = -(-of_sequence // FULL_ROWS) * call.batch * (call.num_q_heads // packed)
    computed = -(-tiles // call.sms) * call.sms * FULL_ROWS
    rows = call.batch * call.q_len * call.num_q_heads
    if computed <= 2 * rows:
        return True
    return of_sequence >= FULL_ROWS and rows * call.capacity >= LEAST_PAIRS


def names(plan: KernelPlan, choice: KernelChoice | None) -> Mapping[str, Any]:
    """What templates print of it; its choice is None if it serves no cache."""
    gluon = choice is not None
    found: dict[str, Any] = {
        "cached_gluon": gluon,
        "cached_pages": gluon and plan.tiles.from_key_0,
        "cached_packs": gluon and HopperNames(plan, True, True).packs,
        "least_rows": LEAST_ROWS,
        "least_page": LEAST_PAGE,
        "full_rows": FULL_ROWS,
        "least_pairs": LEAST_PAIRS,
    }
    if choice is None:
        return found
    of_merge, of_merged_row = _merging(plan, choice)
    return found | {
        "cache_tiles": _tiles(plan, choice),
        "unit_keys": _config(choice).BLOCK_N,
        "of_tile": OF_TILE,
        "of_part": OF_PART,
        "of_merge": of_merge,
        "of_merged_row": of_merged_row,
        "rounds_end": MOST_ROUNDS + 1,
        "at_least": AT_LEAST,
        "rows_merged": ROWS_MERGED,
        "keys_of_tile": keys_of_tile(plan, _config(choice).BLOCK_M),
    }


def merged(plan: KernelPlan) -> Mapping[str, Any]:
    """What the template of the kernel prints that merges parts of the keys."""
    return {
        "columns": plan.v_head_dim,
        "width": 1 << (plan.v_head_dim - 1).bit_length(),
        "sigmoid": plan.normaliser == "sigmoid",
    }


def keys_of_tile(plan: KernelPlan, rows: int) -> str:
    """How many keys a sequence's last tile of so many queries visits, of ``capacity`` keys.

    ``""`` where they are all of its keys, or where only the device knows the bounds.
    """
    last = {Q_FIRST: sympy.Max(0, Q_LEN - rows), Q_LAST: Q_LEN - 1}
    counts = [
        sympy.Max(0, interval.end.subs(last) - interval.begin.subs(last))
        for interval in plan.bounds.intervals
    ]
    number = sympy.Add(*counts)
    if number == KV_LEN or number == sympy.Max(0, KV_LEN) or number.has(Load):
        return ""
    return torch_source(number, {"kv_len": "capacity"})


def _config(choice: KernelChoice) -> KernelConfig:
    """The configuration of the dense kernel, which tiles of a cache have first."""
    return max((chosen.config for chosen in choice.configs.values()), key=lambda x: x.BLOCK_M)


def _tiles(plan: KernelPlan, choice: KernelChoice) -> tuple[tuple[int, int, int, int], ...]:
    """The tiles that a call may have: rows, keys, stages, and the time of `_config`'s keys.

    Where that has three consumers, two may save rounds: with the best keys for them, by the model.
    """
    first = _config(choice)
    rows, keys = first.BLOCK_M, first.BLOCK_N
    tiles = [(rows, keys, first.num_stages, rows)]
    if rows > TWO_CONSUMERS:
        room = get_target(HOPPER).max_shared - MORE_SHARED
        two = [
            config
            for config in hopper_space(plan).candidates
            if config.BLOCK_M == TWO_CONSUMERS and worst_hopper_usage(plan, config).total <= room
        ]
        best = rank_hopper(plan, two)[0] if two else first
        time = SLOWER if keys == best.BLOCK_N else SLOWER_OF_MORE_KEYS
        tiles.append((TWO_CONSUMERS, best.BLOCK_N, best.num_stages, time))
    return tuple(tiles)


def _merging(plan: KernelPlan, choice: KernelChoice) -> tuple[int, float]:
    """What merging takes: once, and for a row of a part, by a program.

    In the time that a program takes for a row and a tile of keys.
    """
    flops = 2 * (plan.qk_head_dim + plan.v_head_dim) * _config(choice).BLOCK_N
    of_row = flops * SMS / FLOPS
    bytes_of_row = 2 * 4 * plan.v_head_dim  # float32, written and read
    return round(LAUNCH / of_row), round(bytes_of_row / BYTES * SMS / of_row, 1)

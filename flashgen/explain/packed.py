"""PackedAccount: what ``flashgen explain --form varlen`` shows of a variant and packed sequences.

Plain data, as `flashgen.explain.account` has it of a dense call.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Traffic, Visit, Workload, visited_tiles
from flashgen.config import HOPPER, ChosenConfig, KernelChoice, KernelConfig
from flashgen.errors import FlashgenError
from flashgen.explain.account import Run, Subject, Timed
from flashgen.explain.call import Asked, described, workload
from flashgen.explain.limits import bound_of, operand, seconds_of
from flashgen.explain.variant import prepare, run_account, valid_variants
from flashgen.explain.works import kernel_traffic
from flashgen.forms.registry import why_no_form
from flashgen.forms.varlen import packed_gluon, why_no_gluon
from flashgen.kernels.base import ForwardKernel
from flashgen.kernels.forward_hopper.pack_gqa import launched
from flashgen.kernels.workload import TOKENS
from flashgen.loader import Variant
from flashgen.plan import KernelPlan, lower
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import plain_source

#: The key of the Gluon kernel of the forward pass, and a module's L2_BYTES.
HOPPER_KEY, L2_BYTES = "hopper", 24 * 2**20

#: The most sequences of a packing, and tiles of queries of all heads, that are looked at.
MOST_SEQUENCES, MOST_TILES = 2**16, 2**20


@dataclass(frozen=True)
class Packing:
    """Sequences by the command line; None is the usual value.

    Attributes:
        lengths: the queries of each sequence, as text: ``"4096,16x256"``.
        kv_lengths: its keys, likewise; usually as many as queries.
        sms: SMs of the GPU; usually those of the target's.
    """

    lengths: str | None = None
    kv_lengths: str | None = None
    sms: int | None = None


@dataclass(frozen=True)
class Sequences:
    """The lengths of a packing.

    Attributes:
        count: sequences.
        shortest, longest: queries of one.
        queries, keys: of all sequences.
        longest_keys: keys of one.
    """

    count: int
    shortest: int
    longest: int
    queries: int
    keys: int
    longest_keys: int


@dataclass(frozen=True)
class Tiles:
    """What the kernel visits.

    Attributes:
        of_queries: tiles of queries of a head.
        empty_rows: the share of their rows that hold no query.
        unmasked, masked: tiles of keys that all heads visit.
        padded: how many of both a dense call visits that pads all sequences to the longest.
    """

    of_queries: int
    empty_rows: float
    unmasked: int
    masked: int
    padded: int


@dataclass(frozen=True)
class Balance:
    """How tiles are shared out.

    Attributes:
        programs: that run at once.
        busiest: the visits of the busiest program, in terms of the mean of all.
    """

    programs: int
    busiest: float


@dataclass(frozen=True)
class PackedAccount(Timed, Subject):
    """The account of a forward pass of packed sequences.

    Attributes:
        label: the mask's name.
        conditions: the conditions of its predicate.
        runs: the keys that a tile of queries visits, as formulas.
        kernel: ``"hopper"`` or ``"portable"``.
        without: why the Gluon kernel does not run on a target that could; ``""`` if it does.
        config: the kernel's configuration for these lengths.
        sequences: the lengths.
        tiles: what is visited.
        balance: how it is shared out.
        flops: floating-point operations of both products.
        exponentials: of the softmax.
        l2, dram: bytes between L2 and the SMs, and of DRAM.
        seconds: the time that each unit takes by itself at its peak rate.
        bound: the unit that takes longest.
    """

    label: str
    conditions: tuple[str, ...]
    runs: tuple[Run, ...]
    kernel: str
    without: str
    config: KernelConfig
    sequences: Sequences
    tiles: Tiles
    balance: Balance
    flops: int
    exponentials: int
    l2: int
    dram: int
    seconds: dict[str, float]
    bound: str


def explain_packed(
    paths: Iterable[Path], target: str | None, asked: Asked, packing: Packing, out: Path
) -> Iterator[PackedAccount]:
    """The account of every variant that the spec files declare, whether or not it has the form.

    Raises:
        FlashgenError: the specs or the lengths are wrong, or a variant cannot have the form.
    """
    for variant in valid_variants(paths, target):
        yield explain_variant_packed(variant, target, asked, packing, out)


def explain_variant_packed(
    variant: Variant, target: str | None, asked: Asked, packing: Packing, out: Path
) -> PackedAccount:
    """The account of one variant whose spec is valid.

    Raises:
        FlashgenError: the variant has no such form, or no such lengths.
    """
    q_lens, kv_lens = lengths_of(variant, lower(variant.spec, variant.name), packing)
    prepared = prepare(variant, target, out)
    plan, architecture = prepared.plan, get_target(prepared.target)
    sequences = tuple(zip(q_lens, kv_lens, strict=True))
    key, without = _kernel(plan, prepared.target, prepared.chosen.configs)
    kernel, config = prepared.chosen.kernels[key], prepared.chosen.configs[key].config
    longest = replace(asked, q_len=max(1, *q_lens), kv_len=max(1, *kv_lens), batch=len(sequences))
    work = workload(plan, longest)
    if key == HOPPER_KEY:
        mean = replace(work, q_len=max(1, sum(q_lens) // len(q_lens)))
        config = launched(plan, config, mean, 1)
    return _account(
        variant, plan, architecture, _Call(kernel, config, work, sequences), without, packing.sms
    )


def lengths_of(
    variant: Variant, plan: KernelPlan, packing: Packing
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The queries and the keys of each sequence.

    Raises:
        FlashgenError: the variant has no such form, or no such lengths.
    """
    if why_not := why_no_form("varlen", plan):
        raise FlashgenError(f"{variant.name}: --form=varlen: {why_not}")
    if packing.sms is not None and not 1 <= packing.sms <= 2**16:
        raise FlashgenError(f"--sms={packing.sms}: out of range; write a number from 1 to 65536")
    q_lens = usual_packing() if packing.lengths is None else _lengths("lengths", packing.lengths)
    kv_lens = q_lens
    if packing.kv_lengths is not None:
        kv_lens = _lengths("kv-lengths", packing.kv_lengths)
        if len(kv_lens) != len(q_lens):
            raise FlashgenError(
                f"--kv-lengths: {len(kv_lens)} sequences, --lengths has {len(q_lens)}"
            )
    if plan.equal_lengths and kv_lens != q_lens:
        raise FlashgenError(f"{variant.name}: --kv-lengths: {plan.refuses_lengths}")
    return q_lens, kv_lens


def summary(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Sequences:
    """What is shown of lengths."""
    return Sequences(len(q_lens), min(q_lens), max(q_lens), sum(q_lens), sum(kv_lens), max(kv_lens))


def usual_packing(tokens: int = TOKENS) -> tuple[int, ...]:
    """Sequences that have half of the tokens, a quarter and so on; the last two are alike."""
    lengths = [tokens // 2]
    while lengths[-1] > 128:
        lengths.append(lengths[-1] // 2)
    return (*lengths, lengths[-1])


def _lengths(option: str, text: str) -> tuple[int, ...]:
    """``"4096,2x256"`` -> ``(4096, 256, 256)``."""
    lengths: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:(\d{1,6})\s*x\s*)?(\d{1,9})\s*", part)
        if found is None:
            raise FlashgenError(
                f"--{option}={text}: {part!r} is no length; write lengths as in 4096,16x256"
            )
        lengths += [int(found[2])] * int(found[1] or 1)
        if len(lengths) > MOST_SEQUENCES:
            raise FlashgenError(f"--{option}: over {MOST_SEQUENCES} sequences")
    if not lengths:
        raise FlashgenError(f"--{option}={text}: no sequence; write lengths as in 4096,16x256")
    return tuple(lengths)


def _kernel(plan: KernelPlan, target: str, configs: Mapping[str, ChosenConfig]) -> tuple[str, str]:
    """(key, why the Gluon kernel does not run) of the forward kernel."""
    held = {key: KernelChoice({target: config}) for key, config in configs.items()}
    if any(kernel.key == HOPPER_KEY for kernel in packed_gluon(plan, held)):
        return HOPPER_KEY, ""
    other = next(key for key in configs if key != HOPPER_KEY)
    return other, why_no_gluon(plan) if target == HOPPER else ""


@dataclass(frozen=True)
class _Call:
    """A kernel with its configuration, the call padded to the longest, and its sequences."""

    kernel: ForwardKernel
    config: KernelConfig
    work: Workload
    sequences: tuple[tuple[int, int], ...]

    def visits(self, plan: KernelPlan, q_len: int, kv_len: int) -> tuple[Visit, ...]:
        """The tiles of keys that each tile of a sequence's queries visits."""
        alone = replace(self.work, batch=1, q_len=q_len, kv_len=kv_len)
        return visited_tiles(plan, self.config.BLOCK_M, self.config.BLOCK_N, alone)


def _account(
    variant: Variant,
    plan: KernelPlan,
    target: Target,
    call: _Call,
    without: str,
    sms: int | None,
) -> PackedAccount:
    work, config, heads = call.work, call.config, call.work.num_q_heads
    q_lens, kv_lens = zip(*call.sequences, strict=True)
    number = sum(-(-q_len // config.BLOCK_M) for q_len in q_lens)
    if number * heads > MOST_TILES:
        raise FlashgenError(
            f"--lengths: {number * heads:,} tiles of queries; explain looks at {MOST_TILES:,}"
        )
    used = replace(target, num_sms=sms or target.num_sms)
    parts = [
        (count, _traffic(plan, target, call, q_len, kv_len))
        for (q_len, kv_len), count in Counter(call.sequences).items()
        if q_len and kv_len
    ]
    total = {
        name: sum(count * getattr(part, name) for count, part in parts)
        for name in (
            "full_tiles",
            "masked_tiles",
            "flops",
            "exponentials",
            "l2_bytes",
            "dram_bytes",
        )
    }
    padded = call.visits(plan, work.q_len, work.kv_len)
    seconds = seconds_of(
        used,
        operand(plan),
        flops=total["flops"] * target.num_sms / used.num_sms,  # the rate is that of all SMs
        exponentials=total["exponentials"],
        dram=total["dram_bytes"],
        l2=total["l2_bytes"],
    )
    return PackedAccount(
        variant=variant.name,
        file=variant.file or "",
        target=target.name,
        gpu=target.gpus[0],
        dtype=plan.torch_dtype,
        head_dims=(plan.qk_head_dim, plan.v_head_dim),
        call=described(plan, work),
        label=plan.predicate.label,
        conditions=tuple(map(plain_source, conditions(plan.predicate.expr))),
        runs=tuple(map(run_account, plan.bounds.intervals)),
        kernel=call.kernel.key,
        without=without,
        config=config,
        sequences=summary(q_lens, kv_lens),
        tiles=Tiles(
            of_queries=number,
            empty_rows=1 - sum(q_lens) / (number * config.BLOCK_M) if number else 0.0,
            unmasked=total["full_tiles"],
            masked=total["masked_tiles"],
            padded=len(q_lens) * heads * sum(visit.full + visit.masked for visit in padded),
        ),
        balance=_balance(plan, call, used),
        flops=total["flops"],
        exponentials=total["exponentials"],
        l2=total["l2_bytes"],
        dram=total["dram_bytes"],
        seconds=seconds,
        bound=bound_of(seconds),
    )


def _traffic(plan: KernelPlan, target: Target, call: _Call, q_len: int, kv_len: int) -> Traffic:
    """That of one sequence."""
    alone = replace(call.work, batch=1, q_len=q_len, kv_len=kv_len)
    visits = call.visits(plan, q_len, kv_len)
    return kernel_traffic(plan, target, alone, call.kernel, call.config, visits, 1)


def _balance(plan: KernelPlan, call: _Call, target: Target) -> Balance:
    """Each program takes the next tile of queries when it has computed one."""
    tiles = list(_in_order(plan, call))
    programs = min(target.num_sms, max(1, len(tiles)))
    done = [0] * programs
    for visits in tiles:
        heapq.heapreplace(done, done[0] + visits)
    mean = sum(done) / programs
    return Balance(programs, max(done) / mean if mean else 1.0)


def _in_order(plan: KernelPlan, call: _Call) -> Iterator[int]:
    """The visits of the tiles of all heads, in the order in which they are computed."""
    heads = call.work.num_q_heads
    sequences = [
        [max(visit.full + visit.masked, 1) for visit in call.visits(plan, q_len, kv_len)]
        for q_len, kv_len in call.sequences
        if q_len and kv_len
    ]
    if call.kernel.key != HOPPER_KEY:  # sequence by sequence, heads side by side
        last_first = plan.tiles.uneven and plan.bounds.longest_first != "first"
        for of_sequence in sequences:
            for visits in reversed(of_sequence) if last_first else of_sequence:
                yield from [visits] * heads
        return
    of_head = [visits for of_sequence in sequences for visits in of_sequence]
    together = _heads_together(plan, call) if plan.tiles.uneven else 1
    if plan.tiles.uneven and plan.bounds.longest_first != "first":
        of_head.reverse()
    for _ in range(heads // together):
        for visits in of_head:
            yield from [visits] * together


def _heads_together(plan: KernelPlan, call: _Call) -> int:
    """How many heads' tiles are handed out side by side: the launcher's `_heads_together`."""
    heads, kv_heads = call.work.num_q_heads, call.work.num_kv_heads
    keys = sum(kv_len for _, kv_len in call.sequences)
    head_bytes = max(1, keys * (plan.qk_head_dim + plan.v_head_dim) * plan.itemsize)
    most = max(1, L2_BYTES // head_bytes) * (heads // kv_heads)
    return min(heads & -heads, 1 << (most.bit_length() - 1))

"""FLOPs, bytes and seconds of each way to compute a call, the module's kernels among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashgen.budget.matrix_units import SMALLEST_SIDE
from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Traffic, Visit, Workload, traffic
from flashgen.config import KernelConfig
from flashgen.explain.account import Measured, TrainingStep, Work
from flashgen.explain.algorithms import ALGORITHMS, FLASH_1, SIDE, Algorithm, largest_side
from flashgen.explain.call import Asked, workload
from flashgen.explain.kernels import Chosen
from flashgen.explain.limits import bound_of, operand, seconds_of
from flashgen.explain.picture import picture_of
from flashgen.explain.training import FLASH_1_STEP, STANDARD_STEP
from flashgen.kernels.base import ForwardKernel
from flashgen.kernels.registry import kernels_of
from flashgen.kernels.workload import usual_lengths
from flashgen.plan import KernelPlan
from flashgen.symbols import KV_LEN, evaluate
from flashgen.tuning.store import TuneResult, best_for

_OWN = "2D tiles, online softmax, and no tile that the mask hides"
_OF_PRODUCTS = "2D tiles, products as weights without a softmax, and no tile that the mask hides"


def works(
    plan: KernelPlan,
    target: Target,
    work: Workload,
    kernels: Mapping[str, ForwardKernel],
    configs: Mapping[str, KernelConfig],
    visits: Mapping[str, Sequence[Visit]],
    heads: Mapping[str, int],
) -> tuple[Work, ...]:
    """The textbook's algorithms, then the module's kernels; the kernel that runs first is the last.

    Args:
        plan: the variant.
        target: the architecture.
        work: the call.
        kernels: the kernels of the module, by their keys.
        configs: the launch configuration of each.
        visits: for each kernel, the key tiles that each query tile of a head visits.
        heads: how many heads have rows in a tile of each kernel.
    """
    own = {
        key: kernel_traffic(plan, target, work, kernel, configs[key], visits[key], heads[key])
        for key, kernel in kernels.items()
    }
    first = next(iter(kernels))
    values = _values(plan, target, work, configs[first], own[first])
    textbook = () if plan.products else ALGORITHMS  # of a softmax
    others = [_textbook(algorithm, plan, target, work, values) for algorithm in textbook]
    accounts = [
        _kernel(plan, target, work, kernels[key], configs[key], own[key], heads[key])
        for key in reversed(list(kernels))
    ]
    return (*others, *accounts)


def training(
    plan: KernelPlan,
    target: Target,
    work: Workload,
    config: KernelConfig,
    visits: Sequence[Visit],
    heads: int,
) -> tuple[TrainingStep, ...]:
    """Both passes: with all scores in memory, of a softmax, and over this kernel's tiles."""
    account = traffic(plan, config, target, work, visits, heads)
    values = _values(plan, target, work, config, account)
    return tuple(
        TrainingStep(step.name, evaluate(step.flops, values), evaluate(step.bytes, values))
        for step in ((FLASH_1_STEP,) if plan.products else (STANDARD_STEP, FLASH_1_STEP))
    )


def measured(
    plan: KernelPlan, target: str, chosen: Chosen, results: Sequence[TuneResult]
) -> tuple[Measured, ...]:
    """The published configurations' rates at each length, beside the rooflines of those calls."""
    found = []
    for key, digest in chosen.digests.items():
        kernel = kernels_of(plan)[key]
        assert isinstance(kernel, ForwardKernel)
        best = best_for(results, target, digest, plan.spec.blocks)
        if best is None:
            continue
        result, measurement = best
        for length, ms, rate in zip(
            result.lengths, measurement.ms, measurement.tflops, strict=True
        ):
            if usual_lengths(plan, (length,)) != (length,):
                continue  # the module's constants are now too short for that call
            work = workload(plan, Asked(q_len=length))
            visits = picture_of(plan, work, measurement.config).visits
            account = kernel_traffic(
                plan, get_target(target), work, kernel, measurement.config, visits, 1
            )
            seconds = _seconds(plan, get_target(target), account)
            bound = bound_of(seconds)
            least = 1e3 * seconds[bound]
            found.append(
                Measured(
                    form=key,
                    gpu=result.gpu,
                    triton=result.triton,
                    length=length,
                    batch=work.batch,
                    heads=work.num_q_heads,
                    ms=ms,
                    tflops=rate,
                    roofline_ms=least,
                    bound=bound,
                    share=least / ms,
                )
            )
    return tuple(found)


def kernel_traffic(
    plan: KernelPlan,
    target: Target,
    work: Workload,
    kernel: ForwardKernel,
    config: KernelConfig,
    visits: Sequence[Visit],
    heads: int,
) -> Traffic:
    """The work of one of the module's kernels, with tiles that have rows of so many heads."""
    account = traffic(plan, config, target, work, visits, heads)
    rows = kernel.visiting(plan, config)
    if rows == config:
        return account
    # All of a tile's keys are loaded; each consumer computes with the keys that its queries see.
    computed = traffic(plan, rows, target, work, heads_of_a_tile=heads)
    return replace(account, flops=computed.flops, exponentials=computed.exponentials)


def _values(
    plan: KernelPlan, target: Target, work: Workload, config: KernelConfig, own: Traffic
) -> dict[str, Any]:
    """The number behind every symbol but the side of square tiles."""
    return {
        "heads": work.batch * work.num_q_heads,
        "key_heads": work.batch * work.num_kv_heads,
        "q_len": work.q_len,
        "kv_len": work.kv_len,
        "qk_head_dim": plan.qk_head_dim,
        "v_head_dim": plan.v_head_dim,
        "itemsize": plan.itemsize,
        "masks": int(plan.masks),
        "scores": int(plan.spec.score is not None),
        "drops": int(plan.dropout),
        "num_sms": target.num_sms,
        "full_tiles": own.full_tiles,
        "masked_tiles": own.masked_tiles,
        **config.as_dict(),
    }


def _textbook(
    algorithm: Algorithm,
    plan: KernelPlan,
    target: Target,
    work: Workload,
    values: Mapping[str, Any],
) -> Work:
    """An algorithm's work, with the largest square tile that fits, or with this kernel's tiles."""
    shared, tile, problem = None, "", ""
    if algorithm is FLASH_1:
        tile = f"{values['BLOCK_M']} x {values['BLOCK_N']}"
        shared = evaluate(algorithm.sram, values)
    elif algorithm.sram != 0:
        side = largest_side(algorithm.sram, target.max_shared, values)
        values = {**values, SIDE.name: max(side, SMALLEST_SIDE)}
        shared = evaluate(algorithm.sram, values)
        tile = f"{values[SIDE.name]} x {values[SIDE.name]}"
        if algorithm.sram.has(KV_LEN):
            tile = f"{values[SIDE.name]} rows"
        if side < SMALLEST_SIDE:
            problem = (
                f"needs {shared:,} B of shared memory, {target.name} has {target.max_shared:,} B"
            )
    values = {**values, "sharers": evaluate(algorithm.sharers, values)}
    held = 2 * evaluate(algorithm.held, values) <= target.l2_bytes  # as of this kernel
    dram = [evaluate(x.of_dram(held), values) for x in (algorithm.read, algorithm.written)]
    l2 = [evaluate(x.of_sms, values) for x in (algorithm.read, algorithm.written)]
    return _work(
        plan,
        target,
        name=algorithm.name,
        said=algorithm.said,
        tile=tile,
        shared=shared,
        problem=problem,
        flops=evaluate(algorithm.flops, values),
        exponentials=evaluate(algorithm.exponentials, values),
        l2=l2,
        dram=dram,
    )


def _kernel(
    plan: KernelPlan,
    target: Target,
    work: Workload,
    kernel: ForwardKernel,
    config: KernelConfig,
    own: Traffic,
    heads: int,
) -> Work:
    rows = work.batch * work.num_q_heads * work.q_len
    said = _OF_PRODUCTS if plan.products else _OWN
    written = rows * (plan.v_head_dim * plan.itemsize + 4)  # the output and its log-sum-exp
    return _work(
        plan,
        target,
        name=kernel.own,
        said=said if heads == 1 else f"{said}; a tile has rows of {heads} heads that share keys",
        tile=f"{config.BLOCK_M} x {config.BLOCK_N}",
        shared=None,
        problem="",
        flops=own.flops,
        exponentials=own.exponentials,
        l2=(own.l2_bytes - written, written),
        dram=(own.dram_bytes - written, written),
    )


def _work(
    plan: KernelPlan,
    target: Target,
    *,
    l2: Sequence[int],
    dram: Sequence[int],
    flops: int,
    exponentials: int,
    **fields: Any,
) -> Work:
    seconds = seconds_of(
        target,
        operand(plan),
        flops=flops,
        exponentials=exponentials,
        dram=sum(dram),
        l2=sum(l2),
    )
    return Work(
        flops=flops,
        exponentials=exponentials,
        l2_read=l2[0],
        l2_written=l2[1],
        dram_read=dram[0],
        dram_written=dram[1],
        intensity=flops / sum(dram),
        seconds=seconds,
        bound=bound_of(seconds),
        **fields,
    )


def _seconds(plan: KernelPlan, target: Target, account: Traffic) -> dict[str, float]:
    return seconds_of(
        target,
        operand(plan),
        flops=account.flops,
        exponentials=account.exponentials,
        dram=account.dram_bytes,
        l2=account.l2_bytes,
    )

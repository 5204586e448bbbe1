"""explain_variant: a spec and a call -> its account, by the steps of a build up to the choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.budget.targets import TARGETS, get_target
from flashgen.budget.traffic import Workload
from flashgen.config import HOPPER
from flashgen.errors import FlashgenError, ValidationError
from flashgen.explain.account import Account, MaskAccount, Measured, Run
from flashgen.explain.call import Asked, described, workload
from flashgen.explain.decided import answers_in_words
from flashgen.explain.kernels import Chosen, chosen_kernels, kernel_accounts
from flashgen.explain.limits import crossover, operand
from flashgen.explain.picture import Picture, picture_of
from flashgen.explain.visible import visible_share
from flashgen.explain.works import measured, training, works
from flashgen.kernels.base import ForwardKernel
from flashgen.loader import Variant, load
from flashgen.place import Place
from flashgen.plan import KernelPlan, lower
from flashgen.plan.pairs import is_linear
from flashgen.plan.quadratic import QuadraticPlan
from flashgen.symbolic import RowTable
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.tile_logic import tile_logic
from flashgen.tuning.store import load_results
from flashgen.validate import validate

#: The most cells of a picture in the account, each way; an output form may show fewer.
MOST_CELLS = 128


@dataclass(frozen=True)
class Prepared:
    """A variant with its data that no call changes.

    Attributes:
        variant: its name, file and spec.
        target: the architecture's name.
        plan: the plan lowered from its spec.
        chosen: its kernels for the target.
        measured: the measured results of these kernels.
    """

    variant: Variant
    target: str
    plan: KernelPlan
    chosen: Chosen
    measured: tuple[Measured, ...]


def explain(
    paths: Iterable[Path], target: str | None, asked: Asked, out: Path
) -> Iterator[Account]:
    """The account of every variant that the spec files declare.

    Args:
        paths: spec files, and folders of them.
        target: the architecture; None is Hopper, or the first that a spec names.
        asked: the known values of the call.
        out: the folder of the generated modules, beside which measured results lie.

    Raises:
        FlashgenError: the specs or the call are wrong.
    """
    for variant in valid_variants(paths, target):
        yield explain_variant(variant, target, asked, out)


def valid_variants(paths: Iterable[Path], target: str | None) -> list[Variant]:
    """The variants that the spec files declare.

    Raises:
        FlashgenError: the specs are wrong or of linear attention, or the target is unknown.
    """
    variants = all_variants(paths, target)
    for variant in variants:
        if is_linear(variant.spec):
            raise FlashgenError(
                f"{variant.file}: {variant.name}: linear attention visits no tiles of scores; "
                "`flashgen explain` has another account of it, without a page or a cache"
            )
    return variants


def all_variants(paths: Iterable[Path], target: str | None) -> list[Variant]:
    """The variants that the spec files declare, those of linear attention among them.

    Raises:
        FlashgenError: the specs are wrong, or the target is unknown.
    """
    if target is not None and target not in TARGETS:
        raise FlashgenError(f"--target={target}: unknown target; write one of {', '.join(TARGETS)}")
    variants = load(paths)
    if violations := [finding for variant in variants for finding in validate(variant)]:
        raise ValidationError(violations)
    return variants


def explain_variant(variant: Variant, target: str | None, asked: Asked, out: Path) -> Account:
    """The account of one variant whose spec is valid.

    Raises:
        FlashgenError: no configuration fits the target, or the variant has no such call.
    """
    return account_of(prepare(variant, target, out), asked)


def prepare(variant: Variant, target: str | None, out: Path) -> Prepared:
    """A variant whose spec is valid, up to the choice of its kernels.

    Raises:
        ValidationError: no configuration fits the target.
    """
    named = variant.spec.targets
    name = target or (HOPPER if HOPPER in named else named[0])
    # For another target than the spec's, the spec is changed as a build for this target would.
    spec = variant.spec if name in named else replace(variant.spec, targets=(name,))
    variant, plan = replace(variant, spec=spec), lower(spec, variant.name)
    results = load_results(Place(out, variant.name).tuning)
    chosen = chosen_kernels(variant, plan, name, results)
    return Prepared(variant, name, plan, chosen, measured(plan, name, chosen, results))


def account_of(prepared: Prepared, asked: Asked) -> Account:
    """The account of one call.

    Raises:
        FlashgenError: the variant has no such call.
    """
    plan, chosen, target = prepared.plan, prepared.chosen, get_target(prepared.target)
    work = workload(plan, asked)
    launched = {
        key: kernel.launched(plan, chosen.configs[key].config, target, work)
        for key, kernel in chosen.kernels.items()
    }
    configs = {key: config for key, (config, _) in launched.items()}
    heads = {key: number for key, (_, number) in launched.items()}
    pictures = {key: picture_of(plan, work, c, heads[key]) for key, c in configs.items()}
    visits = {key: shown.visits for key, shown in pictures.items()}
    first = next(iter(chosen.kernels))
    return Account(
        variant=prepared.variant.name,
        file=prepared.variant.file or "",
        target=target.name,
        gpu=target.gpus[0],
        dtype=plan.torch_dtype,
        head_dims=(prepared.variant.spec.qk_head_dim, plan.v_head_dim),
        call=described(plan, work),
        crossover=crossover(target, operand(plan)),
        mask=_mask(plan, work, pictures[first]),
        kernels=kernel_accounts(plan, target.name, chosen, work),
        without=chosen.without,
        works=works(plan, target, work, chosen.kernels, configs, visits, heads),
        training=training(plan, target, work, configs[first], visits[first], heads[first]),
        measured=prepared.measured,
        remarks=tuple(_remarks(plan, chosen.kernels[first])),
        weights=_weights(plan),
    )


def _mask(plan: KernelPlan, work: Workload, shown: Picture) -> MaskAccount:
    visible = visible_share(plan, work, shown)
    logic = tile_logic(plan.predicate)
    listed = () if logic is None else (plain_source(logic.seen), plain_source(logic.full))
    decided = answers_in_words(plan.predicate) if plan.classifies else ()
    runs = () if listed or decided else plan.bounds.intervals
    return MaskAccount(
        label=plan.predicate.label,
        conditions=tuple(map(plain_source, conditions(plan.predicate.expr))),
        runs=tuple(map(run_account, runs)),
        listed=listed,
        decided=decided,
        tables=tuple(map(_table, plan.row_tables)),
        notes=plan.notes_of_tiles or plan.notes_of_bounds,
        rows_can_be_empty=plan.bounds.rows_can_be_empty,
        share=visible.share,
        rows_counted=visible.rows_counted,
        picture=shown.scaled(MOST_CELLS, MOST_CELLS),
        tiles={kind: n for kind, n in shown.counts.items() if kind != "for nothing"},
    )


def run_account(interval: Interval) -> Run:
    """A run of keys as formulas."""
    begin, end, full_begin, full_end, condition = map(plain_source, interval.expressions)
    always = interval.condition == True  # noqa: E712
    return Run(begin, end, full_begin, full_end, "" if always else condition)


def _table(table: RowTable) -> str:
    at = "[..., i]" if len(table.values.dims) > 1 else "[i]"
    relation = "above" if table.side == "right" else "not below"
    found, looked_up = f"{table.name}{at}", f"{table.values.name}{at}"
    but = "" if table.hidden is None else f", and the other way round for an id of {table.hidden}"
    return f"{found} is the first key whose {table.keys.name} is {relation} {looked_up}{but}"


def _weights(plan: KernelPlan) -> str:
    """How linear attention makes weights, over all pairs; ``""`` for weights of scores."""
    if not plan.products:
        return ""
    quadratic = QuadraticPlan(plan)
    made = f"{plan.qk_head_dim} features of each vector" if quadratic.mapped else "no feature map"
    return f"{plan.spec.normaliser.label}, with {made}; {quadratic.algorithm}"


def _remarks(plan: KernelPlan, first: ForwardKernel) -> Iterator[str]:
    """What the account leaves out."""
    yield from first.remarks(plan)
    if made := plan.spec.linformer:
        widths = plan.spec.qk_head_dim + plan.spec.v_head_dim
        yield (
            f"what makes {made} keys and values of all, by torch: 2 x {made} x {widths} FLOPs for "
            "each key of a head of keys"
        )
    if plan.products and QuadraticPlan(plan).mapped:
        moved = plan.itemsize * (QuadraticPlan(plan).vector_dim + plan.qk_head_dim)
        yield f"the kernels that make features of q and k: {moved:,} bytes for each vector"
    read = plan.predicate.expr.free_symbols | {
        s
        for interval in plan.bounds.intervals
        for e in interval.expressions
        for s in e.free_symbols
    }
    if {"b", "h"} & {symbol.name for symbol in read}:
        yield "the mask differs between batch entries or heads; the first stands for all"

"""The pipeline: spec files in, published modules out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter

from flashgen.budget.targets import TARGETS
from flashgen.codegen.render import kernel_digest, render_module
from flashgen.config import ChosenConfig
from flashgen.errors import FlashgenError, ValidationError, Violation
from flashgen.files import lock
from flashgen.loader import Variant, load
from flashgen.plan import KernelPlan, lower
from flashgen.publish import Place, Seal, build_digest, publish, read_seal, sealed
from flashgen.tuning.choose import choose
from flashgen.tuning.device import Gpu, detect_gpu
from flashgen.tuning.rank import rank
from flashgen.tuning.space import Space, search_space
from flashgen.tuning.store import TuneResult, load_results, merged, save_results
from flashgen.validate import unfit, validate


@dataclass(frozen=True)
class Options:
    """What the command line asks of a build.

    Attributes:
        out: the folder to publish to.
        targets: instead of the specs' own; empty keeps those.
        tune: measure what was never measured, where this machine has a GPU of a listed target.
        tune_seconds: time to spend on measuring one variant.
        force: build, and measure, what is up to date as well.
    """

    out: Path = Path("generated")
    targets: tuple[str, ...] = ()
    tune: bool = True
    tune_seconds: float = 60.0
    force: bool = False


class Progress:
    """What a build tells while it runs; this one keeps it to itself."""

    def start(self, variants: int) -> None:
        """So many variants are about to be built."""

    def step(self, variant: str, step: str) -> None:
        """A step of the pipeline begins for a variant."""

    def measured(self, done: int, total: int) -> None:
        """So many of the variant's candidates have been measured."""


@dataclass(frozen=True)
class Built:
    """What became of one variant.

    Attributes:
        variant: its name.
        chosen: the configuration for each target; empty if nothing had to be done.
        spaces: for each target, what they were chosen from.
        notes: where the tile bounds are wider than the mask, and why.
        seconds: what building it took.
    """

    variant: str
    chosen: Mapping[str, ChosenConfig] = field(default_factory=dict)
    spaces: Mapping[str, Space] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def build(paths: Iterable[Path], options: Options, progress: Progress) -> Iterator[Built]:
    """Brings the module of every variant that the spec files declare up to date.

    Yields what became of each variant once its module is published.

    Raises:
        FlashgenError: what the user has to mend, a line each. Where that is a spec, nothing has
            been written.
        KeyboardInterrupt: after publishing the best of what was measured until then.
    """
    # 1. load: spec files -> the variants that they declare.
    variants = _with_targets(load(paths), options.targets)

    # 2. validate: everything wrong with the specs, reported at once.
    _refuse(finding for variant in variants for finding in validate(variant))

    gpu = detect_gpu() if options.tune else None
    stale = [v for v in variants if options.force or not is_current(v, options.out, gpu)]
    yield from (Built(variant.name) for variant in variants if variant not in stale)

    # 3. lower: spec -> plan, which holds all that sympy derives from the mask.
    plans = {variant.name: lower(variant.spec, variant.name) for variant in stale}

    # 4. budget: plan x target -> the configurations that fit, and why the others do not.
    spaces = {name: search_spaces(plan) for name, plan in plans.items()}
    _refuse(
        unfit(variant, plans[variant.name], target, space.rejected)
        for variant in stale
        for target, space in spaces[variant.name].items()
        if not space.candidates
    )

    progress.start(len(stale))
    for variant in stale:
        started = perf_counter()
        place = Place(options.out, variant.name)
        plan, space = plans[variant.name], spaces[variant.name]
        with lock(
            place.lock, on_wait=partial(progress.step, variant.name, "wait for another build")
        ):
            if not options.force and is_current(variant, options.out, gpu):
                yield Built(variant.name)  # the build that this one waited for did it
                continue

            # 5. render: plan -> the kernel's source, whose digest its measurements go by.
            progress.step(variant.name, "render")
            kernel = kernel_digest(plan)

            # 6. tune: candidates -> the configuration for each target.
            measured = None
            if gpu and _is_to_measure(gpu, variant, kernel, place, again=options.force):
                progress.step(variant.name, f"tune on {gpu.name}")
                measured = _measured(plan, gpu, space[gpu.target], options, progress)
                save_results(place.tuning, merged(load_results(place.tuning), [measured]))
            chosen = choose(plan, kernel, space, load_results(place.tuning))

            # 7. publish: source and configurations -> generated/<name>.py.
            progress.step(variant.name, "publish")
            publish(place, module_text(variant, plan, kernel, chosen, place))
        yield Built(variant.name, chosen, space, plan.bounds.notes, perf_counter() - started)
        if measured and measured.ended == "interrupt":
            raise KeyboardInterrupt


def search_spaces(plan: KernelPlan) -> dict[str, Space]:
    """For each target of a plan, the configurations to choose from."""
    return {target: search_space(plan, target) for target in plan.targets}


def module_text(
    variant: Variant,
    plan: KernelPlan,
    kernel: str,
    chosen: Mapping[str, ChosenConfig],
    place: Place,
) -> str:
    """What stands in ``generated/<name>.py``: a function of its arguments and the tuning file."""
    seal = Seal(variant.spec.digest, kernel, build_digest(variant.spec, place))
    return sealed(render_module(plan, chosen, place.package), seal)


def is_current(variant: Variant, out: Path, gpu: Gpu | None) -> bool:
    """Whether the published module is whole, of these inputs, and measured where it can be."""
    place = Place(out, variant.name)
    seal = read_seal(place.module)
    if seal is None or not place.package_file.exists():
        return False
    if seal.build != build_digest(variant.spec, place):
        return False
    return gpu is None or not _is_to_measure(gpu, variant, seal.kernel, place)


def _with_targets(variants: list[Variant], targets: tuple[str, ...]) -> list[Variant]:
    """The variants with other targets than their specs name, if any are given."""
    for target in targets:
        if target not in TARGETS:
            raise FlashgenError(
                f"--target={target}: unknown target; write one of {', '.join(TARGETS)}"
            )
    if not targets:
        return variants
    asked = tuple(dict.fromkeys(targets))
    return [replace(v, spec=replace(v.spec, targets=asked)) for v in variants]


def _refuse(findings: Iterable[Violation]) -> None:
    if violations := list(findings):
        raise ValidationError(violations)


def _is_to_measure(
    gpu: Gpu, variant: Variant, kernel: str, place: Place, *, again: bool = False
) -> bool:
    """Whether the GPU is of a listed target and has measured no candidate that the spec admits."""
    if gpu.target not in variant.spec.targets:
        return False
    return again or not any(
        result.gpu == gpu.name and result.has_measured(kernel, variant.spec.blocks)
        for result in load_results(place.tuning)
    )


def _measured(
    plan: KernelPlan, gpu: Gpu, space: Space, options: Options, progress: Progress
) -> TuneResult:
    """What measuring gives; torch and triton are imported for it alone."""
    from flashgen.tuning.measure import measure

    ranked = [config for config, _ in rank(plan, gpu.target, space.candidates)]
    return measure(
        plan,
        gpu.target,
        gpu.name,
        ranked,
        space.rejected,
        seconds=options.tune_seconds,
        report=progress.measured,
    )

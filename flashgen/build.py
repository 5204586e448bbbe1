"""The pipeline: spec files in, published modules out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter

from flashgen.budget.targets import TARGETS
from flashgen.codegen.module import render_module
from flashgen.config import FORMS, KernelChoice
from flashgen.errors import FlashgenError, ValidationError, Violation
from flashgen.files import lock
from flashgen.kernels.base import ForwardKernel
from flashgen.kernels.registry import kernels_of, keys, with_key
from flashgen.loader import Variant, load
from flashgen.place import Place, is_package_name
from flashgen.plan import KernelPlan, lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.quadratic import algorithm_of
from flashgen.publish import Seal, build_digest, publish, read_seal, sealed
from flashgen.stamp import Request, keep, look
from flashgen.tuning.choose import Spaces, choices, digests, pins, ranked, search_spaces
from flashgen.tuning.device import Gpu, detect_gpu
from flashgen.tuning.store import TuneResult, load_results, merged, save_results
from flashgen.validate import unfit, validate, without_forms

#: A backward kernel's share of a forward kernel's time for measuring: it has few candidates.
BACKWARD_SHARE = 0.5


#: The steps of a variant whose number is known beforehand. It may also wait, or be tuned.
STEPS = ("derive", "budget", "render", "publish")


@dataclass(frozen=True)
class Options:
    """The command line's options for a build.

    Attributes:
        out: the folder to publish to.
        targets: the targets in place of the specs' own; empty keeps the specs'.
        forms: forms of the modules besides the specs' own.
        tune: measure kernels that were never measured, if this machine's GPU is a listed target.
        tune_seconds: the time for measuring a forward kernel, of which a variant has two on Hopper;
            each backward kernel gets half of it.
        force: build, and measure, modules that are up to date as well.
        kernels: the keys of the kernels that may be measured; empty is all.
        package: what the folder is imported as, in the modules' text; None is its name.
    """

    out: Path = Path("generated")
    targets: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    tune: bool = True
    tune_seconds: float = 60.0
    force: bool = False
    kernels: tuple[str, ...] = ()
    package: str | None = None


class Progress:
    """A build's progress reports; this class ignores them."""

    def start(self, variants: int) -> None:
        """So many variants are about to take each of `STEPS`."""

    def step(self, variant: str, step: str) -> None:
        """A step of the pipeline begins for a variant."""

    def measured(self, done: int, total: int) -> None:
        """So many of the kernel's candidates have been measured."""


@dataclass(frozen=True)
class Built:
    """The result of building one variant.

    Attributes:
        variant: its name.
        chosen: the configurations of each kernel, by its key; None if nothing had to be done.
        spaces: the candidates of each kernel.
        diagnostics: why hidden tiles are visited, and other messages.
        seconds: the time of the build.
        algorithm: which one linear attention has, and why; ``""`` for softmax attention.
    """

    variant: str
    chosen: Mapping[str, KernelChoice] | None = None
    spaces: Spaces = field(default_factory=dict)
    diagnostics: tuple[str, ...] = ()
    seconds: float = 0.0
    algorithm: str = ""


def build(paths: Iterable[Path], options: Options, progress: Progress) -> Iterator[Built]:
    """Brings the module of every variant that the spec files declare up to date.

    Yields what became of each variant once its module is published.

    Raises:
        FlashgenError: what the user has to fix, a line each. Where that is a spec, nothing has
            been written.
        KeyboardInterrupt: after publishing the best of what was measured until then.
    """
    paths = tuple(paths)
    gpu = _gpu(options)
    request = Request(
        paths,
        options.out,
        options.targets,
        options.forms,
        options.tune,
        options.kernels,
        options.package,
    )
    before = look(request, gpu)

    # 1. load: spec files -> the variants that they declare.
    variants = as_asked(load(paths), options.targets, options.forms)
    place_of = partial(Place, options.out, named=package_name(options.package))
    yield from build_variants(variants, options, progress, place_of)

    if before is not None:
        names = [variant.name for variant in variants]
        keep(request, before, gpu, names, lambda: not _stale(variants, options, gpu, place_of))


def build_variants(
    variants: list[Variant],
    options: Options,
    progress: Progress,
    place_of: Callable[[str], Place],
) -> Iterator[Built]:
    """Steps 2 to 7 of `build`, for variants whose files `place_of` places by their names."""
    # 2. validate: everything wrong with the specs, reported at once.
    _refuse(finding for variant in variants for finding in validate(variant))

    gpu = _gpu(options)
    stale = variants if options.force else _stale(variants, options, gpu, place_of)
    yield from (Built(variant.name) for variant in variants if variant not in stale)

    progress.start(len(stale))
    plans: dict[str, KernelPlan] = {}
    spaces: dict[str, Spaces] = {}
    spent: dict[str, float] = {}
    for variant in stale:
        started = perf_counter()
        # 3. lower: spec -> plan, which holds all that sympy derives from the mask.
        progress.step(variant.name, "derive")
        plans[variant.name] = lower(variant.spec, variant.name)

        # 4. budget: plan x target -> the configurations that fit, and why the others do not.
        progress.step(variant.name, "budget")
        spaces[variant.name] = search_spaces(plans[variant.name])
        spent[variant.name] = perf_counter() - started
    _refuse(
        finding
        for variant in stale
        for finding in unbuildable(variant, plans[variant.name], spaces[variant.name])
    )

    for variant in stale:
        started = perf_counter()
        place = place_of(variant.name)
        plan, space = plans[variant.name], spaces[variant.name]
        on_wait = partial(progress.step, variant.name, "wait for another build")
        with lock(place.lock, on_wait, place.remedy):
            if not options.force and is_current(variant, place, options, gpu):
                yield Built(variant.name)  # the build that this one waited for did it
                continue

            # 5. render: plan -> the kernels' sources, whose digests their measurements go by.
            progress.step(variant.name, "render")
            kernels = digests(plan, space)

            # 6. tune: candidates -> the configuration for each target and kernel.
            interrupted = False
            if gpu is not None:
                keys = _to_measure(gpu, variant, kernels, place, options)
                interrupted = _tune(plan, kernels, keys, gpu, space, place, options, progress)
            chosen = choices(plan, kernels, space, load_results(place.tuning))

            # 7. publish: source and configurations -> generated/<name>.py.
            progress.step(variant.name, "publish")
            said = publish(place, module_text(variant, plan, kernels, chosen, place))
        diagnostics = (*said, *backward_plan(plan).diagnostics)
        seconds = spent[variant.name] + perf_counter() - started
        yield Built(variant.name, chosen, space, diagnostics, seconds, algorithm_of(plan))
        if interrupted:
            raise KeyboardInterrupt


def module_text(
    variant: Variant,
    plan: KernelPlan,
    kernels: Mapping[str, str],
    chosen: Mapping[str, KernelChoice],
    place: Place,
) -> str:
    """The text of ``generated/<name>.py``: a function of its arguments and the tuning file."""
    seal = Seal(variant.spec.digest, build_digest(variant.spec, place), kernels)
    return sealed(render_module(plan, chosen, place.package), seal)


def _gpu(options: Options) -> Gpu | None:
    return detect_gpu() if options.tune else None


def _stale(
    variants: list[Variant],
    options: Options,
    gpu: Gpu | None,
    place_of: Callable[[str], Place],
) -> list[Variant]:
    return [v for v in variants if not is_current(v, place_of(v.name), options, gpu)]


def is_current(variant: Variant, place: Place, options: Options, gpu: Gpu | None) -> bool:
    """Whether the published module is intact, from these inputs, and measured if possible."""
    seal = read_seal(place.module, place.remedy)
    if seal is None or not (place.package_file is None or place.package_file.exists()):
        return False
    if seal.build != build_digest(variant.spec, place):
        return False
    return not _to_measure(gpu, variant, seal.kernels, place, replace(options, force=False))


def unbuildable(variant: Variant, plan: KernelPlan, spaces: Spaces) -> Iterator[Violation]:
    """All reasons why a valid spec has no module: what does not fit, and forms it cannot have."""
    yield from without_candidates(variant, plan, spaces)
    yield from without_forms(variant, plan)


def without_candidates(variant: Variant, plan: KernelPlan, spaces: Spaces) -> Iterator[Violation]:
    """The violation of each target for which no configuration of a required kernel fits.

    Forward kernels are required: the reference may compute gradients.
    """
    for key, kernel in kernels_of(plan).items():
        if kernel.fallback and not kernel.gradients:
            for target, space in spaces[key].items():
                if not space.candidates:
                    yield unfit(variant, plan, kernel, target, space.rejected)


def as_asked(
    variants: list[Variant], targets: tuple[str, ...], forms: tuple[str, ...]
) -> list[Variant]:
    """The variants with the command line's targets and further forms.

    Raises:
        FlashgenError: a target or a form that does not exist.
    """
    for form in forms:
        if form not in FORMS:
            raise FlashgenError(f"--form={form}: unknown form; write one of {', '.join(FORMS)}")
    return [_with_forms(v, forms) for v in with_targets(variants, targets)]


def _with_forms(variant: Variant, forms: tuple[str, ...]) -> Variant:
    declared = variant.spec.forms
    if not forms or not isinstance(declared, tuple):  # which `validate` reports
        return variant
    return replace(variant, spec=replace(variant.spec, forms=(*declared, *forms)))


def package_name(name: str | None) -> str | None:
    """The name that modules are imported by, as given.

    Raises:
        FlashgenError: no package can have it.
    """
    if name is None or is_package_name(name):
        return name
    raise FlashgenError(f"--package={name}: no name of a package; write one as in mine.kernels")


def with_targets(variants: list[Variant], targets: tuple[str, ...]) -> list[Variant]:
    """The variants with other targets than their specs name, if any are given.

    Raises:
        FlashgenError: a target that nobody knows.
    """
    for target in targets:
        if target not in TARGETS:
            raise FlashgenError(
                f"--target={target}: unknown target; write one of {', '.join(TARGETS)}"
            )
    if not targets:
        return variants
    asked = tuple(name for name in TARGETS if name in targets)  # their order says nothing
    return [replace(v, spec=replace(v.spec, targets=asked)) for v in variants]


def _refuse(findings: Iterable[Violation]) -> None:
    if violations := list(findings):
        raise ValidationError(violations)


def _to_measure(
    gpu: Gpu | None,
    variant: Variant,
    kernels: Mapping[str, str],
    place: Place,
    options: Options,
) -> list[str]:
    """The kernels that run on the GPU and have no measured candidate that the spec admits.

    With force, measured kernels too. Empty if the GPU is of no listed target.
    """
    if gpu is None or gpu.target not in variant.spec.targets:
        return []
    results = [result for result in load_results(place.tuning) if result.gpu == gpu.name]
    return [
        key
        for key, digest in kernels.items()
        if key in (options.kernels or (*keys(), *keys(linear=True)))
        if with_key(key).runs_on(gpu.target)
        if options.force
        or not any(r.settles(digest, pins(variant.spec, with_key(key))) for r in results)
    ]


def _tune(
    plan: KernelPlan,
    kernels: Mapping[str, str],
    to_measure: Iterable[str],
    gpu: Gpu,
    spaces: Spaces,
    place: Place,
    options: Options,
    progress: Progress,
) -> bool:
    """Measures these kernels and keeps the results; whether an interrupt ended it.

    Raises:
        KeyboardInterrupt: before anything was measured.
    """
    for number, key in enumerate(to_measure):
        progress.step(plan.name, f"tune the {with_key(key).title} on {gpu.name}")
        try:
            measured = _measured(plan, kernels, key, gpu, spaces, place, options, progress)
        except KeyboardInterrupt:
            if number == 0:
                raise
            return True
        results = merged(load_results(place.tuning), [measured])
        save_results(place.tuning, results, place.remedy)
        if measured.ended == "interrupt":
            return True
    return False


def _measured(
    plan: KernelPlan,
    kernels: Mapping[str, str],
    key: str,
    gpu: Gpu,
    spaces: Spaces,
    place: Place,
    options: Options,
    progress: Progress,
) -> TuneResult:
    """The result of measuring; torch and triton are imported only for it."""
    from flashgen.tuning.measure import measure

    of_plan = kernels_of(plan)
    seconds, forward = options.tune_seconds, None
    if of_plan[key].gradients:
        seconds *= BACKWARD_SHARE
        before = next(k for k in of_plan.values() if isinstance(k, ForwardKernel) and k.fallback)
        one = {before.key: {gpu.target: spaces[before.key][gpu.target]}}
        [best] = choices(plan, kernels, one, load_results(place.tuning)).values()
        forward = before, best.configs[gpu.target].config
    return measure(
        plan,
        gpu.target,
        gpu.name,
        ranked(plan, key, gpu.target, spaces),
        spaces[key][gpu.target].rejected,
        kernel=of_plan[key],
        forward=forward,
        seconds=seconds,
        report=progress.measured,
    )

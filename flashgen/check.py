"""check: is every published module what its spec and this flashgen would render?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from flashgen.build import Progress, as_asked, module_text, package_name, unbuildable
from flashgen.errors import OutputError, ValidationError
from flashgen.loader import Variant, load
from flashgen.place import Place
from flashgen.plan import lower
from flashgen.publish import is_generated, read_bytes, read_seal
from flashgen.tuning.choose import choices, digests, search_spaces
from flashgen.tuning.store import load_results
from flashgen.validate import validate


def check(
    paths: Sequence[Path],
    out: Path,
    targets: tuple[str, ...] = (),
    forms: tuple[str, ...] = (),
    progress: Progress | None = None,
    package: str | None = None,
) -> list[str]:
    """A line for each module that is not what it should be, and for each that no spec declares.

    The latter only where a folder is among the paths: a file is no word on what others declare.
    Every module is rendered anew, from the tuning results that lie beside it, and compared byte by
    byte. Nothing is written.

    Args:
        paths: spec files, or folders of them.
        out: the folder of the modules.
        targets: what they were built for, where that is not what the specs name.
        forms: forms that they were built with besides the specs' own.
        progress: what is told of each step.
        package: what the folder is imported as, where they were built with that.

    Raises:
        FlashgenError: what is wrong with the specs.
    """
    variants = as_asked(load(paths), targets, forms)
    if violations := [finding for variant in variants for finding in validate(variant)]:
        raise ValidationError(violations)
    orphans = _orphans(variants, out) if names_all(paths) else ()
    place_of = partial(Place, out, named=package_name(package))
    progress = progress or Progress()
    progress.start(len(variants))
    return [*_differences(variants, place_of, progress), *orphans]


def names_all(paths: Iterable[Path]) -> bool:
    """Whether the paths name every spec that there is: a folder is among them."""
    return any(path.is_dir() for path in paths)


def _differences(
    variants: Iterable[Variant], place_of: Callable[[str], Place], progress: Progress
) -> Iterator[str]:
    for variant in variants:
        place = place_of(variant.name)
        found = read_bytes(place.module)
        if not found:
            yield f"{place.module}: missing; build {variant.file}"
        elif found != expected_text(variant, place, progress).encode():
            yield f"{place.module}: {_problem(place.module, variant)}"


def _problem(module: Path, variant: Variant) -> str:
    """What a module is that is not as expected."""
    try:
        edited = read_seal(module) is None
    except OutputError:
        return f"not written by flashgen, so not replaced; move it away, and build {variant.file}"
    if edited:
        return "damaged or edited by hand; build it again, after moving the edit to its spec"
    return f"not what {variant.file} renders to; build it again"


def expected_text(variant: Variant, place: Place, progress: Progress | None = None) -> str:
    """What a build without measuring would publish.

    Raises:
        ValidationError: no configuration fits some target, or a form that the spec cannot have.
    """
    progress = progress or Progress()
    progress.step(variant.name, "derive")
    plan = lower(variant.spec, variant.name)
    progress.step(variant.name, "budget")
    spaces = search_spaces(plan)
    if violations := list(unbuildable(variant, plan, spaces)):
        raise ValidationError(violations)
    progress.step(variant.name, "render")
    kernels = digests(plan, spaces)
    chosen = choices(plan, kernels, spaces, load_results(place.tuning))
    progress.step(variant.name, "publish")  # but for the writing
    return module_text(variant, plan, kernels, chosen, place)


def _orphans(variants: Iterable[Variant], out: Path) -> Iterator[str]:
    names = {variant.name for variant in variants}
    for module in sorted(out.glob("*.py")):
        if module.stem not in names and is_generated(module):
            yield f"{module}: no spec declares it; delete it, or restore its spec"

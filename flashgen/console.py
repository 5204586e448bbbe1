"""Output in a terminal: a progress bar, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from flashgen.bench import Timing
from flashgen.budget.targets import get_target
from flashgen.build import STEPS, Built, Progress
from flashgen.cache import Entry
from flashgen.config import HOPPER, ChosenConfig, KernelChoice
from flashgen.kernels.registry import with_key
from flashgen.place import Place, is_package_name

# A pipe or a log has no width, so rows stay whole.
UNWATCHED_WIDTH = 220

#: Columns of a build's table, if the variant and the GPU have names of ordinary length.
_WIDE = 140


def make_console(*, stderr: bool = False) -> Console:
    """A console that breaks lines in a terminal only."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = UNWATCHED_WIDTH
    return console


class ProgressBar(Progress):
    """A bar over the steps of all variants, and a bar over the candidates of the one being tuned.

    The bars appear in a terminal only; with ``verbose``, each step gets a line as well.
    """

    def __init__(self, console: Console, *, verbose: bool) -> None:
        self._console = console
        self._verbose = verbose
        self._begun = 0
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._variants = self._bars.add_task("", total=None, visible=False)
        self._candidates = self._bars.add_task("  candidates", total=None, visible=False)

    def __enter__(self) -> ProgressBar:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def start(self, variants: int) -> None:
        """Shows the bar over the variants."""
        self._bars.reset(self._variants, total=variants * len(STEPS), visible=True)

    def step(self, variant: str, step: str) -> None:
        """Names the step beside the bar, which shows those that came before."""
        self._bars.update(self._variants, description=f"{variant}: {step}", completed=self._begun)
        self._begun += step in STEPS
        self._bars.update(self._candidates, visible=False)
        if self._verbose:
            self._console.print(f"{variant}: {step}", markup=False)

    def measured(self, done: int, total: int) -> None:
        """Moves the bar over the candidates."""
        self._bars.update(self._candidates, completed=done, total=total, visible=True)


def build_tables(built: Iterable[Built], width: int) -> Iterator[Table]:
    """Tables of the chosen configurations: a row for each variant, target and kernel.

    One table, or, if its rows do not fit into ``width`` columns, a narrow table for each variant.
    """
    results = list(built)
    if width >= _WIDE:
        yield _wide_table(results)
        return
    for result in results:
        yield _narrow_table(result)


def _wide_table(built: Iterable[Built]) -> Table:
    table = plain_table(
        "variant", "target", "kernel", "blocks", "warps", "stages", "SRAM used, KiB"
    )
    table.add_column("chosen")  # the column that may wrap
    table.add_column("time", justify="right", no_wrap=True)
    for result in built:
        time = f"{result.seconds:.1f} s"
        for target, form, choice, remark in _chosen(result):
            config = choice.config
            table.add_row(
                result.variant,
                target,
                form,
                f"{config.BLOCK_M} x {config.BLOCK_N}",
                str(config.num_warps),
                str(config.num_stages),
                _used(choice, target),
                how_chosen(choice) + remark,
                time,
            )
            time = ""
    return table


def _narrow_table(result: Built) -> Table:
    """A table with warps and stages beside the blocks, without when a kernel runs."""
    table = plain_table("target", "kernel", "blocks, warps, stages", "SRAM, KiB")
    table.title = f"{result.variant}, built in {result.seconds:.1f} s"
    table.title_justify = "left"
    table.title_style = ""
    table.add_column("chosen")
    for target, form, choice, _ in _chosen(result):
        config = choice.config
        blocks = f"{config.BLOCK_M} x {config.BLOCK_N}, {config.num_warps}, {config.num_stages}"
        table.add_row(target, form, blocks, _used(choice, target), how_chosen(choice))
    return table


def _used(choice: ChosenConfig, target: str) -> str:
    return f"{choice.shared / 1024:.1f} of {get_target(target).max_shared / 1024:.0f}"


def module_line(result: Built) -> str:
    """One line of a built module: the tiles of its forward kernel on one target, and the time."""
    targets = list(dict.fromkeys(target for target, *_ in _chosen(result)))
    target = HOPPER if HOPPER in targets else targets[0]
    choice = next(choice for of, _, choice, _ in _chosen(result) if of == target)
    tiles = f"{choice.config.BLOCK_M} x {choice.config.BLOCK_N} on {target}"
    how = "by model" if choice.source == "model" else f"measured, {choice.tflops:.0f} TFLOP/s"
    others = len(targets) - 1
    more = f"; {others} more {'target' if others == 1 else 'targets'}" if others else ""
    return f"{result.variant}: {tiles}, {how}{more}; {result.seconds:.1f} s"


def where_lines(built: Sequence[Built], out: Path, package: str | None = None) -> Iterator[str]:
    """The folder of the built modules, and how to import them: lines of 80 columns."""
    if not built:
        return
    names = [result.variant for result in built]
    place = Place(out, names[0], named=package)
    [name, what] = [names[0], "module"] if len(names) == 1 else ["NAME", f"{len(names)} modules"]
    yield f"{what}: {place.module if len(names) == 1 else out}"
    if place.package is None or not is_package_name(place.package):
        yield f"import: import {name}"  # a folder such as my-kernels is no package
        yield f"        where {out} is on sys.path"
        return
    yield f"import: from {place.package} import {name}"
    root = _root(out, place.package)
    if root is not None and root != Path.cwd():
        yield f"        where {_short(root)} is on sys.path"


def _root(out: Path, package: str) -> Path | None:
    """The folder in which Python finds the package; None if its name is not that of folders."""
    folder = out.resolve()
    for part in reversed(package.split(".")):
        if folder.name != part:
            return None
        folder = folder.parent
    return folder


def _short(folder: Path) -> Path:
    """The folder relative to the current one, if it lies inside."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _chosen(built: Built) -> Iterator[tuple[str, str, ChosenConfig, str]]:
    """Each target and kernel with its configuration and a remark."""
    assert built.chosen is not None
    targets = dict.fromkeys(target for of in built.chosen.values() for target in of.configs)
    for target in targets:
        for key, choice in built.chosen.items():
            if target in choice.configs:
                yield target, key, choice.configs[target], _remark(built.chosen, key, target)


def _remark(chosen: Mapping[str, KernelChoice], key: str, target: str) -> str:
    """For a kernel that others can replace: when it runs, or why the others are missing."""
    for other, choice in chosen.items():
        kernel = with_key(other)
        if key in choice.replaces and target in choice.configs:
            return f"; runs {kernel.elsewhere}"
        same = with_key(key)
        of_one_pass = (kernel.form, kernel.gradients) == (same.form, same.gradients)
        if choice.why_not and of_one_pass and kernel.runs_on(target):
            return f"; no {kernel.title}: {choice.why_not}"
    return ""


def how_chosen(choice: ChosenConfig) -> str:
    """Why a configuration ships, in a few words."""
    if choice.source == "model":
        return "by model"
    return f"measured on {choice.gpu}: {choice.tflops:.0f} TFLOP/s"


def rejection_lines(built: Built) -> Iterable[str]:
    """The number of candidates of each target and kernel, and why others were rejected."""
    missing = {key: of.why_not for key, of in (built.chosen or {}).items() if of.why_not}
    for key, of_kernel in built.spaces.items():
        for target, space in of_kernel.items():
            if key in missing:
                yield f"{built.variant}: {target}: no {with_key(key).title}: {missing[key]}"
                continue
            yield (
                f"{built.variant}: {target}: {key}: {len(space.candidates)} candidates fit, "
                f"{len(space.rejected)} rejected"
            )
            for config, reason in space.rejected:
                yield f"  {config}: {reason}"


def list_table(modules: Iterable[Sequence[str]]) -> Table:
    """A row for each generated module."""
    table = plain_table("variant", "state", "measured on")
    for row in modules:
        table.add_row(*row)
    return table


def cache_table(entries: Iterable[Entry]) -> Table:
    """A row for each module in the cache."""
    table = plain_table("variant", "digest", "KiB", "state", "measured on")
    for entry in entries:
        digest = entry.path.stem.rpartition("_")[2][:8]
        size = f"{entry.size / 1024:.0f}"
        table.add_row(entry.name, digest, size, entry.state, ", ".join(entry.gpus) or "none")
    return table


def bench_table(timings: Iterable[Timing]) -> Table:
    """A row for each kernel and length, with rates, or with shares of a copy's bandwidth."""
    timings = list(timings)
    rate = "TFLOP/s" if all(t.share is None for t in timings) else "of a copy"
    table = plain_table("length", "kernel")
    for column in ("ms", rate, "flashgen is"):
        table.add_column(column, justify="right")
    for t in timings:
        if t.ms is None or t.ratio is None:
            table.add_row(str(t.length), t.kernel, "-", "-", t.problem)
            continue
        figure = f"{t.tflops:.0f}" if t.share is None else f"{t.share:.0%}"
        table.add_row(str(t.length), t.kernel, f"{t.ms:.3f}", figure, f"{t.ratio:.2f} x")
    return table


def plain_table(*columns: str) -> Table:
    """A table with these columns, none of which wraps."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table

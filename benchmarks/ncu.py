"""Nsight Compute on the command line: its metrics, and its counts for a program."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

#: Paths of installers, the newest last.
FOLDERS = ("/opt/nvidia/nsight-compute", "/usr/local/cuda/nsight-compute*", "/usr/local/cuda/bin")

#: The units of `--print-units base`, which need no scaling.
BASE_UNITS = ("", "byte", "sector", "ns", "nsecond", "request", "cycle", "%")

#: Counters that have another name in other versions.
OTHER_NAMES = {
    "dram__bytes_read.sum": "dram__bytes_op_read.sum",
    "dram__bytes_write.sum": "dram__bytes_op_write.sum",
}

#: Seconds that a run of ncu may take.
TIMEOUT = 240

_UNKNOWN = re.compile(r"Failed to find metric (?:regex:\^?)?([\w.\\]+)")
_PASSES = re.compile(r"==PROF== Profiling .*?(\d+) pass(?:es)?\b")


class NcuError(RuntimeError):
    """Nsight Compute counted nothing; the text is its output."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: its name.
        values: the counts by metric; metrics without a number are left out.
    """

    kernel: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Counted:
    """The counts of one run.

    Attributes:
        launches: the launches in the order of the program.
        passes: how often each launch was run; above one, L2 is not as the program leaves it.
        missing: metrics that this ncu does not know, or has no number for.
    """

    launches: tuple[Launch, ...]
    passes: tuple[int, ...]
    missing: tuple[str, ...]


def find_ncu() -> str:
    """The path of ncu.

    Raises:
        NcuError: ncu is not installed.
    """
    if found := shutil.which("ncu"):
        return found
    root = Path("/")
    for folder in FOLDERS:
        inside = [*root.glob(f"{folder[1:]}/ncu"), *root.glob(f"{folder[1:]}/*/ncu")]
        if inside:
            return str(max(inside, key=lambda path: _numbers(str(path))))
    raise NcuError(f"no ncu on PATH nor in {', '.join(FOLDERS)}; install NVIDIA Nsight Compute")


def version(ncu: str) -> str:
    """``"2025.3.1.0"``."""
    said = _run([ncu, "--version"]).stdout
    match = re.search(r"Version (\S+)", said)
    return match[1] if match else said.strip()


def known_metrics(ncu: str) -> frozenset[str]:
    """The names of metrics on the GPUs of this machine, without ``.sum``; none where it is mum."""
    return metric_names(_run([ncu, "--query-metrics"]).stdout)


def metric_names(listing: str) -> frozenset[str]:
    """The names in the output of `--query-metrics`: one a line, followed by a description."""
    return frozenset(re.findall(r"^(\w+?__\w+)\b", listing, re.MULTILINE))


def count(
    ncu: str,
    program: Sequence[str],
    metrics: Sequence[str],
    kernel: str,
    cache_control: str,
    known: Collection[str] = (),
) -> Counted:
    """Counts the launches of a kernel between a program's cudaProfilerStart and cudaProfilerStop.

    Args:
        ncu: the command.
        program: the program with its arguments.
        metrics: names with ``.sum``. Those that ncu does not know, by `OTHER_NAMES` either, are
            left out.
        kernel: a regular expression of the kernel's name.
        cache_control: ``"none"`` leaves caches as they are, ``"all"`` clears them before a launch.
        known: the names that ncu lists.

    Raises:
        NcuError: nothing was counted.
    """
    unknown = {x for x in map(base, (*metrics, *OTHER_NAMES.values())) if known and x not in known}
    while asked := dict(_named(metrics, unknown)):
        log = _counted(ncu, program, list(asked.values()), kernel, cache_control)
        if complaints := unknown_metrics(log) - unknown:
            unknown |= complaints
            continue
        launches = tuple(
            Launch(
                launch.kernel, {x: launch.values[y] for x, y in asked.items() if y in launch.values}
            )
            for launch in parse(log, asked.values())
        )
        if not launches:
            raise NcuError(f"no launch of {kernel} was counted: {_tail(log)}")
        missing = [x for x in metrics if any(x not in launch.values for launch in launches)]
        return Counted(launches, passes(log), tuple(missing))
    raise NcuError(f"ncu knows none of {', '.join(metrics)}")


def _named(metrics: Sequence[str], unknown: Collection[str]) -> Iterator[tuple[str, str]]:
    """Metrics by the names that ncu has for them."""
    for metric in metrics:
        for name in (metric, OTHER_NAMES.get(metric, metric)):
            if base(name) not in unknown:
                yield metric, name
                break


def base(metric: str) -> str:
    """``dram__bytes_read.sum`` -> ``dram__bytes_read``."""
    return metric.split(".")[0]


def unknown_metrics(log: str) -> frozenset[str]:
    """Those that ncu complained of, without ``.sum``."""
    return frozenset(base(name.replace("\\", "")) for name in _UNKNOWN.findall(log))


def passes(log: str) -> tuple[int, ...]:
    """How often each launch was run, by ncu's log."""
    return tuple(int(n) for n in _PASSES.findall(log))


def parse(log: str, metrics: Collection[str]) -> tuple[Launch, ...]:
    """The launches with their values of these metrics, in ncu's output with its other lines.

    With ``--csv --page raw`` ncu prints a row of names, a row of units, then a row for each launch;
    some versions print a row for each metric of each launch.

    Raises:
        NcuError: a number has a unit that is not a base unit.
    """
    rows = list(csv.reader(line for line in log.splitlines() if line.startswith('"')))
    if not rows:
        return ()
    names, *rows = rows
    if "Metric Name" in names:
        columns = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
        at = [names.index(column) for column in columns]
        cells = [tuple(row[i] for i in at) for row in rows]
    else:
        units, *rows = rows
        number, kernel = names.index("ID"), names.index("Kernel Name")
        cells = [
            (row[number], row[kernel], name, unit, value)
            for row in rows
            for name, unit, value in zip(names, units, row, strict=True)
        ]
    return tuple(_launches(cells, metrics))


def _launches(cells: Iterable[tuple[str, ...]], metrics: Collection[str]) -> Iterator[Launch]:
    """The launches from rows of a launch's number, its kernel, a metric, the unit and the value."""
    for (_, kernel), of_launch in groupby(cells, lambda cell: cell[:2]):
        values = {}
        for *_, metric, unit, text in of_launch:
            if metric not in metrics:
                continue
            try:
                value = float(text.replace(",", ""))
            except ValueError:  # n/a
                continue
            if unit not in BASE_UNITS:
                raise NcuError(f"{metric} is in {unit!r}, which is no base unit")
            values[metric] = value
        yield Launch(kernel.split("(")[0], values)


def _counted(
    ncu: str, program: Sequence[str], metrics: Sequence[str], kernel: str, cache_control: str
) -> str:
    """The output of ncu; an error with the reason if there is none."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        log = Path(folder) / "log"
        done = _run(
            [
                *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
                *("--profile-from-start", "off", "--kernel-name", f"regex:{kernel}"),
                *("--clock-control", "none", "--cache-control", cache_control),
                *("--metrics", ",".join(metrics)),
                *program,
            ]
        )
        said = (log.read_text() if log.exists() else "") + done.stdout
    said += done.stderr
    if done.returncode and not unknown_metrics(said):
        raise NcuError(f"ncu ended with {done.returncode}: {_tail(said)}")
    return said


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise NcuError(f"ncu was not done after {error.timeout:.0f} s") from error


def _tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-8:])


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]

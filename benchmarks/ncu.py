"""Nsight Compute on the command line: which metrics it knows, and what it counts of a program."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Where installers put it, the newest last.
FOLDERS = ("/opt/nvidia/nsight-compute", "/usr/local/cuda/nsight-compute*", "/usr/local/cuda/bin")

#: What `--print-units base` gives: nothing that would have to be scaled.
BASE_UNITS = ("", "byte", "sector", "ns", "nsecond", "request", "cycle", "%")

_UNKNOWN = re.compile(r"Failed to find metric (?:regex:\^?)?([\w.\\]+)")
_PASSES = re.compile(r"==PROF== Profiling .*?(\d+) pass(?:es)?\b")


class NcuError(RuntimeError):
    """It counted nothing; the text is what it said."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: its name.
        values: what was counted, by metric; those without a number are not there.
    """

    kernel: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Counted:
    """What one run counted.

    Attributes:
        launches: in the order of the program.
        passes: how often each of them was run for it; above one, L2 is not as a program leaves it.
        missing: metrics that this ncu does not know, or has no number of.
    """

    launches: tuple[Launch, ...]
    passes: tuple[int, ...]
    missing: tuple[str, ...]


def find_ncu() -> str:
    """The command.

    Raises:
        NcuError: it is nowhere.
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
    """Those in what `--query-metrics` prints: one a line, its description behind it."""
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
        metrics: names with ``.sum``. Those that ncu does not know are left out.
        kernel: a regular expression of the kernel's name.
        cache_control: ``"none"`` leaves caches as they are, ``"all"`` clears them before a launch.
        known: the names that ncu knows, as far as it said.

    Raises:
        NcuError: nothing was counted.
    """
    asked = [x for x in metrics if not known or base(x) in known]
    while asked:
        log = _counted(ncu, program, asked, kernel, cache_control)
        unknown = unknown_metrics(log)
        left = [x for x in asked if base(x) not in unknown]
        if left != asked:
            asked = left
            continue
        launches = parse(log)
        if not launches:
            raise NcuError(f"no launch of {kernel} was counted: {_tail(log)}")
        missing = [x for x in metrics if any(x not in launch.values for launch in launches)]
        return Counted(launches, passes(log), tuple(missing))
    raise NcuError(f"ncu knows none of {', '.join(metrics)}")


def base(metric: str) -> str:
    """``dram__bytes_read.sum`` -> ``dram__bytes_read``."""
    return metric.split(".")[0]


def unknown_metrics(log: str) -> frozenset[str]:
    """Those that ncu complained of, without ``.sum``."""
    return frozenset(base(name.replace("\\", "")) for name in _UNKNOWN.findall(log))


def passes(log: str) -> tuple[int, ...]:
    """How often each launch was run."""
    return tuple(int(n) for n in _PASSES.findall(log))


def parse(log: str) -> tuple[Launch, ...]:
    """The launches in what ``--csv --page raw --print-units base`` prints, other lines beside it.

    A row of names, one of units, then a row for each launch.

    Raises:
        NcuError: a number in another unit than a base one.
    """
    rows = list(csv.reader(line for line in log.splitlines() if line.startswith('"')))
    if not rows:
        return ()
    names, units, *launches = rows
    for name, unit in zip(names, units, strict=True):
        if "__" in name and unit not in BASE_UNITS:
            raise NcuError(f"{name} is in {unit!r}, which is no base unit")
    at = names.index("Kernel Name")
    return tuple(Launch(row[at].split("(")[0], dict(_values(names, row))) for row in launches)


def _values(names: Sequence[str], row: Sequence[str]) -> list[tuple[str, float]]:
    found = []
    for name, text in zip(names, row, strict=True):
        try:
            value = float(text.replace(",", ""))
        except ValueError:  # n/a, or a text
            continue
        if "__" in name:
            found.append((name, value))
    return found


def _counted(
    ncu: str, program: Sequence[str], metrics: Sequence[str], kernel: str, cache_control: str
) -> str:
    """What ncu says, and why where it says nothing."""
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
    if done.returncode and not unknown_metrics(said + done.stderr):
        raise NcuError(f"ncu ended with {done.returncode}: {_tail(said + done.stderr)}")
    return said + done.stderr


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def _tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-8:])


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]

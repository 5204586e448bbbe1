"""The kernels under compute-sanitizer: accesses out of bounds, and races in shared memory.

racecheck (of CUDA 13.0, and 2026.4) reports as races what mbarriers order: what a producer hands
over, announces or notes for consumers, notes of an overflow, and what Triton itself passes to the
partitions of a kernel; the factors that two consumers exchange by named barriers; and hidden rows
that two consumers clear, each for itself, with the same zeros. A race between any others fails the
test.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.sanitized import FINISHED

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("sanitized.py")
OF_FORMS = Path(__file__).with_name("sanitized_forms.py")
TOUCH = "import torch; assert torch.ones(8).cuda().cpu().sum() == 8"
SECONDS = 300
TAIL = 6000  # characters of an output that a failure shows
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: 0 errors"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed"),
}
#: An access that takes part in a race: the name of a module's file, and the line.
ACCESS = re.compile(r"access at \w+\+0x\w+ in (\w+)\.py:(\d+)")
RACE = "Race reported between "
#: Functions that share a buffer whose accesses barriers order: any two of a line.
ORDERED = (
    {"_hand_over", "_handed_over"},
    # The numbers of a tile of packed keys are read where its visits are counted, too.
    {"_announce", "_announce_end", "_announced", "_backward_visits"},
    {"_note_hidden_keys", "_noted"},
    {"_set_overflow", "_take_overflow"},
    {"_values_step", "_keys_step"},
    {"_clear_hidden_keys"},
    {"_clear_hidden_queries"},
)
#: Kernels, where Triton passes values to the partitions of a kernel.
STARTS = {"_attention_hopper", "_backward_hopper", "_backward_queries_hopper"}


@pytest.fixture(scope="module")
def warm() -> None:
    """Compiles the kernels, and holds their results to the reference, without a tool."""
    done = _run([sys.executable, str(PROGRAM)])
    assert done.returncode == 0 and FINISHED in done.stdout, _tail(done)


def test_memcheck_finds_nothing(warm: None) -> None:
    done = _watched("memcheck")
    assert SUMMARY["memcheck"].search(done.stdout), f"memcheck found something:\n{_tail(done)}"
    assert done.returncode == 0


def test_memcheck_finds_nothing_in_any_form() -> None:
    """Packed sequences, caches, listed tiles, linear attention; and gradients of all."""
    warmed = _run([sys.executable, str(OF_FORMS)])
    assert warmed.returncode == 0 and FINISHED in warmed.stdout, _tail(warmed)
    done = _watched("memcheck", OF_FORMS)
    assert SUMMARY["memcheck"].search(done.stdout), f"memcheck found something:\n{_tail(done)}"
    assert done.returncode == 0


@pytest.mark.parametrize("program", [PROGRAM, OF_FORMS], ids=["dense", "forms"])
def test_racecheck_finds_nothing_but_what_it_cannot_follow(
    program: Path, warm: None, tmp_path: Path
) -> None:
    done = _watched("racecheck", program, tmp_path)
    assert SUMMARY["racecheck"].search(done.stdout), _tail(done)
    reports = [
        (module, frozenset(_function(_file(module, tmp_path), line) for line in lines))
        for module, lines in _races(done.stdout)
    ]
    print(f"{len(reports)} reports, of {sorted({tuple(sorted(pair)) for _, pair in reports})}")
    assert f"{len(reports)} hazards displayed" in done.stdout, "a report that is not understood"
    wrong = {(module, *sorted(pair)) for module, pair in reports if not _is_ordered(pair)}
    assert not wrong, f"{sorted(wrong)}:\n{_tail(done)}"


def test_memcheck_finds_an_access_out_of_bounds(tmp_path: Path) -> None:
    """That it finds nothing above means something."""
    program = tmp_path / "wrong.py"
    program.write_text(OUT_OF_BOUNDS)
    done = _run([*_command("memcheck"), sys.executable, str(program)])
    assert "Invalid __global__ write" in done.stdout, _tail(done)
    assert not SUMMARY["memcheck"].search(done.stdout)


OUT_OF_BOUNDS = """
import torch, triton
import triton.language as tl

@triton.jit
def beyond(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)

beyond[(1,)](torch.zeros(8, device="cuda"), N=1024)
torch.cuda.synchronize()
"""


@functools.cache
def _command(tool: str) -> list[str]:
    """The tool's command line; skips, with the reason, where it cannot watch a program here."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        pytest.skip("compute-sanitizer is not on PATH")
    # Triton starts ptxas, which is not to be watched; torch asks the driver for what it may lack.
    command = [path, "--tool", tool, "--target-processes", "application-only"]
    # Without a limit racecheck shows a hundred reports.
    command += {"memcheck": ["--report-api-errors", "no"], "racecheck": ["--print-limit", "0"]}[
        tool
    ]
    probe = _run([*command, sys.executable, "-c", TOUCH])
    if probe.returncode or not SUMMARY[tool].search(probe.stdout):
        pytest.skip(f"compute-sanitizer cannot watch torch here: {_tail(probe)[-400:]}")
    return command


def _watched(
    tool: str, program: Path = PROGRAM, *arguments: Path
) -> subprocess.CompletedProcess[str]:
    """A program under a tool; fails where it does not come to its end."""
    done = _run([*_command(tool), sys.executable, str(program), *map(str, arguments)])
    print(_tail(done))
    assert FINISHED in done.stdout, f"the program did not end under {tool}:\n{_tail(done)}"
    return done


def _races(output: str) -> Iterator[tuple[str, set[int]]]:
    """The module and the lines of each race that racecheck reports."""
    for report in output.split(RACE)[1:]:
        accesses = ACCESS.findall(report)
        [module] = {module for module, _ in accesses}
        yield module, {int(line) for _, line in accesses}


def _is_ordered(functions: frozenset[str]) -> bool:
    """Whether barriers order the accesses: of one line of `ORDERED`, or where partitions start."""
    bare = {function.removesuffix("_varlen") for function in functions}
    return bare <= STARTS or any(bare <= group for group in ORDERED)


def _file(module: str, rendered: Path) -> Path:
    """A module's file: a program rendered it into this folder, or it is shipped and numbered."""
    file = rendered / f"{module}.py"
    return file if file.exists() else ROOT / "generated" / f"{re.sub('_[0-9]+$', '', module)}.py"


def _function(file: Path, line: int) -> str:
    """The function of a module that a line is of."""
    tree = ast.parse(file.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return next(f.name for f in functions if f.lineno <= line <= (f.end_lineno or 0))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Both outputs in one; tensors have memory of their own, so that their ends are seen.

    Fails where it takes over `SECONDS`.
    """
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        out, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        pytest.fail(f"{command} took over {SECONDS} s:\n{out[-TAIL:]}")
    return subprocess.CompletedProcess(command, process.returncode, out)


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[-TAIL:]

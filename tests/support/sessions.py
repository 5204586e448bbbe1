"""Plain pytest runs all tests: first those of Triton as it is, then those of its interpreter.

A process chooses the interpreter before it imports Triton, as tests/sweep/conftest.py does. So that
folder has a session of its own, in a process that the first session starts when it has ended.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

SWEEP = Path(__file__).resolve().parents[1] / "sweep"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a path is for the other session: the sweep, unless it is what is asked for."""
    asked = any(path.is_relative_to(SWEEP) for path in _paths(config))
    return True if collection_path == SWEEP and not asked else None


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(
    config: pytest.Config,
) -> Generator[None, pytest.ExitCode | int | None, pytest.ExitCode | int | None]:
    """The second session, with the options of the first; the worse of their exit codes."""
    status = yield
    asked = any(path in SWEEP.parents for path in _paths(config))
    left_out = (config.invocation_params.dir / path for path in config.getoption("ignore") or ())
    asked &= SWEEP not in map(Path.resolve, left_out)
    only_prints = any(map(config.getoption, ("help", "version", "markers", "showfixtures")))
    if hasattr(config, "workerinput") or only_prints or not asked:
        return status
    if status == pytest.ExitCode.INTERRUPTED:
        return status
    if status == pytest.ExitCode.TESTS_FAILED and config.getoption("maxfail"):
        return status
    options = list(config.invocation_params.args)
    for path in config.getoption("file_or_dir"):
        options.reverse()
        options.remove(path)  # the last one of that name: an option may have it too
        options.reverse()
    command = [sys.executable, "-m", "pytest", *map(str, options), str(SWEEP)]
    print("\ntests/sweep, in Triton's interpreter:", flush=True)
    of_sweep = subprocess.run(command, check=False).returncode
    codes = {int(status or 0), of_sweep}
    if pytest.ExitCode.OK in codes:
        codes.discard(int(pytest.ExitCode.NO_TESTS_COLLECTED))  # of one of them, by -k or -m
    return max(codes)


def _paths(config: pytest.Config) -> list[Path]:
    """What is asked for, or else all that there is."""
    return [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]

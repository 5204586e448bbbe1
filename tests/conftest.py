"""What every folder of tests shares: the options, random numbers, and which tests run where."""

from __future__ import annotations

import gc
import inspect
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from browser.driver import why_no_browser
from support.quick_compile import quicken_imports
from support.quick_sympy import quicken_sympy
from support.sessions import pytest_cmdline_main, pytest_ignore_collect
from support.turns import FULL_VARIABLE

__all__ = ["pytest_cmdline_main", "pytest_ignore_collect"]

quicken_sympy()
quicken_imports()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run the tests marked full too, which the fast run leaves out",
    )
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the rendered source that tests/golden compares with, instead of comparing",
    )
    parser.addoption(
        "--update-kills",
        nargs="?",
        const="full",
        choices=["fast", "full"],
        help="write which calls find mutants: of the fast set, anew; or of the full set too, of "
        "mutants that tests/sweep/kills.json has not",
    )
    parser.addoption(
        "--fresh",
        action="store_true",
        help="compile what tests/data has the compiler's figures of, and hold these to it",
    )
    parser.addoption(
        "--update-figures",
        action="store_true",
        help="add what is compiled to the figures of tests/data",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells all processes of a run what is asked for."""
    if config.getoption("--full"):
        os.environ[FULL_VARIABLE] = "1"
    for option in ("--fresh", "--update-figures"):
        if config.getoption(option):
            from support.compiling import figures

            os.environ[figures.VARIABLES[option]] = "1"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leaves new figures in order: in the process that started the others, which are done."""
    if session.config.getoption("--update-figures") and not hasattr(session.config, "workerinput"):
        from support.compiling import figures

        figures.in_order()


@pytest.fixture(autouse=True)
def the_same_numbers_each_time() -> None:
    """What a test draws of torch's own generators is the same in every run, alone or not."""
    import torch

    torch.manual_seed(0)


def _leaves_out(config: pytest.Config) -> bool:
    """Whether tests marked full are left out: not where a test is asked for by its name."""
    return not config.getoption("--full") and not any("::" in arg for arg in config.args)


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Makes no items of a test that is left out with all its cases, which are ten thousand."""
    marks = getattr(obj, "pytestmark", ()) if inspect.isfunction(obj) else ()
    is_full = any(mark.name == "full" for mark in marks)
    return [] if is_full and _leaves_out(collector.config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only a full run runs; skips, with the reason, what cannot run here."""
    if _leaves_out(config):
        left_out = [item for item in items if item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("full")]
    if missing := why_no_browser():
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=missing))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none here"))


def pytest_collection_finish() -> None:
    """Spares the collector of cycles what is imported by now, which lives as long as the process.

    Each full collection would go through all of it, half a million objects of torch, sympy and
    transformers, and tests make enough of their own for hundreds of collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The seconds that each folder of tests took, over all processes."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[Path(report.nodeid).parts[1]] += report.duration
    words = (f"{folder} {spent:.0f} s" for folder, spent in seconds.most_common() if spent >= 1)
    if line := ", ".join(words):
        terminalreporter.write_line(f"of test processes: {line}")

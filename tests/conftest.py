"""What every folder of tests shares: the options, random numbers, and where some tests run."""

from __future__ import annotations

import os

import pytest

from browser.driver import why_no_browser


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the rendered source that tests/golden compares with, instead of comparing",
    )
    parser.addoption(
        "--fresh",
        action="store_true",
        help="compile what tests/data/allotted has figures of, and hold these to it",
    )
    parser.addoption(
        "--update-figures",
        action="store_true",
        help="add what is compiled to the figures of tests/data/allotted",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells the processes of a run, which share the environment, how figures are used."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests, with the reason, where torch sees no GPU or no browser is installed."""
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

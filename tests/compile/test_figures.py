"""Figures that are on record stand for the compiler only where it would say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.compiling import figures, report
from support.compiling.machine_code import MachineCode
from support.compiling.report import Report

SHARED = 1024


def compiled(shared: int = SHARED) -> MachineCode:
    return MachineCode(shared, registers=40, spilled=0, warnings=("slow",), code=b"")


def unasked() -> MachineCode:
    raise RuntimeError("the compiler is asked")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of one kernel, and how it was read; the compiler is asked for anything else."""
    monkeypatch.setattr(figures, "DATA", tmp_path)
    monkeypatch.delenv(figures.VARIABLES["--fresh"], raising=False)
    monkeypatch.setattr(figures, "_figures", figures._figures.__wrapped__)
    with monkeypatch.context() as patch:
        patch.setenv(figures.VARIABLES["--update-figures"], "1")
        of = Report("kernel", compiled)
        assert (of.shared, of.warnings) == (SHARED, ("slow",))
    monkeypatch.delenv(figures.VARIABLES["--update-figures"], raising=False)
    return tmp_path


def test_what_is_known_is_not_compiled(record: Path) -> None:
    of = Report("kernel", unasked)
    assert (of.shared, of.warnings) == (SHARED, ("slow",))


def other_kernel(monkeypatch: pytest.MonkeyPatch) -> Report:
    return Report("another kernel", unasked)


def other_ptxas(monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    return Report("kernel", unasked)


def other_reading(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Such as another count of the bytes that are spilled."""
    monkeypatch.setattr(report, "code_of", lambda text: text + "pass")
    monkeypatch.setattr(report, "_readers", report._readers.__wrapped__)
    return Report("kernel", unasked)


@pytest.mark.parametrize("other", [other_kernel, other_ptxas, other_reading])
def test_whatever_changes_it_asks_the_compiler(
    other: Callable[[pytest.MonkeyPatch], Report],
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="is asked"):
        _ = other(monkeypatch).shared


def test_a_figure_that_nobody_asked_for_is_compiled(record: Path) -> None:
    with pytest.raises(RuntimeError, match="is asked"):
        _ = Report("kernel", unasked).spilled


def test_a_fresh_run_holds_the_record_to_the_compiler(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(figures.VARIABLES["--fresh"], "1")
    assert Report("kernel", compiled).shared == SHARED
    with pytest.raises(AssertionError, match="compiled 2048"):
        _ = Report("kernel", lambda: compiled(2048)).shared

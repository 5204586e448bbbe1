"""What benchmarks of a form beside its peers share: modules, and both orders of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from benchmarks.command import BENCHMARK_MODULES, SPECS
from benchmarks.record import target
from flashgen.build import Options, build
from flashgen.console import Progress

Case = TypeVar("Case")


def build_own(*modules: str) -> None:
    """Builds modules of the benchmarks' specs for the GPU that is here."""
    own = Options(BENCHMARK_MODULES, (target(),), tune=False)
    for _ in build([SPECS / f"{name}.py" for name in modules], own, Progress()):
        pass


def in_both_orders(
    cases: Iterable[Case],
    new_row: Callable[[Case], dict[str, Any]],
    measure: Callable[..., None],
    *,
    title: str,
    with_fa4: bool,
) -> list[dict[str, Any]]:
    """The rows of all cases, each measured twice, the second time in reverse order.

    Args:
        cases: the cases.
        new_row: a case's row before its first measurement, with its milliseconds in ``"ms"``.
        measure: adds milliseconds to the row of a case, on a device; it takes with_fa4 and reverse.
        title: the field of a row that names it in the terminal.
        with_fa4: whether FlashAttention 4 is measured.
    """
    rows = [(case, new_row(case)) for case in cases]
    for reverse in (False, True):
        for case, row in rows:
            measure(case, row, torch.device("cuda"), with_fa4=with_fa4, reverse=reverse)
            print(row[title], {name: ms[-1] for name, ms in row["ms"].items()}, flush=True)
    return [row for _, row in rows]

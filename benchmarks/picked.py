"""The kernels whose configuration the model picks, and their measured results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.figures import Document
from flashgen.config import HOPPER
from flashgen.kernels.base import Space
from flashgen.kernels.registry import kernels_of as flashgen_kernels
from flashgen.loader import load
from flashgen.place import Place
from flashgen.plan import KernelPlan, lower
from flashgen.tuning.choose import ranked, search_spaces
from flashgen.tuning.store import TuneResult, fields_of, load_results, result_of

ROOT = Path(__file__).parent.parent
SPECS, OUT = ROOT / "specs", ROOT / "generated"

FORWARD_FORMS: tuple[str, ...] = ("hopper", "portable")


@dataclass(frozen=True)
class Kernel:
    """A forward kernel of a shipped module.

    Attributes:
        plan: the plan of its spec.
        form: which of the two forward kernels.
        digest: the digest of its source.
        space: its candidates on Hopper, the model's pick first.
    """

    plan: KernelPlan
    form: str
    digest: str
    space: Space


def kernels_of(names: Sequence[str] = ()) -> list[Kernel]:
    """The forward kernels for Hopper of these specs, or of every shipped one."""
    variants = load([SPECS])
    unknown = set(names) - {variant.name for variant in variants}
    if unknown:
        raise SystemExit(f"benchmarks.picks: no spec {', '.join(sorted(unknown))} in {SPECS}")
    chosen = [variant.name for variant in variants if not names or variant.name in names]
    return [
        kernel for name in chosen for form in FORWARD_FORMS if (kernel := kernel_of(name, form))
    ]


@cache
def _plan(name: str) -> KernelPlan:
    [variant] = [variant for variant in load([SPECS]) if variant.name == name]
    return lower(variant.spec, name)


@cache
def kernel_of(name: str, form: str) -> Kernel | None:
    """A forward kernel of a spec; None if its module has no such kernel."""
    plan = _plan(name)
    spaces = search_spaces(plan, (HOPPER,), gradients=False)
    space = spaces[form][HOPPER]
    if not space.candidates:
        return None
    ordered = replace(space, candidates=ranked(plan, form, HOPPER, spaces))
    return Kernel(plan, form, flashgen_kernels(plan)[form].digest(plan), ordered)


def result_for(kernel: Kernel, results: Iterable[TuneResult]) -> TuneResult | None:
    """The result of this kernel with the most candidates."""
    fitting = [
        result
        for result in results
        if (result.target, result.form, result.kernel) == (HOPPER, kernel.form, kernel.digest)
    ]
    return max(fitting, key=lambda result: _looked_at(kernel, result), default=None)


def is_complete(kernel: Kernel, result: TuneResult | None) -> bool:
    """Whether every candidate was tried."""
    return result is not None and _looked_at(kernel, result) == len(kernel.space.candidates)


def _looked_at(kernel: Kernel, result: TuneResult) -> int:
    seen = {m.config for m in result.measured} | {config for config, _ in result.rejected}
    return len(seen & set(kernel.space.candidates))


def row_of(kernel: Kernel, result: TuneResult | None) -> dict[str, Any]:
    """A kernel's row in a file of results: its pick, and the measured result as builds store it."""
    row: dict[str, Any] = {
        "spec": kernel.plan.name,
        "form": kernel.form,
        "kernel": kernel.digest,
        "pick": kernel.space.candidates[0].as_dict(),
        "candidates": len(kernel.space.candidates),
        "looked_at": 0,
        "measured": [],
    }
    if result is None:
        return row
    candidates = set(kernel.space.candidates)
    failed = tuple(entry for entry in result.rejected if entry[0] in candidates)
    fields = fields_of(replace(result, rejected=failed))
    return row | {"looked_at": _looked_at(kernel, result)} | fields


def known_results(name: str, newest: Document | None) -> list[TuneResult]:
    """The measured results of a spec, from builds and from the last run of this benchmark."""
    rows = newest["cells"] if newest else []
    found = [result_of(row) for row in rows if row["spec"] == name and row["measured"]]
    return [*load_results(Place(OUT, name).tuning), *found]


def document_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The document of results, from the GPUs and Tritons that its rows name."""
    gpus, tritons = (
        ", ".join(sorted({row[key] for row in rows if key in row})) for key in ("gpu", "triton")
    )
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    environment = {"date": date, "gpu": gpus, "triton": tritons}
    return {"benchmark": "picks", "environment": environment, "cells": list(rows)}

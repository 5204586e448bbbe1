"""The benchmark of linear attention on the CPU: its cells, what it refuses, and its tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import linear, linear_ways, turns
from benchmarks.command import SPECS
from benchmarks.early import Early
from benchmarks.linear import CELLS, check, measure, new_row, prepare, tasks_of
from benchmarks.linear_tables import linear_full_table, linear_table
from benchmarks.linear_ways import (
    COMPILED,
    FLA,
    IN_PARTS,
    SOFTMAX,
    VARIANTS,
    Cell,
    tensors_of,
    ways,
)
from flashgen.loader import load
from support.early_tasks import dying, endless, quick, three_seconds
from support.hurried import Hurried
from support.variants import rendered_module

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """The modules of head_dim 64 as they render now."""
    variants = load([SPECS / "linear.py"])
    return {x.name: rendered_module(x.spec) for x in variants if x.name.endswith("d64")}


@pytest.fixture
def here(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """These modules and short sequences; another variant of the same cell stands for fla."""
    monkeypatch.setattr(linear_ways, "load_module", modules.__getitem__)
    monkeypatch.setattr(linear, "CHECKED", 24)

    def fla(variant: str) -> linear_ways.Call:
        if variant == "gla":
            raise RuntimeError("no such kernel\nhere")
        return linear_ways.own(Cell("plain", 64, 1, 24), CPU)

    monkeypatch.setattr(linear_ways, "fla", fla)


def test_the_cells_differ_and_are_those_of_the_protocol() -> None:
    assert len({(cell.title, cell.part) for cell in CELLS}) == len(CELLS)
    assert CELLS[0] == Cell("elu", 128, 8, 2048, "cell")
    for head_dim in (64, 128):
        grid = [x for x in CELLS if x.part == "grid" and x.head_dim == head_dim]
        assert {x.batch * x.seq_len for x in grid} == {131072, 32768}
        assert {x.variant for x in grid} == VARIANTS.keys() - {"favor"} and len(grid) == 25
    tokens = [x for x in CELLS if x.part == "tokens"]
    assert {x.batch * x.seq_len for x in tokens} == {1048576}
    assert max(x.elements for x in tokens) == 2**31


def test_every_cell_has_a_module() -> None:
    assert {cell.module for cell in CELLS} == {x.name for x in load([SPECS / "linear.py"])}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("variant", ["plain", "elu", "retention", "token", "gla"])
def test_flashgen_computes_the_recurrence_and_another_variant_does_not(variant: str) -> None:
    row = check(Cell(variant, 64, 1, 8), CPU)
    of_inputs = 5 if variant in ("token", "gla") else 4
    assert len(row["error"]["flashgen"]) == of_inputs and max(row["error"]["flashgen"]) < 0.01
    assert "flashgen" not in row["unavailable"]
    if variant == "plain":
        assert not row["unavailable"]
    elif variant == "gla":
        assert row["unavailable"] == {FLA: "RuntimeError: no such kernel"}
    else:
        assert FLA in row["unavailable"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("wrong", range(5))
def test_a_wrong_result_is_refused(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = linear_ways.own

    def off(cell: Cell, device: torch.device) -> linear_ways.Call:
        call = own(cell, device)

        def shifted(*inputs: torch.Tensor) -> torch.Tensor:
            held = [scaled(x, 1.0, 1.1 if i == wrong else 1.0) for i, x in enumerate(inputs)]
            return scaled(call(*held), 1.1 if wrong == 4 else 1.0, 1.0)

        return shifted

    monkeypatch.setattr(linear_ways, "own", off)
    refused = check(Cell("token", 64, 1, 8), CPU)["unavailable"]
    name = "flashgen" if wrong == 4 else "flashgen, backward"
    assert refused[name].startswith("ValueError: wrong results")


def scaled(x: torch.Tensor, by: float, gradient: float) -> torch.Tensor:
    """``x`` times a number, with another number for its gradient."""
    found = x * gradient
    return found + (x * by - found).detach()


@pytest.mark.usefixtures("here")
def test_a_row_has_both_passes_in_both_orders_and_the_reasons_of_others() -> None:
    called: list[str] = []

    def time_ms(call: Any) -> float:
        found = call()
        called.append("backward" if isinstance(found, tuple) else "forward")
        return 0.5

    def memory(call: Any) -> tuple[int, Any]:
        return 3 * 2**20, call()

    for variant, also in (("plain", [FLA]), ("gla", [])):
        row = new_row(Cell(variant, 64, 2, 24))
        measure(Cell(variant, 64, 2, 24), row, CPU, time_ms, memory)
        expected = {name: [0.5, 0.5] for name in ("flashgen", *also)}
        assert row["ms"] == row["backward_ms"] == expected
        assert row["mib"] == row["training_mib"] == dict.fromkeys(expected, 3)
    assert row["unavailable"] == {FLA: "RuntimeError: no such kernel"}
    assert called == [*["forward"] * 4, *["backward"] * 4, *["forward"] * 2, *["backward"] * 2]


@pytest.mark.usefixtures("here")
def test_what_was_wrong_is_not_measured() -> None:
    cell = Cell("plain", 64, 1, 8)
    row = new_row(cell) | {"unavailable": {FLA: "wrong"}}
    measure(cell, row, CPU, lambda call: 1.0, lambda call: (0, None))
    assert list(row["ms"]) == ["flashgen"]


def test_the_ways_of_cells() -> None:
    def names(*given: Any) -> list[str]:
        return [name for name, _ in ways(Cell(*given), CPU)]

    assert names("plain", 64, 1, 2048) == ["flashgen", FLA]
    assert names("elu", 64, 1, 2048) == ["flashgen", FLA, COMPILED]
    assert names("elu", 64, 1, 2048, "cell") == ["flashgen", FLA, COMPILED, IN_PARTS]
    assert names("favor", 64, 4, 8192, "softmax") == ["flashgen", SOFTMAX]
    assert names("elu", 64, 1, 1048576, "tokens") == ["flashgen"]


@pytest.mark.usefixtures("here")
def test_random_features_and_softmax_get_the_same_tensors(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("favor", 64, 1, 24, "softmax")
    monkeypatch.setitem(modules, "causal_d64", modules["linear_plain_d64"])
    inputs, _ = tensors_of(cell, CPU)
    for _, found in ways(cell, CPU):
        assert found()(*inputs).shape == (1, 24, 16, 64)


def test_each_variant_of_fla_is_compiled_in_parts() -> None:
    tasks = tasks_of([x for x in CELLS if x.head_dim == 128], 3)
    given = [task.arguments for task in tasks]
    own = [x for x in given if x[0] != FLA]
    assert given[: len(own)] == own and {x[3:] for x in own} == {(0, 1)}
    assert len(own) == 7 and own[-1][0] == SOFTMAX  # six variants, and softmax
    theirs = given[len(own) :]
    parts = [(cell.variant, part) for _, cell, _, part, parts in theirs if parts == 3]
    assert parts == [(variant, part) for variant in linear.BESIDE_FLA for part in range(3)]
    batches = [batch for batch, _ in theirs[0][2]]  # kernels of fla differ by these
    assert batches == [8, 64, 1, 16, 4]


def test_every_cell_needs_tasks_that_there_are() -> None:
    keys = [task.key for task in tasks_of(CELLS, 3)]
    assert len({*keys}) == len(keys) and len({cell.title for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        plan = linear.plan_of(cell, 3)
        theirs = {key for of_peer in plan.peers.values() for key in of_peer}
        assert {*keys} >= {*plan.own} | theirs
        assert len(plan.own) == (2 if cell.part == "softmax" else 1)
        assert len(theirs) == (0 if cell.part in ("softmax", "tokens") else 3)


@pytest.mark.usefixtures("here")
def test_compiling_beforehand_calls_both_passes_and_tells_errors(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]
) -> None:
    sizes = ((2, 8), (1, 24))
    called: list[tuple[int, bool]] = []
    module = modules["linear_plain_d64"]
    attention = module.attention

    def noted(q: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        called.append((q.shape[2], torch.is_grad_enabled()))
        found: torch.Tensor = attention(q, *more)
        return found

    monkeypatch.setattr(module, "attention", noted)
    assert prepare("flashgen", Cell("plain", 64, 1, 8), sizes, 0, 1, "cpu") == ""
    assert called == [(8, False), (24, False), (8, True), (24, True)]
    found = prepare(FLA, Cell("gla", 64, 1, 8), sizes, 0, 1, "cpu")
    assert found == "RuntimeError: no such kernel"


@pytest.fixture
def run_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs cells with checks and times that only note who takes part, and with tasks by name."""
    monkeypatch.setattr(linear, "check", noted_check)
    monkeypatch.setattr(linear, "measure", noted_measure)
    monkeypatch.setattr(turns, "PATIENCE", 0.0)

    def run(
        cells: Sequence[Cell],
        functions: dict[str, Callable[..., str]],
        limit: float,
        checks: Sequence[dict[str, Any]] = (),
        stuck: int = 0,
    ) -> dict[str, Any]:
        document: dict[str, Any] = {"checks": [*checks], "left_out": [], "cells": []}
        tasks = [
            replace(task, function=functions.get(task.arguments[0], quick), arguments=())
            for task in tasks_of(cells, 2)
        ]
        file = tmp_path / "linear.json"
        with Hurried(tasks, 4, limit, stuck) as early:
            linear.run(cells, document, early, file, CPU, 2)
        if document["cells"]:
            assert json.loads(file.read_text()) == document
        return document

    yield run


def noted_check(cell: Cell, device: torch.device, without: Any = ()) -> dict[str, Any]:
    names = [name for name, _ in ways(cell, device) if name not in without]
    wrong = {COMPILED: "wrong results"} if COMPILED in names else {}
    row = {"cell": f"{cell.module}, checked", "module": cell.module, "unavailable": wrong}
    return row | {"error": {name: [0.0] for name in names}}


def noted_measure(cell: Cell, row: dict[str, Any], device: torch.device) -> None:
    for name, _ in ways(cell, device):
        if name not in row["unavailable"]:
            row["ms"][name] = [1.0, 1.0]


GRID = [Cell("elu", 128, 64, 2048), Cell("plain", 128, 64, 2048)]


def test_a_stuck_peer_leaves_flashgen_alone(run_of: Callable[..., Any]) -> None:
    document = run_of(GRID, {FLA: endless}, 9.0, stuck=4)
    assert not document["left_out"] and len(document["cells"]) == 2
    for row in document["cells"]:
        assert [*row["ms"]] == ["flashgen"] and row["unavailable"][FLA].startswith(turns.LATE)
    assert [[*row["error"]] for row in document["checks"]] == [["flashgen"], ["flashgen"]]


def test_fla_is_added_once_it_is_there_and_is_checked_first(run_of: Callable[..., Any]) -> None:
    document = run_of(GRID, {FLA: three_seconds}, 60.0)
    elu, plain = document["cells"]
    elu_of, plain_of = (cell.module for cell in GRID)
    assert [*plain["ms"]] == ["flashgen", FLA] and not plain["unavailable"]
    assert [*elu["ms"]] == ["flashgen", FLA]
    assert elu["unavailable"] == {COMPILED: "wrong results"}  # of the check
    checked = {row["module"]: [*row["error"]] for row in document["checks"]}
    assert checked == {elu_of: ["flashgen", FLA, COMPILED], plain_of: ["flashgen", FLA]}


def test_who_kills_its_process_is_not_called_here(run_of: Callable[..., Any]) -> None:
    document = run_of(GRID[:1], {"flashgen": dying}, 60.0)
    (row,) = document["cells"]
    assert not row["ms"]
    assert row["unavailable"]["flashgen"] == "its process died while compiling"
    assert not document["checks"]


def test_what_is_not_compiled_is_left_out(run_of: Callable[..., Any]) -> None:
    document = run_of(GRID, {"flashgen": endless}, 4.0, stuck=2)
    assert document["left_out"] == [cell.title for cell in GRID] and not document["cells"]


def test_a_run_goes_on_with_a_file_of_the_same_gpu_alone() -> None:
    before: dict[str, Any] = {
        "environment": {"date": "1", "gpu": "G"},
        "cells": [1],
        "left_out": [2],
    }
    now = {"environment": {"date": "2", "gpu": "G"}, "cells": []}
    assert linear.resumed(before, now) == {**now, "cells": [1], "left_out": []}
    with pytest.raises(ValueError, match="gpu is H, the file has G"):
        linear.resumed(before, {"environment": {"date": "2", "gpu": "H"}})


@pytest.mark.usefixtures("here")
def test_a_gradient_that_is_refused_leaves_the_forward_pass() -> None:
    cell = Cell("plain", 64, 1, 8)
    row = new_row(cell) | {"unavailable": {"fla, backward": "wrong"}}
    measure(cell, row, CPU, lambda call: 1.0, lambda call: (0, None))
    assert list(row["ms"]) == ["flashgen", FLA] and list(row["backward_ms"]) == ["flashgen"]


@pytest.mark.usefixtures("here")
def test_no_cell_begins_after_the_limit() -> None:
    document: dict[str, Any] = {"checks": [], "left_out": [], "cells": []}
    with Early([], 0, -1.0) as early:
        linear.run(CELLS[:3], document, early, None, CPU)
    assert document["left_out"] == [cell.title for cell in CELLS[:3]] and not document["cells"]


def document_of(*rows: dict[str, Any]) -> dict[str, Any]:
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    return {
        "environment": environment | {"fla_core": "0.6.0"},
        "copy_rate": 3e12,
        "checks": [
            {"cell": "a", "error": {"flashgen": [0.001, 0.004, 0.003, 0.002]}, "unavailable": {}},
            {"cell": "b", "error": {"flashgen": [0.002] * 4 + [0.03]}, "unavailable": {FLA: "no"}},
        ],
        "cells": list(rows),
    }


def row_of(cell: Cell, names: tuple[str, ...], ms: float, backward_ms: float) -> dict[str, Any]:
    """Each name after the first takes twice as long as the one before, and has twice the memory."""
    row = new_row(cell)
    for i, name in enumerate(names):
        row["ms"][name] = [ms * 2**i] * 2
        row["backward_ms"][name] = [backward_ms * 2**i] * 2
        row["mib"][name], row["training_mib"][name] = 512 * 2**i, 1024 * 2**i
    return row


def test_the_tables() -> None:
    grid = Cell("plain", 128, 64, 2048)
    document = document_of(
        row_of(Cell("elu", 128, 8, 2048, "cell"), ("flashgen", COMPILED, FLA), 0.1, 0.3),
        row_of(grid, ("flashgen", FLA), 1.0, 3.0),
        row_of(replace(grid, batch=1, seq_len=131072), ("flashgen", FLA), 2.0, 4.0),
        row_of(Cell("favor", 128, 4, 8192, "softmax"), ("flashgen", SOFTMAX), 1.0, 2.0),
        row_of(Cell("plain", 128, 256, 4096, "tokens"), ("flashgen",), 5.0, 20.0),
        row_of(Cell("plain", 128, 1, 1048576, "tokens"), ("flashgen",), 5.5, 21.0),
    )
    text = linear_table(document)
    assert "64 x 2048 / 1 x 131072 (sequences x tokens)" in text
    assert (
        "| 128 | plain | 1 / 2 | 2.00 / 2.00 | 72% / 36% | 3 / 4 | 2.00 / 2.00 | 1.0 / 1.0 "
        "| 2.0 / 2.0 |"
    ) in text
    assert "| 0.1 / 0.3 | 0.4 / 1.2 | 0.2 / 0.6 | 2.00 / 2.00 | 89% | 1.0 | 4.0 | 2.0 |" in text
    assert "| favor d128 4 x 8192 | 1 / 2 | 2 / 4 | 2.00 / 2.00 | 18% | 1.0 | 2.0 |" in text
    assert "| plain d128 1 x 1048576 | 5.5 | 21 | 1.10 / 1.05 | 1.0 |" in text
    assert "over 2 short calls: flashgen 4.0e-03 / 3.0e-02." in text and "- b, fla: no" in text
    full = linear_full_table(document)
    assert "| plain d128 64 x 2048 | 1 1 | 3 3 | 2 2 | 6 6 |" in full


def test_a_table_of_one_who_failed() -> None:
    failed = new_row(Cell("gla", 64, 1, 32768)) | {"unavailable": {"flashgen": "memory"}}
    half = row_of(Cell("token", 64, 1, 32768), ("flashgen", FLA), 1.0, 2.0)
    half["backward_ms"] = {}
    text = linear_table(document_of(failed, half))
    assert "- gla d64 1 x 32768, flashgen: memory" in text
    assert "| 64 | decays of keys | 1 | 2.00 | 9% | - | - | 1.0 | 2.0 |" in text

"""benchmarks.models on the CPU, with small models: errors, times, refusals and the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import model_cells, models
from benchmarks.early import Task
from benchmarks.model_cells import MODELS, ModelCell, attended_of, inputs_of, model_of
from flashgen.integrations.transformers import register, unregister
from support import early_tasks
from support.hurried import Hurried

CPU = torch.device("cpu")
TINY = {
    "vocab_size": model_cells.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 1,
}


@pytest.fixture(autouse=True)
def registered(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "flashgen"))
    monkeypatch.setattr(models, "STEPS", 2)
    monkeypatch.setattr(models, "TURNS", 1)
    register()
    yield
    unregister()


def tiny(name: str) -> ModelCell:
    """A model of the list with few features, layers and tokens."""
    (cell,) = (cell for cell in MODELS if cell.name == name)
    return replace(cell, options={**cell.options, **TINY}, length=20)


@pytest.fixture
def row() -> dict[str, Any]:
    return models.new_row(tiny("Llama")) | {"cell": "a cell"}


def test_a_model_is_compared_and_timed(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(call: Any) -> float:
        call()
        return 1.5

    monkeypatch.setattr(models, "timed", timed)
    cell = tiny("Mistral")
    models.check(cell, row, CPU)
    assert row["error"].keys() == row["grad_error"].keys() == set(models.IMPLEMENTATIONS)
    assert 0 < row["error"]["flashgen"] < 0.05
    assert row["equal_tokens"]["flashgen"] == "24 of 24"
    models.measure(cell, row, CPU)
    assert row["ms"]["forward"] == dict.fromkeys(models.IMPLEMENTATIONS, 1.5)
    assert row["ms"]["token"] == dict.fromkeys(models.IMPLEMENTATIONS, 0.0)
    made = {"gpu": "a GPU", "torch": "1", "triton": "2", "transformers": "3", "date": "today"}
    table = models.models_table({"environment": made, "cells": [row]})
    assert "| a cell | 1.5 / 1.5 / 1.5 | 1.5 / 1.5 / 1.5 | 0 / 0 / 0 |" in table
    assert "24 of 24" in table


def test_wrong_numbers_are_an_error(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is left out."""
    monkeypatch.setitem(models.IMPLEMENTATIONS, "flashgen", "wrong")
    transformers = pytest.importorskip("transformers")

    def wrong(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("wrong", wrong)
    transformers.AttentionMaskInterface.register("wrong", lambda *_, **__: None)
    with pytest.raises(ValueError, match="Llama: error of"):
        models.check(tiny("Llama"), row, CPU)


def test_what_a_peer_refuses_is_noted(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.IMPLEMENTATIONS, "SDPA", "no such attention")
    models.check(tiny("Llama"), row, CPU)
    assert "no such attention" in row["unavailable"]["SDPA"]
    assert "SDPA" not in row["error"]


def test_the_trained_encoder_says_what_it_needs(row: dict[str, Any]) -> None:
    cell = MODELS[-1]
    assert cell.config is None
    with pytest.raises(ModuleNotFoundError, match="not on PYTHONPATH"):
        model_of(cell, "eager", torch.float32, CPU)


@pytest.mark.parametrize("cell", MODELS, ids=lambda cell: cell.name)
def test_padding_is_where_a_model_has_it(cell: ModelCell) -> None:
    given = inputs_of(replace(cell, batch=4), CPU, torch.float32)
    if not cell.padded:
        assert given.keys() == {"pixel_values"}
        return
    attended = given["attention_mask"]
    assert bool(attended[0].all())
    counts = attended.sum(1)
    assert bool((counts[1:] < counts[:-1]).all())
    assert bool((attended[1:, 0 if cell.padded == "left" else -1] == 0).all())
    assert int(given["input_ids"].min()) >= model_cells.FEWEST
    kept = attended_of(cell, given)(torch.ones(4, attended.shape[1], 3))
    assert bool((kept.sum() == 3 * counts.sum()) | (cell.target > 0))
    small = cell.small()
    assert small.options.get("sliding_window", 96) == 96 or small.name == "T5"


def test_models_are_measured_once_their_processes_are_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is stuck, first of the list, keeps nobody; one whose process dies is not tried."""
    cells, file, written = MODELS[:4], tmp_path / "models.json", []

    def check(cell: ModelCell, row: dict[str, Any], device: torch.device) -> None:
        written.append(len(json.loads(file.read_text())["cells"]) if file.exists() else 0)
        if cell is cells[3]:
            raise ValueError("wrong")

    def measure(cell: ModelCell, row: dict[str, Any], device: torch.device) -> None:
        row["ms"]["forward"] = {"flashgen": 1.0}

    monkeypatch.setattr(models, "check", check)
    monkeypatch.setattr(models, "measure", measure)
    functions = (early_tasks.endless, early_tasks.quick, early_tasks.dying, early_tasks.quick)
    tasks = [Task(x.name, function) for x, function in zip(cells, functions, strict=True)]
    document: dict[str, Any] = {"benchmark": "models", "cells": []}
    with Hurried(tasks, 4, 8.0) as early:
        assert models.run(cells, early, document, CPU, file)
    assert [row["cell"] for row in document["cells"]] == [cell.title for cell in cells[1:]]
    assert len(written) == 2 and written[0] < written[1]
    assert [row["unavailable"] for row in document["cells"]] == [
        {},
        {"flashgen": "its process died while compiling"},
        {"flashgen": "ValueError: wrong"},
    ]

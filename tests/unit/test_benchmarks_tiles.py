"""The benchmark of masks that only the data knows, on the CPU: masks, checks, rows, its table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import tiles
from benchmarks.command import SPECS
from benchmarks.early import Task
from benchmarks.figures import FA4, OWN, RIVAL
from benchmarks.tile_cells import BLOCK, CELLS, CHOSEN, TileCell, data_of, lists
from benchmarks.tile_tables import of_causal, tiles_table, to_flex
from benchmarks.tiles import Way, measure, new_row, prepare, seen_tiles, tiles_of, visited
from benchmarks.turns import LATE
from flashgen.loader import load
from flashgen.tracing.expr import bound, concrete
from support.early_tasks import endless, quick
from support.hurried import Hurried
from support.variants import rendered_module

CPU = torch.device("cpu")
ISLANDS = TileCell("islands", "islands", 256)
CHOICE = TileCell("chosen64", "chosen", 256, kv_heads=2, kind="random")
MASKS = list({cell.mask: cell for cell in CELLS[::-1] if cell.mask != "causal"}.values())
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


@pytest.fixture(scope="module")
def specs() -> dict[str, Any]:
    return {variant.name: variant.spec for variant in load([SPECS / f"{tiles.SPECS}.py"])}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, specs: dict[str, Any]) -> Iterator[None]:
    """Modules as they render now, and rows in several blocks."""
    modules = {name: rendered_module(specs[name]) for name in (ISLANDS.module, CHOICE.module)}
    for module in modules.values():  # as if they had Gluon kernels
        module.HOPPER_CONFIG = module.BACKWARD_HOPPER = {"BLOCK_M": 128, "BLOCK_N": 64}
    monkeypatch.setattr(tiles, "load_module", modules.__getitem__)
    monkeypatch.setattr(tiles, "ROWS", 64)
    monkeypatch.setattr(tiles, "compiled_block_mask", lambda: create_block_mask)
    monkeypatch.setattr(tiles, "compiled_flex", lambda: flex_attention)
    donated = torch._functorch.config.donated_buffer
    yield
    torch._functorch.config.donated_buffer = donated


def test_every_cell_has_its_own_name_and_a_causal_one_of_its_sizes() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names) and {cell.reference for cell in CELLS} <= {*names}


@pytest.mark.parametrize("cell", MASKS, ids=lambda cell: cell.mask)
def test_the_masks_are_those_of_the_modules(cell: TileCell, specs: dict[str, Any]) -> None:
    if data_of(replace(cell, length=64), CPU).parameters:
        cell = replace(cell, length=2048)
    data, length = data_of(cell, CPU), cell.length
    heads = torch.arange(cell.heads)[:, None, None]
    q, kv = torch.arange(0, length, length // 37)[:, None], torch.arange(0, length, 5)
    sizes = {"num_q_heads": cell.heads, "q_len": length, "kv_len": length}
    with bound({**data.parameters, **sizes}):
        b = torch.zeros(1, dtype=torch.long)
        expected = concrete(specs[cell.module].mask.mask_mod(b, heads, q, kv))
    found = data.mask_mod(0, heads, q, kv)
    assert torch.equal(*torch.broadcast_tensors(found, expected))
    assert 0 < found.sum() < found.numel()
    own = {*data.parameters} == {param.name for param in specs[cell.module].mask.params}
    assert own and (data.heads == 1) == (
        (found[:1] == found).all().item() if found.dim() > 2 else True
    )


@pytest.mark.parametrize("kind", ["random", "near"])
def test_lists_have_the_own_block_and_others_before_it(kind: str) -> None:
    found = lists(2, 2048, 1, kind, CPU)[0]
    own = torch.arange(2048)[:, None] // BLOCK
    assert torch.equal(found[0, :, :1], own.int()) and (found <= own).all()
    assert torch.equal((found >= 0).sum(-1)[0], (own[:, 0] + 1).clamp(max=CHOSEN))
    shared = [len({*a} & {*b}) for a, b in pairwise(found[0, 1984:].tolist())]
    assert mean(shared) > 10 if kind == "near" else mean(shared) < 10


def test_visible_pairs_and_visited_tiles() -> None:
    for cell in (replace(ISLANDS, length=1024), replace(CHOICE, length=1024)):
        data = data_of(cell, CPU)
        at = torch.arange(cell.length)
        seen = data.mask_mod(0, torch.arange(16)[:, None, None], at[:, None], at)
        seen = seen.expand(16, cell.length, cell.length)
        pairs, small = seen_tiles(cell, data, CPU)
        assert pairs == seen.sum()
        for m, n in ((16, 64), (64, 128), (192, 64)):
            whole = torch.nn.functional.pad(seen, (0, 0, 0, -cell.length % m))
            some = whole.view(16, -1, m, cell.length // n, n).any(-1).any(2)
            assert visited(cell, small, m, n) == some.sum() * m * n


def test_tiles_hold_rows_of_the_heads_that_share_lists() -> None:
    module = SimpleNamespace(HOPPER_CONFIG={"BLOCK_M": 128, "BLOCK_N": 64})
    module.BACKWARD_HOPPER = {"BLOCK_M": 64, "BLOCK_N": 128}
    assert tiles_of(module, ()) == {"ms": (128, 64), "backward_ms": (64, 128)}
    module._heads_of_a_list = lambda q, k: 8
    assert tiles_of(module, (1, 2, 3)) == {"ms": (16, 64), "backward_ms": (64, 128)}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("cell", [ISLANDS, CHOICE], ids=lambda cell: cell.mask)
def test_a_row_has_all_figures_of_everyone_who_is_right(cell: TileCell) -> None:
    row, made = new_row(cell), []

    def time_ms(call: Any) -> float:
        made.append(call())
        return 0.5

    measure(cell, row, CPU, with_fa4=False, time_ms=time_ms)
    for key in ("ms", "backward_ms", "made_ms", "making_ms"):
        assert row[key] == {OWN: [0.5, 0.5]}, key
    assert 0 < row["error"][OWN] < 0.01 and 0 < row["error"][f"{OWN}, made"] < 0.01
    assert list(row["unavailable"]) == [RIVAL] and row["visited"]["ms"] >= row["visible"] > 0
    assert torch.equal(made[0], made[2]) and len(made[1]) == 3 and made[3].bits is not None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("wrong", range(4))
def test_wrong_results_are_noted(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = tiles.exact

    def shifted(*given: Any) -> Any:
        heads = exact(*given)
        return [heads[0], tuple(x * (1 + 0.1 * (i == wrong)) for i, x in enumerate(heads[1]))]

    monkeypatch.setattr(tiles, "exact", shifted)
    row = new_row(CHOICE)
    measure(CHOICE, row, CPU, with_fa4=False, time_ms=lambda call: 1.0)
    assert "wrong" in row["unavailable"][OWN] and not row["ms"]


@pytest.mark.usefixtures("here")
def test_a_peer_without_right_gradients_keeps_its_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_gradients(cell: Any, data: Any, qkv: Any) -> Way:
        return Way(qkv, lambda: tiles.flashgen(cell, data, qkv).call().detach())

    monkeypatch.setattr(tiles, "flex", no_gradients)
    row = new_row(ISLANDS)
    measure(ISLANDS, row, CPU, with_fa4=False, time_ms=lambda call: 1.0)
    assert row["ms"][RIVAL] == [1.0, 1.0] and RIVAL not in row["backward_ms"]
    assert list(row["unavailable"]) == [f"{RIVAL}, backward"]


def test_a_query_without_keys_has_an_output_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(ISLANDS, length=64)
    data = replace(data_of(cell, CPU), mask_mod=lambda b, h, q, kv: (q > 9) & (kv < q))
    qkv, grad_out = tiles.inputs_of(cell, CPU)
    for results in tiles.exact(cell, data, qkv, grad_out):
        assert not results[0][:, :10].any() and all(torch.isfinite(x).all() for x in results)


@pytest.mark.usefixtures("here")
def test_compiling_beforehand_calls_both_passes_and_tells_errors() -> None:
    assert prepare(OWN, ISLANDS, False, "cpu") == ""
    assert prepare(RIVAL, ISLANDS, False, "cpu").startswith("NotImplementedError: FlexAttention")


def test_own_kernels_are_compiled_first_then_those_of_each_cell() -> None:
    tasks = tiles.tasks_of(CELLS, True)
    names = [task.arguments[0] for task in tasks]
    own = names.count(OWN)
    assert names[: own + 2] == [OWN] * own + [RIVAL, FA4] and OWN not in names[own:]
    assert own == len({(cell.mask, cell.kv_heads) for cell in CELLS})
    keys = {task.key for task in tasks}
    assert len(keys) == len(tasks)
    for cell in CELLS:
        plan = tiles.plan_of(cell, True)
        assert keys.issuperset([*plan.own, *itertools.chain(*plan.peers.values())])
        assert {*plan.peers} == {RIVAL, FA4} | ({tiles.SMALL} if cell.small else set())


def test_rows_are_written_after_each_cell_with_who_was_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second cell is ready before the first, one of whose peers stays away."""
    cells, file = [ISLANDS, CHOICE], tmp_path / "tiles.json"
    seen: list[tuple[str, list[str], int]] = []

    def measure(cell: TileCell, row: Any, device: Any, *, with_fa4: bool, without: Any) -> None:
        written = len(json.loads(file.read_text())["cells"]) if file.exists() else 0
        seen.append((cell.name, [*without], written))
        row["ms"][OWN] = [1.0, 1.0]

    monkeypatch.setattr(tiles, "measure", measure)
    stuck = tiles.kernels_of(FA4, ISLANDS)
    tasks = [Task(x.key, endless if x.key == stuck else quick) for x in tiles.tasks_of(cells, True)]
    document: dict[str, Any] = {"benchmark": "tiles", "cells": []}
    with Hurried(tasks, 2, 9.0) as early:
        tiles.run(cells, early, document, CPU, with_fa4=True, path=file)
    assert seen == [(CHOICE.name, [], 0), (ISLANDS.name, [FA4], 1)]
    assert [row["cell"] for row in document["cells"]] == [ISLANDS.name, CHOICE.name]
    assert document["cells"][0]["unavailable"][FA4].startswith(LATE)
    assert json.loads(file.read_text()) == document


def test_the_table() -> None:
    plain, islands = new_row(TileCell("causal", "causal", 256)), new_row(ISLANDS)
    plain |= {"visible": 300_000, "visited": {"ms": 400_000, "backward_ms": 500_000}}
    plain |= {"ms": {OWN: [0.6, 0.8]}, "backward_ms": {OWN: [2.0]}}
    islands |= {"visible": 320_000, "visited": {"ms": 480_000, "backward_ms": 500_000}}
    islands |= {"ms": {OWN: [0.7], RIVAL: [1.4]}, "backward_ms": {OWN: [2.5], RIVAL: [5.0]}}
    islands |= {"made_ms": {OWN: [0.8]}, "making_ms": {OWN: [0.05], RIVAL: [1.8]}}
    islands["unavailable"] = {"FA4": "no"}
    rows = [plain, islands]
    assert of_causal(islands, rows, "ms") == pytest.approx(1.2)
    assert of_causal(islands, rows, "backward_ms", "visible") == pytest.approx(0.8 * 16 / 15)
    assert of_causal(plain, [plain], "ms") is None
    assert to_flex(islands) == pytest.approx([2.0, 2.0, 4.0, 8.2 / 3.3])
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    text = tiles_table({"environment": environment, "cells": rows})
    assert "| islands, 256 | 30.5% | 0.700 | 1.400 | 2.500 | 5.000 | 0.800 |" in text
    ratios = "1.20 | 0.80 | 1.07 | 0.85 | 2.00 | 2.00 | 4.00 | 2.48"
    assert f"| islands, 256 | 50 | 1800 | {ratios} |" in text
    assert "- islands, 256, FA4: no" in text

"""What the tensors of a cell hold, the captured encoder and its lift, and what tables say of it."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass

import pytest
import torch

from benchmarks import capture_encoder, cells, command, figures, record, table
from benchmarks.cells import AS_CAPTURED, Cell
from benchmarks.figures import NORMAL, of_normal
from benchmarks.inputs import GROWTH, SPIKE, captured, make_inputs, named_inputs, turned

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Grouped(Cell):
    """Four heads of queries, two of keys, of three sequences."""

    batch, num_heads, num_kv_heads = 3, 4, 2


def cell(seq_len=64, qk_head_dim=32, v_head_dim=16, dtype="float32"):
    return Grouped("m", "full", seq_len, qk_head_dim, v_head_dim, dtype)


def scores(q, k):
    """In base 2, (heads, queries, keys)."""
    return q.double() @ k.double().mT * q.shape[-1] ** -0.5 * math.log2(math.e)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["normal", "scaled:3", "scaled:0.5", "growing", "spike", "spike:last", "encoder"]
)
def test_inputs_are_the_same_every_time_and_of_the_cells_shapes(name):
    first, second = (make_inputs(cell(), CPU, named_inputs(name)) for _ in range(2))
    shapes = [tuple(x.shape) for x in first]
    assert shapes == [(3, 4, 64, 32), (3, 2, 64, 32), (3, 2, 64, 16)]
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert torch.equal(first[2], make_inputs(cell(), CPU)[2])  # v is always the same


@pytest.mark.parametrize(
    "name", ["", "scaled", "scaled:", "scaled:N", "scaled:0", "scaled:inf", "spike:middle", "huge"]
)
def test_names_that_there_are_not(name):
    with pytest.raises(ValueError, match="write one of normal, scaled:N, growing"):
        make_inputs(cell(), CPU, name)
    with pytest.raises(argparse.ArgumentTypeError, match="N is a number over 0"):
        named_inputs(name)


def test_what_they_change_of_normal_ones():
    q, k, _ = make_inputs(cell(), CPU)
    scaled, same, _ = make_inputs(cell(), CPU, "scaled:8")
    assert torch.equal(scaled, 8 * q) and torch.equal(same, k)
    _, growing, _ = make_inputs(cell(), CPU, "growing")
    grown = (growing / k).mean((0, 1, 3))
    torch.testing.assert_close(grown, torch.linspace(1, GROWTH, 64))
    for name, places in (
        ("spike", [(0, 0), (1, 63)]),
        ("spike:first", [(0, 0), (1, 0)]),
        ("spike:last", [(0, 63), (1, 63)]),
    ):
        same, spiked, _ = make_inputs(cell(), CPU, name)
        assert torch.equal(same, q)
        expected = k.clone()
        for head, at in places:
            expected[:, head, at] = SPIKE
        assert torch.equal(spiked, expected)


def test_heads_take_turns_over_the_sequences_too():
    """Where a sequence has one head of keys, the next one's has its spike last."""

    @dataclass(frozen=True)
    class One(Cell):
        batch, num_heads, num_kv_heads = 2, 3, 1

    _, k, _ = make_inputs(One("m", "full", 8, 16, 16, "float32"), CPU, "spike")
    assert (k[0, 0, 0] == SPIKE).all() and (k[1, 0, -1] == SPIKE).all()
    assert (k == SPIKE).sum() == 2 * 16


# --- the encoder ----------------------------------------------------------------------------------


def test_what_was_captured():
    """Its scores are steep: most of that is one head's."""
    assert capture_encoder.CAPTURED.stat().st_size < 1_000_000
    q, k = captured()
    assert q.shape == k.shape == (12, 512, 32)
    found = scores(q, k)
    assert 6.5 < float(found.std()) < 9
    growth = found.amax(-1) - found[..., :16].amax(-1)
    assert 65 < float(growth.max()) < 75


def test_as_they_are():
    """In a cell of 32 columns and 512 tokens, in whatever order heads come."""
    assert (AS_CAPTURED.seq_len, AS_CAPTURED.qk_head_dim) == (512, 32)
    for got, kept in zip(make_inputs(cell(512), CPU, "encoder"), captured(), strict=False):
        assert torch.equal(got.flatten(0, 1)[0], kept[0])


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_a_lift_keeps_every_score(head_dim):
    q, k, _ = make_inputs(cell(1100, head_dim), CPU, "encoder")
    of = torch.arange(1100) % 512
    for batch in range(3):
        for head in range(4):
            kept = scores(*(x[(batch * 2 + head // 2) % 12][of] for x in captured()))
            got = scores(q[batch, head], k[batch, head // 2])
            torch.testing.assert_close(got, kept, atol=2e-4, rtol=0)
            grown = got.amax(-1) - got[:, :16].amax(-1)
            torch.testing.assert_close(
                grown, kept.amax(-1) - kept[:, :16].amax(-1), atol=4e-4, rtol=0
            )


def test_a_lift_to_16_bits_keeps_mean_spread_and_growth():
    q, k = (turned(x, 128).bfloat16() for x in captured())
    found, kept = scores(q, k), scores(*captured())
    assert float((found.mean() - kept.mean()).abs()) < 0.05
    assert float(found.std()) == pytest.approx(float(kept.std()), rel=0.01)
    grown = [float((x.amax(-1) - x[..., :16].amax(-1)).max()) for x in (found, kept)]
    assert grown[0] == pytest.approx(grown[1], abs=1)


def test_heads_that_are_too_narrow():
    with pytest.raises(ValueError, match="head_dim 16 is below their 32 columns"):
        make_inputs(cell(qk_head_dim=16), CPU, "encoder")


def test_words_become_the_longest_pieces_that_there_are(monkeypatch):
    entries = ["[PAD]", "[CLS]", "[SEP]", "sea", "##m", "##s", ",", "the"]
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    assert capture_encoder.tokens_of("The seams, the", vocabulary) == [1, 7, 3, 4, 5, 6, 7, 2]
    monkeypatch.setattr(capture_encoder, "TOKENS", 4)
    assert capture_encoder.tokens_of("The seams, the", vocabulary) == [1, 7, 3, 2]


def test_weights_are_read(tmp_path):
    values = torch.arange(6, dtype=torch.float32)
    head = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
            "b": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}  # fmt: skip
    text = json.dumps(head | {"__metadata__": {"format": "pt"}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8) + values.numpy().tobytes())
    found = capture_encoder.read_weights(file)
    assert found.keys() == {"a"} and torch.equal(found["a"], values.reshape(2, 3))


# --- a run, and its tables ------------------------------------------------------------------------


def row(name, inputs, own, best, **fields):
    by = {"flashgen": [own], "FA4": [best]}
    return {
        "cell": name,
        **({"inputs": inputs} if inputs else {}),
        "mask": name,
        "title": name,
        "seq_len": 64,
        "head_dim": [128, 128],
        "dtype": "bfloat16",
        "num_heads": 2,
        "in_grid": True,
        "visible_pairs": 64**2,
        "config": {},
        "ms": by,
        "tflops": {peer: [100 / ms] for peer, [ms] in by.items()},
        "error": {"flashgen": 0.002},
        "unavailable": {},
        **fields,
    }


def results(rows, date="2026-01-31", benchmark="forward"):
    env = {"date": date, "gpu": "Some GPU", "torch": "2", "triton": "3", "cudnn": "9"}
    head = {"benchmark": benchmark, "environment": env, "protocol": {}}
    names = list(dict.fromkeys(row["inputs"] for row in rows if "inputs" in row))
    return head | ({"inputs": names} if names else {}) | {"cells": rows}


STEEP = [
    row("full", "normal", 1.0, 1.1),
    row("full", "spike", 1.25, 1.2),
    row("full", "encoder", 1.0, 1.5),
    row("causal", "normal", 1.0, 1.2),
]


def test_tables_show_the_worst_of_the_inputs():
    document = of_normal(results(STEEP))
    assert [r["cell"] for r in document["cells"]] == ["full", "causal"]
    text = table.summary_table(document)
    assert "| to the best, medians | worst inputs, of normal | worst inputs, to the best |" in text
    assert "| 128 | full | 100 | 91 | 1.10 | 0.80 | 0.96 |" in text
    assert "| 128 | causal | 100 | 83 | 1.20 | - | - |" in text
    assert text.endswith(
        "- With other inputs (spike, encoder), by medians, at least 0.80 of the rate with normal "
        "ones (full, spike) and 0.96 times the best peer (full, spike)."
    )
    assert "| full | 100.0% | 100 | - | 91 | - | 1.10 | 1.00 | 0.80 | 0.96 |" in (
        table.variants_table(document)
    )
    full = table.full_table(document)
    assert (
        "With other inputs:\n\n| cell | inputs | flashgen, medians | of normal, medians |" in full
    )
    assert "| full | spike | 80 | 0.80 | FA4 | 0.96 | 2.00e-03 |" in full


def test_old_results_and_others_alone_are_shown_as_before():
    old = results([row("full", None, 1.0, 1.1)])
    for document in (old, of_normal(old)):
        assert "worst" not in table.summary_table(document)
        assert "With other inputs" not in table.full_table(document)
    alone = results([row("full", "spike", 1.0, 1.1)])
    assert of_normal(alone) is alone


def test_the_newest_row_of_each_inputs_joins_the_newest_normal_ones(tmp_path):
    for date, rows in {
        "2026-01-01": STEEP,
        "2026-01-02": [row("full", None, 2.0, 2.2)],
        "2026-01-03": [row("full", "encoder", 3.0, 3.3)],
    }.items():
        (tmp_path / f"forward-{date}.json").write_text(record.layout(results(rows, date)))
    launch = {"benchmark": "launch", "environment": results([])["environment"], "calls": {}}
    (tmp_path / "launch.json").write_text(record.layout(launch))
    assert figures.newest_results(tmp_path)["launch"] == launch == of_normal(launch)
    newest = figures.newest_results(tmp_path)["forward"]
    assert newest["environment"]["date"] == "2026-01-02"
    others = {r["inputs"]: (r["ms"]["flashgen"], r["of_normal"]) for r in newest["other_inputs"]}
    # Of the same run alone are rates compared.
    assert others == {"spike": ([1.25], {"ms": 0.8}), "encoder": ([3.0], {})}


def test_a_run_measures_each_cell_with_each_inputs(tmp_path, monkeypatch, capsys):
    measured, names, compiled = [], [], []

    def measure(cell, row, peers, repetition, device, timers, which):
        measured.append((row["cell"], row["inputs"]))
        names.append(set(peers))
        row |= {key: value for key, value in STEEP[0].items() if key not in ("cell", "inputs")}
        row["sustained_tflops"] = {}

    monkeypatch.setattr(command, "sees_gpu", lambda benchmark: True)
    monkeypatch.setattr(command, "_build_missing_modules", lambda *given, **options: None)
    monkeypatch.setattr(command, "compile_all", lambda *given, **to: compiled.append(to) or [])
    monkeypatch.setattr(command, "environment", lambda device: results([])["environment"])
    monkeypatch.setattr(command, "new_row", lambda c, which: {"cell": c.name, "ms": {}})
    monkeypatch.setattr(command, "measure", measure)
    some = (*cells.GRID[:1], AS_CAPTURED)

    def run(*words):
        measured.clear()
        file = tmp_path / "results.json"
        argv = ["x", "--json", str(file), "--repeat", "1", *words]
        monkeypatch.setattr("sys.argv", argv)
        assert command.run("forward", some, None, table.full_table) == 0
        return json.loads(file.read_text())

    assert run()["inputs"] == [NORMAL]
    assert measured == [("full_d64 S=2048", "normal")]
    document = run("--inputs", "normal", "encoder")
    assert [r["inputs"] for r in document["cells"]] == ["normal", "encoder"] * 2
    assert measured[2:] == [("full_d32 S=512", "normal"), ("full_d32 S=512", "encoder")]
    assert "With other inputs:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("--inputs", "steep")
    run("--without", "FlexAttention", "SDPA flash")
    assert names[-1] == {"flashgen", "SDPA cuDNN"}
    assert compiled[-1] == {"with_fa4": False, "without": ["FlexAttention", "SDPA flash"]}
    with pytest.raises(SystemExit):
        run("--without", "flashgen")

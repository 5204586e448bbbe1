"""Cells drawn at random: the draw, what cells compute, how they are timed, and what is reported."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import (
    anywhere,
    beforehand,
    drawing,
    drawn_tables,
    fa4,
    pairs,
    passes,
    peers,
    table,
)
from benchmarks.accuracy import make_gradient
from benchmarks.beforehand import Workers, prepare, tasks
from benchmarks.drawing import Drawn, attention_of, draw
from benchmarks.inputs import make_inputs, named_inputs
from benchmarks.slices import GradientSlices, Slices

CPU = torch.device("cpu")
ENVIRONMENT = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}


def cell(kind="causal", seq_len=100, head_dim=16, **fields):
    attention = drawing.SPECS[kind][0]
    own = {"kind": kind, "sequences": 2, "kv_heads": 2, "group": 2, "dtype": "float32"}
    own |= {"window": {"width": 7}, "packed": {"starts": (0, 30, 31, 77)}}.get(kind, {})
    return Drawn(f"{kind}_d{head_dim}", attention, seq_len, head_dim, head_dim, **own | fields)


# --- the draw -------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_cells():
    assert [c.name for c in draw(1, 4)] == [
        "causal_d192 S=512 B=254 H=2/1 scaled:8",
        "softcap_d128 S=16384 B=2 H=4/4 normal",
        "packed_d64 S=4096 B=26 H=4/4 spike",
        "causal_d192_v128 S=5555 B=20 H=2/1 spike",
    ]
    assert draw(1, 40)[:4] == draw(1, 4) != draw(2, 4)


MANY = draw(7, 3000)


def test_what_is_drawn_is_what_was_asked_for():
    for c in MANY:
        work = c.batch * c.seq_len * c.num_heads
        assert 2**16.5 <= work <= 2**19.5
        assert c.seq_len in drawing.LENGTHS and c.kv_heads in drawing.KV_HEADS
        assert c.group in drawing.GROUPS and c.num_heads == c.group * c.num_kv_heads
        assert (c.width in drawing.WINDOWS) == (c.kind == "window")
        assert c.dtype == ("float16" if c.kind == "fp16" else "bfloat16")
        assert (len(c.starts) in range(2, 9)) == (c.kind == "packed")
        assert list(c.starts) == sorted({*c.starts} & {*range(c.seq_len)})
        dims = (c.qk_head_dim, c.v_head_dim)
        assert (dims[0] if dims[0] == dims[1] else dims) in drawing.HEAD_DIMS
        assert named_inputs(c.inputs) == c.inputs
    for values, drawn in (
        (drawing.KINDS, [c.kind for c in MANY]),
        (drawing.INPUTS, [c.inputs for c in MANY]),
        (drawing.LENGTHS, [c.seq_len for c in MANY]),
        ([d if isinstance(d, int) else d[0] for d in drawing.HEAD_DIMS],
         [c.qk_head_dim for c in MANY]),
    ):  # fmt: skip
        for value in set(values):
            share = values.count(value) / len(values)
            spread = math.sqrt(share * (1 - share) / len(drawn))
            assert abs(drawn.count(value) / len(drawn) - share) < 4 * spread, value


def test_a_module_belongs_to_kind_dims_and_type():
    by_module = {}
    for c in MANY:
        by_module.setdefault(c.module, set()).add(c.spec)
    assert all(len(specs) == 1 for specs in by_module.values())
    assert len({next(iter(specs)) for specs in by_module.values()}) == len(by_module)


# --- what cells compute ---------------------------------------------------------------------------


def expected(c, inputs):
    """In float64, head by head."""
    q, k, v = (x.double() for x in inputs)
    k, v = (x.repeat_interleave(c.group, 1) for x in (k, v))
    i, j = torch.arange(c.seq_len)[:, None], torch.arange(c.seq_len)
    scores = q @ k.mT * c.qk_head_dim**-0.5
    seen = j <= i if c.kind != "full" else j >= 0
    if c.kind == "window":
        seen = seen & (j >= i - c.width)
    if c.kind == "packed":
        ids = torch.tensor([sum(start <= place for start in c.starts) for place in range(len(j))])
        seen = seen & (ids[:, None] == ids)
    if c.kind == "softcap":
        scores = 30 * torch.tanh(scores / 30)
    if c.kind == "alibi":
        slopes = 2.0 ** (-0.5 * torch.arange(1, c.num_heads + 1, dtype=torch.float64))
        scores = scores + slopes[:, None, None] * (j - i)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v


@pytest.mark.parametrize("kind", drawing.SPECS)
def test_slices_hold_an_output_to_attention(kind):
    c = cell(kind)
    inputs = make_inputs(c, CPU, "scaled:3")
    slices = Slices(c, attention_of(c, CPU), inputs)
    out = expected(c, inputs)
    assert slices.error(out) < 1e-6 < slices.error(out * 1.01)
    assert slices.rounding < 1e-6
    assert math.isnan(slices.error(out * math.nan))


def test_what_rounding_may_cost():
    c = cell(dtype="bfloat16", seq_len=300)
    inputs = make_inputs(c, CPU)
    slices = Slices(c, attention_of(c, CPU), inputs)
    out = expected(c, inputs)
    error = slices.error(out.bfloat16())
    assert 5e-4 < error < slices.rounding < 5e-3
    assert error < slices.limit([]) < 0.01
    # As many times as in the worst of the others, unless that is of something else.
    assert slices.limit([0.004, 0.01]) == pytest.approx(0.02 + 2**-9)
    assert slices.limit([0.3]) == slices.limit([])


def gradients(c, inputs):
    leaves = [x.double().requires_grad_() for x in inputs]
    grad_out = make_gradient(c, CPU).double()
    return torch.autograd.grad(expected(c, leaves), leaves, grad_out)


@pytest.mark.parametrize("kind", drawing.SPECS)
def test_slices_hold_gradients_to_those_of_attention(kind):
    c = cell(kind)
    inputs = make_inputs(c, CPU, "scaled:3")
    slices = GradientSlices(c, attention_of(c, CPU), inputs)
    grads = gradients(c, inputs)
    assert slices.error(*grads) < 1e-7 < slices.limit([]) < 1e-6
    for wrong in range(3):
        off = [x * (1.01 if n == wrong else 1.0) for n, x in enumerate(grads)]
        assert slices.error(*off) == pytest.approx(0.01, rel=1e-3)
    assert math.isnan(slices.error(grads[0] * math.nan, *grads[1:]))


def test_what_rounding_may_cost_gradients():
    c = cell(dtype="bfloat16", seq_len=300)
    inputs = make_inputs(c, CPU)
    slices = GradientSlices(c, attention_of(c, CPU), inputs)
    error = slices.error(*(x.bfloat16() for x in gradients(c, inputs)))
    assert 5e-4 < error < slices.rounding < 8e-3
    assert error < slices.limit([]) < 0.02


@pytest.mark.filterwarnings("ignore:.*eager reference")
@pytest.mark.parametrize("kind", ["window", "softcap", "alibi", "packed"])
def test_modules_are_built_as_the_spec_says(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(beforehand, "target", lambda: "sm_90")
    c = cell(kind, head_dim=64, dtype="bfloat16")
    assert prepare([c], "flashgen", tmp_path, "cpu") == ""
    module = beforehand.own_module(c, tmp_path, "sm_90")
    assert module is beforehand.own_module(c, tmp_path, "sm_90")
    attention, inputs = attention_of(c, CPU), make_inputs(c, CPU)
    out = module.attention(*inputs, **attention.parameters)
    slices = Slices(c, attention, inputs)
    assert slices.error(out) <= slices.limit([])


@pytest.mark.filterwarnings("ignore")  # eager FlexAttention says that it is slow
@pytest.mark.parametrize("kind", drawing.SPECS)
def test_flex_attention_computes_it(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    peers.compiled_flex.cache_clear()
    c = cell(kind, seq_len=128)
    attention, inputs = attention_of(c, CPU), make_inputs(c, CPU)
    with torch.no_grad(), peers.flex(c, attention, inputs) as call:
        error = Slices(c, attention, inputs).error(call())
    peers.compiled_flex.cache_clear()
    assert error < 1e-6


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_sdpa_computes_it(kind):
    c = cell(kind)
    attention, inputs = attention_of(c, CPU), make_inputs(c, CPU)
    with torch.no_grad(), peers.sdpa(SDPBackend.MATH)(c, attention, inputs) as call:
        assert Slices(c, attention, inputs).error(call()) < 1e-6


def test_documents_of_a_batch_end_where_sequences_do():
    ids = torch.tensor([[0, 0, 1], [1, 1, 1], [2, 0, 0]], dtype=torch.int32)
    ends = fa4.ends_of(ids)
    assert ends.tolist() == [0, 2, 3, 6, 7, 9] and ends.dtype == torch.int32


# --- turns ----------------------------------------------------------------------------------------


def test_contenders_take_turns():
    order = []
    times = {"flashgen": 1.0, "FA4": 2.0}

    def turn(call, count):
        order.append((call(), count))
        return times[call()]

    calls = {name: lambda name=name: name for name in times}
    first = {name: pairs.first_turn(call, turn) for name, call in calls.items()}
    assert first == times
    # Ten milliseconds of calls, as first the fewest of them say.
    assert order == [("flashgen", 3), ("flashgen", 10), ("FA4", 3), ("FA4", 5)]
    order.clear()
    found = pairs.rounds(calls, first, turn)
    assert found == {name: [ms] * pairs.ROUNDS for name, ms in times.items()}
    there = [("flashgen", 10), ("FA4", 5)]
    assert order[:6] == there + there[::-1] + there
    assert pairs._calls_for(40.0) == pairs.FEWEST and pairs._calls_for(0.01) == pairs.MOST


def test_whoever_may_be_the_quickest_is_a_rival():
    first = {"flashgen": 0.5, "FA4": 1.05, "SDPA cuDNN": 1.0, "FlexAttention": 1.2}
    assert pairs.rivals(first, "flashgen") == ["FA4", "SDPA cuDNN"]
    assert pairs.rivals({"flashgen": 0.5}, "flashgen") == []
    ms = {"flashgen": [1.0, 1.1, 9.0], "FA4": [1.3, 1.2, 1.1], "SDPA cuDNN": [1.25, 1.0, 1.3]}
    assert pairs.best(ms, "flashgen") == ("FA4", pytest.approx(1.2 / 1.1))


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Peers that compute in torch and take what `times` says, by name; cells of 64 tokens."""
    times = {"flashgen": 1.0, "FA4": 1.2, "SDPA cuDNN": 1.5, "FlexAttention": 1.3}
    factors = {}

    def peer(name):
        @contextmanager
        def entered(c, attention, inputs):
            if name == "SDPA cuDNN":
                raise NotImplementedError("no such head")
            out = expected(c, inputs) * factors.get(name, 1.0)

            def call():
                return out

            call.peer = name
            yield call

        return entered

    monkeypatch.setattr(drawing, "LENGTHS", (64,))
    monkeypatch.setattr(drawing, "LEAST", 9)
    monkeypatch.setattr(drawing, "MOST", 10)
    monkeypatch.setattr(anywhere, "PEERS", {name: peer(name) for name in times})
    monkeypatch.setattr(anywhere, "own_peer", lambda folder: peer("flashgen"))
    monkeypatch.setattr(anywhere, "differentiated", named)
    monkeypatch.setattr(anywhere, "_note_kernel", lambda row, c, folder, which: None)
    monkeypatch.setattr(anywhere, "sees_gpu", lambda name: True)
    monkeypatch.setattr(anywhere, "environment", lambda device: ENVIRONMENT)
    monkeypatch.setattr(anywhere.torch, "device", lambda name: CPU)
    monkeypatch.setattr(anywhere, "first_turn", lambda call: times[call.peer])
    monkeypatch.setattr(
        anywhere, "rounds", lambda calls, first: {name: [times[name]] * 3 for name in calls}
    )
    return times, factors


def named(name, peer):
    """A peer's backward pass, whose calls say whose they are."""

    @contextmanager
    def entered(c, attention, inputs):
        with passes.differentiated(name, peer)(c, attention, inputs) as gradients:

            def call():
                return gradients()

            call.peer = name
            yield call

    return entered


def run(tmp_path, *words, status=0):
    file = tmp_path / "anywhere.json"
    asked = ["--seed", "3", "--cells", "6", "--jobs", "0", "--json", str(file), *words]
    assert anywhere.main(asked) == status
    return json.loads(file.read_text())


def near(row):
    """The peers that may be the quickest: FA4 has been ahead of FlexAttention in the plain ones."""
    plain = row["kind"] in ("full", "causal", "fp16", "window")
    return ("FA4",) if plain else ("FA4", "FlexAttention")


def test_every_cell_is_measured_beside_its_best_peer(on_cpu, tmp_path, capsys):
    document = run(tmp_path)
    assert document["seeds"] == {"3": 6} and (document["drawn"], document["left"]) == (6, 0)
    assert {row["number"] for row in document["cells"]} == {*range(6)}
    for row in document["cells"]:
        assert (row["best"], row["ratio"], row["again"], row["wrong"]) == ("FA4", 1.2, False, "")
        assert row["ms"].keys() == {"flashgen", *near(row)}  # within 10% of each other
        assert row["unavailable"] == {"SDPA cuDNN": "NotImplementedError: no such head"}
        assert row["inputs"] in drawing.INPUTS
    shown = capsys.readouterr().out
    assert "cells drawn at random (seed 3), 6 of 6 measured" in shown
    assert "- at 1.00 or more: 6 of 6 (100%)\n- at 0.95 or more: 6 of 6 (100%)" in shown
    assert "1.200 of FA4" in shown and "- geometric mean 1.200" in shown


def test_below_the_limit_both_are_measured_again_and_all_turns_count(on_cpu, tmp_path):
    on_cpu[0]["flashgen"] = 1.25
    for row in run(tmp_path)["cells"]:
        assert row["again"] and row["ratio"] == 0.96
        turns = {name: len(ms) for name, ms in row["ms"].items()}
        assert turns == dict.fromkeys(("flashgen", *near(row)), 6)
    assert not any(row["again"] for row in run(tmp_path, "--limit", "0.9")["cells"])


def test_a_wrong_answer_is_reported_and_not_timed(on_cpu, tmp_path, capsys):
    on_cpu[1].update({"flashgen": 1.1, "FA4": 2.0})
    for row in run(tmp_path, status=1)["cells"]:
        assert row["wrong"].startswith("0.1 off, at most 0.0") and row["ms"] == {}
        assert row["unavailable"]["FA4"] == "wrong output, 1 off"
    assert "WRONG, and not timed:" in capsys.readouterr().out


def test_the_backward_pass_of_the_same_cells(on_cpu, tmp_path, capsys):
    cells = [row["cell"] for row in run(tmp_path)["cells"]]
    document = run(tmp_path, "--backward")
    assert document["benchmark"] == "anywhere-backward"
    assert [row["cell"] for row in document["cells"]] == cells
    for row in document["cells"]:
        assert (row["best"], row["ratio"], row["wrong"]) == ("FA4", 1.2, "")
        assert 0 < max(row["error"].values()) < row["error_limit"] < 0.05
    shown = capsys.readouterr().out
    assert "Backward, cells drawn at random (seed 3), 6 of 6 measured" in shown
    on_cpu[1].update({"flashgen": 1.1})
    for row in run(tmp_path, "--backward", status=1)["cells"]:
        assert row["wrong"].startswith("0.1 off, at most 0.0") and row["ms"] == {}
    forward, backward = tmp_path / "forward.json", tmp_path / "backward.json"
    forward.write_text(json.dumps(run(tmp_path, status=1)))
    backward.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="two tables"):
        anywhere.main(["--show", str(forward), str(backward)])
    assert torch.is_grad_enabled()


def test_a_module_that_fails_is_wrong_too(on_cpu, tmp_path, monkeypatch):
    @contextmanager
    def failing(c, attention, inputs):
        raise RuntimeError("out of shared memory")
        yield

    monkeypatch.setattr(anywhere, "own_peer", lambda folder: failing)
    for row in run(tmp_path, status=1)["cells"]:
        assert row["wrong"] == "RuntimeError: out of shared memory" and row["ratio"] is None


def test_parts_of_a_draw_are_the_same_cells_and_join(on_cpu, tmp_path, capsys):
    whole = {row["number"]: row["cell"] for row in run(tmp_path)["cells"]}
    kinds = {row["kind"] for row in run(tmp_path)["cells"]}
    files = []
    for number, kind in enumerate(sorted(kinds)):
        part = run(tmp_path, "--kinds", kind)
        assert all(whole[row["number"]] == row["cell"] for row in part["cells"])
        assert part["left"] == 6 - len(part["cells"]) > 0
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(part))
    capsys.readouterr()
    names = [str(file) for file in files]
    assert anywhere.main(["--show", *names, "--json", str(tmp_path / "joined.json")]) == 0
    shown = json.loads((tmp_path / "joined.json").read_text())
    assert [row["cell"] for row in shown["cells"]] == list(dict(sorted(whole.items())).values())
    assert shown["left"] == 0 and "6 of 6 measured" in capsys.readouterr().out
    wide = [row for row in shown["cells"] if row["head_dim"] == [128, 128]]
    assert [r["cell"] for r in run(tmp_path, "--head-dims", "128")["cells"]] == [
        r["cell"] for r in wide
    ]


def test_a_run_out_of_time_says_what_is_left(on_cpu, tmp_path, capsys):
    document = run(tmp_path, "--limit-seconds", "1e9")
    assert document["left"] == 0
    assert (
        anywhere.main(["--seed", "3", "--cells", "6", "--jobs", "0", "--limit-seconds", "0"]) == 0
    )
    shown = capsys.readouterr().out
    assert "0 of 6 measured" in shown and "6 cells of the draw were left" in shown


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert anywhere.main(["--seed", "1"]) == 2
    assert "torch sees none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        anywhere.main(["--cells", "0"])


def test_lots_hold_whole_modules():
    cells = draw(5, 60)
    lots = anywhere.grouped(cells)
    assert sorted(c.name for lot in lots for c in lot) == sorted(c.name for c in cells)
    modules = [{c.module for c in lot} for lot in lots]
    assert sum(map(len, modules)) == len({c.module for c in cells})
    assert all(len(lot) >= anywhere.TOGETHER for lot in lots[:-1])


# --- beforehand -----------------------------------------------------------------------------------


def test_what_is_prepared():
    a, b, c = cell(), replace(cell(), sequences=3), cell("full")
    assert tasks([a, b, c], ["SDPA cuDNN", "FA4"]) == [
        ([a, b], "flashgen"),
        ([c], "flashgen"),
        ([a], "FA4"),
        ([b], "FA4"),
        ([c], "FA4"),
    ]


def test_flex_attention_is_asked_where_fa4_is_not_ahead_of_it():
    a, b = cell(), cell("softcap")
    own = [([a], "flashgen"), ([b], "flashgen")]
    assert tasks([a, b], ["FlexAttention"]) == [
        *own,
        ([a], "FlexAttention"),
        ([b], "FlexAttention"),
    ]
    found = tasks([a, b], ["FA4", "FlexAttention"])
    assert found == [*own, ([b], "FlexAttention"), ([a], "FA4"), ([b], "FA4")]


def test_what_fails_beforehand_is_told(tmp_path, monkeypatch):
    @contextmanager
    def refusing(c, attention, inputs):
        raise RuntimeError("No available kernel.\nAborting.")
        yield

    monkeypatch.setitem(beforehand.PEERS, "FA4", refusing)
    said = "causal_d16 S=100 B=2 H=4/2 normal, FA4: RuntimeError: No available kernel."
    assert prepare([cell()], "FA4", tmp_path, "cpu") == said
    with Workers(0) as workers:
        assert workers.compile([cell()], ["FA4"], tmp_path, 10.0) == []
    with Workers(1) as workers:
        assert workers.compile([cell()], ["FA4"], tmp_path, 0.0) == []
        # Nobody starts in so short a time; whoever tried is ended.
        assert workers.compile([cell()], ["FA4"], tmp_path, 0.01) == ["2 were not compiled in time"]


# --- the report -----------------------------------------------------------------------------------


def made_up(number, ratio, **fields):
    c = MANY[number]
    row = anywhere.new_row(c, 7, number) | {"dtype": "bfloat16"}
    own = {"ms": {"flashgen": [1.0], "FA4": [ratio]}, "median_ms": {"flashgen": 1.0, "FA4": ratio}}
    return {**row, **(own if ratio else {}), "best": "FA4", "ratio": ratio, **fields}


def test_the_report():
    rows = [
        made_up(0, 1.2, cell="a", seq_len=256, inputs="normal", kind="full"),
        made_up(1, 0.96, cell="b", seq_len=777, inputs="spike", kind="window"),
        made_up(2, 0.5, cell="c", seq_len=3000, inputs="scaled:8", dtype="float16", kind="fp16"),
        made_up(3, None, cell="d", seq_len=3000, wrong="0.1 off", inputs="normal", kind="full"),
        made_up(4, None, cell="e", kind="full", unavailable={"FA4": "no"}, inputs="normal"),
    ]
    document = {"environment": ENVIRONMENT, "drawn": 9, "left": 4, "cells": rows}
    text = drawn_tables.drawn_table(document)
    assert "(seed 7), 3 of 9 measured" in text
    # What is wrong is behind; what no peer has is not compared.
    assert "- at 1.00 or more: 1 of 4 (25%)\n- at 0.95 or more: 2 of 4 (50%)\n" in text
    assert f"- geometric mean {(1.2 * 0.96 * 0.5) ** (1 / 3):.3f}\n- least 0.500 (c)" in text
    for line in (
        "| S up to 512 | 1.20 | 1.20 | 1 of 1 |",
        "| S 777 to 2048 | 0.96 | 0.96 | 0 of 1 |",
        "| S from 3000 | 0.50 | 0.50 | 0 of 2 |",
        "| fp16 | 0.50 | 0.50 | 0 of 1 |",
        "| windows | 0.96 | 0.96 | 0 of 1 |",
        "| normal inputs | 1.20 | 1.20 | 1 of 2 |",
        "| c | 7 | 1 | FA4 | 0.5 | 0.500 |\n| b | 7 | 1 | FA4 | 0.96 | 0.960 |",
        "WRONG, and not timed:\n\n- d: 0.1 off",
        "No peer has them:\n\n- e",
        "Peers that cannot:\n\n- FA4, no: 1 cell, such as e",
        "4 cells of the draw were left",
    ):
        assert line in text, line
    assert table.TABLES["anywhere"] == ("anywhere", drawn_tables.drawn_table)


def test_seeds_join_and_newer_rows_count():
    def document(seed, *rows):
        head = {"environment": ENVIRONMENT, "seeds": {str(seed): 3}, "drawn": 3, "left": 2}
        return head | {"cells": [{**row, "seed": seed} for row in rows]}

    one, two = document(1, made_up(1, 0.9), made_up(0, 0.8)), document(2, made_up(0, 1.5))
    found = drawn_tables.joined([one, two, document(1, made_up(1, 1.1))])
    assert [(r["seed"], r["number"], r["ratio"]) for r in found["cells"]] == [
        (1, 0, 0.8), (1, 1, 1.1), (2, 0, 1.5)
    ]  # fmt: skip
    assert (found["seeds"], found["drawn"], found["left"]) == ({"1": 3, "2": 3}, 6, 3)

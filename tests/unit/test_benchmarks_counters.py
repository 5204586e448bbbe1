"""What ncu prints, and the table of its counters beside the account; no GPU is asked."""

from __future__ import annotations

import json
import stat
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import counters, ncu, record, table
from benchmarks.account_tables import counters_table, level_ratio
from flashgen.explain.call import Asked
from flashgen.explain.variant import explain
from support.variants import GENERATED, ROOT

ENVIRONMENT = {"date": "2026-01-31", "gpu": "Some GPU", "triton": "3.6.0"}


def row_of(cell):
    return {
        "cell": cell.name,
        "seq_len": cell.seq_len,
        "head_dim": [cell.qk_head_dim, cell.v_head_dim],
        "dtype": cell.dtype,
        "num_heads": cell.num_heads,
    }


READ, WRITTEN, TIME = counters.DRAM_METRICS

WIDE = f"""\
==PROF== Connected to process 17 (/usr/bin/python3.12)
==PROF== Profiling "_attention_hopper" - 0 (1/2): 0%....50%....100% - 1 pass
==PROF== Profiling "_attention_hopper" - 1 (2/2): 0%....50%....100% - 3 passes
==PROF== Disconnected from process 17
"ID","Process ID","Process Name","Host Name","Kernel Name","Grid","{READ}","{WRITTEN}","{TIME}"
"","","","","","","byte","byte","ns"
"0","17","python","127.0.0.1","_attention_hopper","(384, 1, 1)","201,326,592","67108864","1,234.5"
"1","17","python","127.0.0.1","_attention_hopper(int)","(384, 1, 1)","201","n/a","1.5"
"""

LONG = f"""\
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","17","_attention_hopper","Command line profiler metrics","{READ}","byte","201,326,592"
"0","17","_attention_hopper","Command line profiler metrics","{WRITTEN}","byte","67108864"
"0","17","_attention_hopper","Command line profiler metrics","{TIME}","nsecond","1,234.5"
"1","17","_attention_hopper","Command line profiler metrics","{READ}","byte","201"
"1","17","_attention_hopper","Command line profiler metrics","{TIME}","nsecond","1.5"
"""

LAUNCHES = (
    ncu.Launch("_attention_hopper", {READ: 201326592.0, WRITTEN: 67108864.0, TIME: 1234.5}),
    ncu.Launch("_attention_hopper", {READ: 201.0, TIME: 1.5}),
)


@pytest.mark.parametrize("log", [WIDE, LONG])
def test_the_launches_in_a_log(log):
    assert ncu.parse(log, counters.DRAM_METRICS) == LAUNCHES
    assert ncu.parse(log, [TIME])[1].values == {TIME: 1.5}


def test_a_log_without_launches():
    assert ncu.parse("==ERROR== ERR_NVGPUCTRPERM\n", counters.DRAM_METRICS) == ()


def test_how_often_each_launch_was_run():
    assert ncu.passes(WIDE) == (1, 3)


def test_a_unit_that_would_have_to_be_scaled_is_refused():
    with pytest.raises(ncu.NcuError, match=r"dram__bytes_read\.sum is in 'Mbyte'"):
        ncu.parse(WIDE.replace('"byte"', '"Mbyte"', 1), counters.DRAM_METRICS)


def test_names_in_a_listing_of_metrics():
    listing = """\
Device NVIDIA H200 (GH100)
-------------- ------- ----------
Metric Name    Type    Metric Unit
dram__bytes_read                       Counter  byte    # of bytes read from DRAM
lts__t_sectors_srcunit_tex_op_read     Counter  sector  # of LTS sectors from unit TEX for reads
"""
    assert ncu.metric_names(listing) == {"dram__bytes_read", "lts__t_sectors_srcunit_tex_op_read"}


FAKE = """\
#!{python}
import json, sys
known, log = {known!r}, {log!r}
arguments = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
value = lambda option: arguments[arguments.index(option) + 1]
metrics = value("--metrics").split(",")
with open(value("--log-file"), "w") as file:
    for name in metrics:
        if name.split(".")[0] not in known:
            name = name.split(".")[0]
            file.write(f"==ERROR== Failed to find metric regex:^{{name}}(\\\\..*)?$\\n")
            sys.exit(1)
    launches = int(value("--launches")) * 3 if "--launches" in arguments else 1
    rows = ['"ID","Kernel Name"', '"",""']
    rows += [f'"{{i}}","_attention_hopper"' for i in range(launches)]
    for name in metrics:
        rows[0] += f',"{{name}}"'
        rows[1] += ',"byte"'
        for i in range(launches):
            rows[2 + i] += f',"{{known[name.split(".")[0]] + i}}"'
    file.write(log if log is not None else "\\n".join(rows) + "\\n")
sys.exit({status})
"""


@pytest.fixture
def fake(tmp_path):
    """Makes a command that answers as ncu does, and keeps what it was asked."""

    def make(known, log=None, status=0):
        path, calls = tmp_path / "ncu", tmp_path / "calls"
        python = sys.executable
        path.write_text(
            FAKE.format(python=python, known=known, log=log, calls=str(calls), status=status)
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path), lambda: [json.loads(line) for line in calls.read_text().splitlines()]

    return make


def test_metrics_that_ncu_does_not_know_do_not_sink_the_rest(fake):
    command, asked = fake({"dram__bytes_op_read": 5, "gpu__time_duration": 7})
    program = ["python", "-m", "x"]
    counted = ncu.count(command, program, counters.DRAM_METRICS, "_attention_hopper", "none")
    assert counted.launches == (ncu.Launch("_attention_hopper", {READ: 5.0, TIME: 7.0}),)
    assert counted.missing == (WRITTEN,)
    assert len(asked()) == 4  # two names that are others here, and one that nobody knows
    last = asked()[-1]
    assert last[-3:] == program
    assert last[last.index("--metrics") + 1] == f"dram__bytes_op_read.sum,{TIME}"
    assert last[last.index("--cache-control") + 1] == "none"


def test_metrics_that_ncu_said_it_does_not_know_are_not_asked_for(fake):
    known = {"dram__bytes_read": 5, "gpu__time_duration": 7}
    command, asked = fake(known)
    counted = ncu.count(command, ["x"], counters.DRAM_METRICS, "k", "all", known)
    assert counted.missing == (WRITTEN,)
    assert len(asked()) == 1


def test_nothing_counted_is_an_error_with_ncus_words(fake):
    known = dict.fromkeys(map(ncu.base, counters.DRAM_METRICS), 1)
    command, _ = fake(known, "==ERROR== ERR_NVGPUCTRPERM - no permission\n", status=1)
    with pytest.raises(ncu.NcuError, match="ended with 1: ==ERROR== ERR_NVGPUCTRPERM"):
        ncu.count(command, ["x"], counters.DRAM_METRICS, "k", "none")
    command, _ = fake(known, "==WARNING== No kernels were profiled.\n")
    with pytest.raises(ncu.NcuError, match="no launch of k was counted: ==WARNING=="):
        ncu.count(command, ["x"], counters.DRAM_METRICS, "k", "none")
    command, _ = fake({})
    with pytest.raises(ncu.NcuError, match=r"knows none of dram__bytes_read\.sum"):
        ncu.count(command, ["x"], counters.DRAM_METRICS, "k", "none")


def test_launches_belong_to_modules_in_turn():
    launches = [ncu.Launch("a", {READ: i, **({TIME: 1} if i else {})}) for i in range(4)]
    values = counters.values_of(launches, 2, ["x", "y"], ["a", "a"])
    assert values == {"x": {READ: [0, 1]}, "y": {READ: [2, 3], TIME: [1, 1]}}
    for wrong in (launches[:3], [*launches[:3], ncu.Launch("b", {})]):
        with pytest.raises(ncu.NcuError, match="were counted, not of"):
            counters.values_of(wrong, 2, ["x", "y"], ["a", "a"])


def test_a_run_counts_each_module_and_keeps_the_account_beside_it(fake, monkeypatch):
    metrics = {name for run in counters.RUNS.values() for name in run.metrics}
    known = {ncu.base(name): 100 for name in metrics - {"lts__t_bytes.sum"}}
    command, asked = fake(known)

    def new_row(cell):
        return row_of(cell) | {
            "module": cell.module,
            "batch": cell.batch,
            "form": "hopper",
            "kernel": "0" * 64,
            "config": {"BLOCK_M": 128},
        }

    monkeypatch.setattr(ncu, "find_ncu", lambda: command)
    monkeypatch.setattr(ncu, "version", lambda ncu: "2025.3")
    monkeypatch.setattr(ncu, "known_metrics", lambda ncu: frozenset())
    monkeypatch.setattr(counters, "new_row", new_row)
    monkeypatch.setattr(counters, "environment", lambda device: dict(ENVIRONMENT))
    monkeypatch.setattr(counters, "_driver", lambda: "570")
    monkeypatch.setattr(counters, "_compile", lambda cells: None)
    found = counters.measure(counters.NAMES)
    document = json.loads(record.layout(found))
    assert document == found
    assert [row["module"] for row in document["cells"]] == list(counters.NAMES)
    second = document["cells"][1]
    assert second["counted"]["dram"][READ] == [105.0, 106.0, 107.0, 108.0, 109.0]
    assert second["figures"]["dram_read"] == 107.0
    assert second["figures"]["l2_read"] == 32 * 101.0
    assert second["account"] == counters.account_of(counters.cell_of("window_d128"), "hopper")
    assert document["protocol"]["l2"]["missing"] == ["lts__t_bytes.sum"]
    assert counters_table(document).startswith("MB that a call moves")
    controls = [call[call.index("--cache-control") + 1] for call in asked()]
    assert controls == ["none", "none", "none", "all"]  # the first once more, without a metric


def test_ncu_sees_the_last_of_several_calls(monkeypatch):
    said = []
    module = SimpleNamespace(attention=lambda *inputs, **keywords: said.append(keywords))
    monkeypatch.setattr(counters, "load_module", lambda name: module)
    monkeypatch.setattr(counters, "make_inputs", lambda cell, device: (1, 2, 3))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    counters.call(["window_d128"], 2)
    call = {"return_lse": True, "left": 1024}
    between = [call] * counters.BETWEEN
    counted = ["start", call, "stop"]
    assert said == [call] * counters.WARM_UPS + (between + counted) * 2


def test_figures_are_bytes_and_medians():
    counted = {
        "l2": {counters.FIGURES["l2_read"][1]: [10.0]},
        "dram": {READ: [5.0, 1.0, 4.0]},
    }
    assert counters.figures_of(counted) == {"l2_read": 320.0, "dram_read": 4.0}


@pytest.mark.parametrize("name", counters.NAMES)
def test_the_account_is_that_of_explain(name):
    cell = counters.cell_of(name)
    assert (cell.batch, cell.num_heads * cell.qk_head_dim, cell.dtype) == (1, 2048, "bfloat16")
    [account] = explain([ROOT / "specs" / f"{name}.py"], None, Asked(q_len=16384), GENERATED)
    work = account.works[-1]
    assert work.name == "this Gluon kernel"
    found = counters.account_of(cell, "hopper")
    assert found == {figure: getattr(work, figure) for figure in counters.ACCOUNTED}
    assert found["dram_read"] == 3 * 16384 * 2048 * 2
    assert found["l2_read"] > found["dram_read"]


def results():
    account = {
        "l2_read": 900_000_000,
        "l2_written": 100_000_000,
        "dram_read": 200_000_000,
        "dram_written": 50_000_000,
    }
    figures = {**account, "l2_read": 970_000_000.0, "dram_written": 90_000_000.0}
    figures |= {"sm_read": 899_000_000.0, "sm_written": 101_000_000.0}
    counted = {"l2": {"lts__t_bytes.sum": [1.5e9]}, "dram": {}, "dram_cold": {READ: [1e6, 3e6]}}
    row = {
        "cell": "causal_d128 S=16384",
        "account": account,
        "figures": figures,
        "counted": counted,
    }
    run = {"passes": [1], "missing": []}
    return {
        "benchmark": "counters",
        "environment": ENVIRONMENT | {"driver": "1.2", "ncu": "2025.3"},
        "protocol": {"l2": run, "dram": run, "dram_cold": run},
        "cells": [row],
    }


TABLE = """\
MB that a call moves, by the account and by the counters, and the counters' sum over the \
account's; Some GPU, driver 1.2, ncu 2025.3, triton 3.6.0, 2026-01-31.

| call | bytes between | read: account | counted | written: account | counted | ratio |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
| causal_d128 S=16384 | L2 and SMs, by the SMs | 900.0 | 899.0 | 100.0 | 101.0 | 1.000 |
| causal_d128 S=16384 | L2 and SMs, by L2 | 900.0 | 970.0 | 100.0 | 100.0 | 1.070 |
| causal_d128 S=16384 | DRAM and L2 | 200.0 | 200.0 | 50.0 | 90.0 | 1.160 |

Within 10%: 2 of 3. Other counters, in MB:

| call | between partitions of L2 | all requests to L2 | DRAM read, L2 cleared \
| DRAM written, L2 cleared |
| --- | ---: | ---: | ---: | ---: |
| causal_d128 S=16384 | - | 1,500.0 | 2.0 | - |"""


def test_the_table():
    assert counters_table(results()) == TABLE
    filled = table.fill(
        "<!-- benchmark: counters -->\n<!-- /benchmark -->", {"counters": results()}
    )
    assert TABLE in filled
    assert json.loads(record.layout(results())) == results()


def test_the_table_says_what_is_missing():
    document = results()
    del document["cells"][0]["figures"]["l2_read"]
    document["protocol"]["dram"] = {"passes": [1, 2], "missing": [WRITTEN]}
    text = counters_table(document)
    assert level_ratio(document["cells"][0], "l2", "l2") is None
    assert "| L2 and SMs, by L2 | 900.0 | - | 100.0 | 100.0 | - |" in text
    assert "Within 10%: 1 of 3." in text
    assert "DRAM was counted in several passes" in text
    assert text.endswith("Not known to this ncu: dram__bytes_write.sum.")

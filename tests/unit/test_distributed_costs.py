"""What a strategy is predicted to take, which one is chosen, and how a forecast shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.mesh import Case
from flashgen import AttentionSpec, alibi, causal, document, sink_tokens, sliding_window, softmax
from flashgen.distributed.costs import (
    STRATEGIES,
    Machine,
    Sizes,
    choose,
    keeps_rows,
    machine_of,
    predicted,
)
from flashgen.distributed.forecast import Forecast, forecast, picture
from flashgen.distributed.plan import (
    Plan,
    Ranges,
    make_layout,
    make_plan,
    plan_of_groups,
    with_every_row,
)
from support.variants import rendered_module

FORMS = ("dense", "mesh")
CAUSAL = AttentionSpec(16, mask=causal(), forms=FORMS)
WINDOW = AttentionSpec(16, mask=sliding_window(4095, 0), forms=FORMS)
RUNS = AttentionSpec(16, mask=causal() & (sink_tokens(3) | sliding_window(9, 0)), forms=FORMS)
SINK = AttentionSpec(16, mask=causal(), normaliser=softmax(sink=1.0), forms=FORMS)
ALIBI = AttentionSpec(16, mask=causal(), score=alibi(8), forms=FORMS)
SIZES = Sizes(1, 32, 8, 128, 128)


def planned(module: ModuleType, length: int, ranks: int, balance: Any = "auto") -> Plan:
    ranges = Ranges(module, length, length, {})
    layout = make_layout(ranges, ranks, balance)
    return make_plan(ranges, layout, layout)


def seen(plan: Plan, rank: int, ring: bool) -> torch.Tensor:
    """How often each pair of a position and another is in a rank's calls."""
    length = plan.queries.length
    counts = torch.zeros(length, length, dtype=torch.int64)
    senders = range(plan.ranks) if ring else ()
    calls = [call for s in senders for _, found in plan.calls_between(s, rank) for call in found]
    for call in calls or chain(*plan.calls(rank)):
        rows = slice(call.q_offset, call.q_offset + call.queries[1] - call.queries[0])
        keys = slice(call.kv_offset, call.kv_offset + call.keys[1] - call.keys[0])
        counts[rows, keys] += 1
    return counts


@pytest.mark.parametrize("spec", [CAUSAL, RUNS])
@pytest.mark.parametrize("balance", [1, 3])
def test_a_ring_computes_the_same_pairs(
    spec: AttentionSpec, balance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, with keys that lie where the sender's pieces put them."""
    monkeypatch.setattr("flashgen.distributed.plan.GAP", 4)
    plan = planned(rendered_module(spec), 100, 3, balance)
    for rank in range(3):
        counts = seen(plan, rank, ring=True)
        assert torch.equal(counts, seen(plan, rank, ring=False))
        assert counts.max() == 1
        for sender in range(3):
            pieces = plan.pieces(sender, rank)
            positions = plan.keys.positions(sender)
            rows = [positions[slice(*piece.rows)] for piece in pieces]
            buffer = torch.cat([torch.arange(0), *rows])
            for call in chain(*(calls for _, calls in plan.calls_between(sender, rank))):
                keys = buffer[slice(*call.keys)]
                assert torch.equal(keys, call.kv_offset + torch.arange(len(keys)))


def test_traffic_counts_the_pieces() -> None:
    plan = planned(rendered_module(RUNS), 300, 4, 3)
    for sender in range(4):
        for receiver in range(4):
            rows = sum(piece.number for piece in plan.pieces(sender, receiver))
            assert plan.traffic[sender, receiver] == rows
    assert [plan.received(r) for r in range(4)] == [
        int(plan.traffic[:, r].sum() - plan.traffic[r, r]) for r in range(4)
    ]


def test_bytes_by_hand() -> None:
    """Two ranks of four chunks: rank 0 has the first and the last, and needs all rows."""
    plan = planned(rendered_module(CAUSAL), 4096, 2)
    row = 8 * 256 * 2
    costs = {
        name: predicted(name, plan, SIZES, Machine(), keep=True, parts=1)
        for name in STRATEGIES
        if name != "grid"
    }
    # Rows and gradients: rank 0 gets 2,048 rows, and the gradients of 1,024.
    assert costs["all-to-all"].received == (2048 + 1024) * row
    assert costs["all-gather"].received == (2048 + 2048) * row
    assert costs["ring"].received == (2 * 2048 + 1024) * row
    # Half of the heads of 2,048 positions: q, k, v and the output, and their gradients.
    assert costs["ulysses"].received == 2 * 2048 * (16 + 4 + 4 + 16) * 256
    again = predicted("all-to-all", plan, SIZES, Machine(), keep=False, parts=1)
    assert again.received == (2 * 2048 + 1024) * row
    assert costs["all-to-all"].held == 4096 * row


def test_bytes_of_a_grid_by_hand() -> None:
    """Two groups of two ranks, of eight chunks: the first group has two at either end."""
    plan = planned(rendered_module(CAUSAL), 8192, 4, "zigzag")
    groups = plan_of_groups(plan, 2, merges=True)
    assert groups.queries.chunks == (((0, 2048), (6144, 8192)), ((2048, 6144),))
    assert groups.runs == (((((0, 2048)),), (((0, 8192)),)), ((((0, 6144)),),))
    assert groups.pairs == (sum(plan.pairs[:2]), sum(plan.pairs[2:]))
    cost = predicted("grid", plan, SIZES, Machine(), keep=True, parts=1)
    assert cost.size == 2
    # Half of the heads of 2,048 positions of the other rank of the group, and gradients; and the
    # rows of half of the heads of 4,096 positions, and gradients of 2,048.
    heads = 2 * 2048 * (16 + 4 + 4 + 16) * 256
    assert cost.received == heads + (4096 + 2048) * 4 * 256 * 2
    # The chunks of ranks 0 and 2 do not follow one another's.
    assert plan_of_groups(plan, 4, merges=True).queries.chunks == (((0, 8192),),)


def test_a_grid_sends_less_between_hosts() -> None:
    """Of rows, each of a host's ranks gets those of its heads alone."""
    plan = planned(rendered_module(CAUSAL), 1 << 18, 32, "zigzag")
    slow = Machine(ranks_per_host=8, between=5e9)
    costs = {name: predicted(name, plan, SIZES, slow) for name in ("all-to-all", "grid")}
    assert costs["grid"].size == 8
    assert costs["grid"].forward < costs["all-to-all"].forward / 3


def test_a_rank_alone_takes_its_products() -> None:
    plan = planned(rendered_module(CAUSAL), 1 << 16, 1)
    fast = Machine(memory=1e18, call=0.0)
    for name in ("all-to-all", "ulysses", "all-gather", "ring"):
        cost = predicted(name, plan, SIZES, fast, keep=True)
        assert cost.share == pytest.approx(1.0)
        assert cost.received == 0
    forward = (1 << 15) * ((1 << 16) + 1) * 32 * 4 * 128 / fast.forward
    assert predicted("ring", plan, SIZES, fast, keep=True).forward == pytest.approx(forward)


def test_slow_links_between_hosts_cost_what_they_carry() -> None:
    """The slowest rank's bytes over the link's rate, once for rows and once for gradients."""
    plan = planned(rendered_module(CAUSAL), 1 << 15, 4, "zigzag")
    near = Machine(ranks_per_host=4)
    slow = Machine(ranks_per_host=2, between=1e9)
    here, there = (
        predicted("all-to-all", plan, SIZES, machine, keep=True, parts=1)
        for machine in (near, slow)
    )
    # The last rank's rows of ranks 2 and 3: chunks 2, 3, 4 and 5 of 8.
    rows = 4 * (1 << 12)
    assert there.forward == pytest.approx(rows * SIZES.row / 1e9, rel=0.05, abs=0.01)
    assert there.share < here.share
    hidden = predicted("all-to-all", plan, SIZES, slow, keep=True)
    assert hidden.parts > 1
    assert hidden.share > there.share


def test_what_cannot_compute_a_call_is_refused() -> None:
    def of(spec: AttentionSpec, asked: str = "auto", sizes: Sizes = SIZES, ranks: int = 2) -> Any:
        module = rendered_module(spec)
        return choose(asked, module, planned(module, 64, ranks), sizes, Machine())

    no_groups = "2 ranks have no groups that can divide 32/8 heads"
    assert of(CAUSAL).refused == {"grid": no_groups}
    assert of(SINK).refused == {
        "ring": "partial results with a sink of the normaliser cannot be merged",
        "grid": no_groups,
    }
    assert "differ between heads" in of(ALIBI, ranks=4).refused["grid"]
    assert "differ between heads" in of(ALIBI).refused["ulysses"]
    assert "no multiple of 3 ranks" in of(CAUSAL, ranks=3).refused["ulysses"]
    assert of(CAUSAL, sizes=replace(SIZES, num_kv_heads=1), ranks=4).refused == {}
    parts = of(CAUSAL, sizes=replace(SIZES, num_q_heads=12, num_kv_heads=4), ranks=2).refused
    assert "ulysses" not in parts
    parts = of(CAUSAL, sizes=replace(SIZES, num_q_heads=12, num_kv_heads=3), ranks=2).refused
    assert "parts of groups of 4" in parts["ulysses"]
    with pytest.raises(ValueError) as error:
        of(ALIBI, "ulysses")
    assert str(error.value).startswith("strategy: 'ulysses' cannot compute this call: ")


def test_the_fastest_is_chosen_unless_one_is_asked_for() -> None:
    module = rendered_module(WINDOW)
    plan = planned(module, 1 << 17, 4)
    best = choose("auto", module, plan, SIZES, Machine())
    assert best.strategy == "all-to-all"
    assert best.why.startswith("all-to-all: predicted 0.9")
    times = {name: cost.forward + cost.backward for name, cost in best.costs.items()}
    assert min(times, key=times.__getitem__) == "all-to-all"
    asked = choose("ring", module, plan, SIZES, Machine())
    assert (asked.strategy, asked.why) == ("ring", "ring, as asked for")
    assert asked.cost == best.costs["ring"]
    # Many heads of keys, and links that are slow: each key travels to one rank alone.
    causal_ = rendered_module(CAUSAL)
    many = replace(SIZES, num_q_heads=16, num_kv_heads=16)
    slow = Machine(within=25e9)
    chosen = choose("auto", causal_, planned(causal_, 1 << 17, 8), many, slow)
    assert chosen.strategy == "ulysses"


def test_ranks_of_a_host() -> None:
    """Those of a mesh's dimension may be next to one another, or one on each host."""
    assert machine_of(range(16), 8).ranks_per_host == 8
    assert machine_of(range(2), 8).ranks_per_host == 2
    assert machine_of(range(0, 32, 8), 8).ranks_per_host == 1
    assert machine_of(range(0, 16, 2), 8).ranks_per_host == 4
    assert machine_of(range(16), None) == Machine()


def test_rows_are_kept_where_they_are_few() -> None:
    """Of all needed rows: no more bytes than q, k, v and the output of a rank."""
    module = rendered_module(CAUSAL)
    assert keeps_rows(planned(module, 1 << 15, 4), SIZES)
    assert not keeps_rows(planned(module, 1 << 15, 8), SIZES)
    assert keeps_rows(planned(rendered_module(WINDOW), 1 << 17, 8), SIZES)


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_forecasts_of_many_ranks(ranks: int) -> None:
    """Over NVLink alone a share is higher than with 400 Gb/s between hosts."""
    plan = planned(rendered_module(CAUSAL), 1 << 18, ranks)
    one_host, hosts = (
        predicted("all-to-all", plan, SIZES, Machine(ranks_per_host=n), keep=False)
        for n in (ranks, 8)
    )
    assert one_host.share >= hosts.share > 0.05
    assert (one_host.share == hosts.share) == (ranks == 8)
    every = with_every_row(plan)
    assert every.received(0) == (1 << 18) - plan.keys.lengths[0]


def found(ranks: int = 2, **options: Any) -> Forecast:
    module = rendered_module(CAUSAL)
    layout = make_layout(Ranges(module, 4096, 4096, {}), ranks, "auto")
    return forecast(module, 4096, layout, {}, SIZES, Machine(), **options)


def test_the_text_of_a_forecast() -> None:
    lines = str(found()).splitlines()
    assert lines[0] == "4,096 queries and 4,096 keys on 2 ranks"
    assert "predicted for batch 1, 32/8 heads, 305 GB/s to GPUs of a host:" in lines
    assert any(line.startswith("ulysses ") for line in lines)
    assert any(line.startswith("all-to-all: predicted 0.") for line in lines)
    assert str(found(strategy="ring")).count("ring, as asked for") == 1
    assert "45 between 3 hosts" in str(found(24))
    assert "and 8 further ranks" in str(found(24))


def test_the_picture_shows_ranks_over_the_mask() -> None:
    module = rendered_module(CAUSAL)
    ranges = Ranges(module, 64, 64, {})
    layout = make_layout(ranges, 2, "zigzag")
    assert picture(ranges, layout, 4, 8) == ("00......", "1111....", "111111..", "00000000")
    window = rendered_module(RUNS)
    ranges = Ranges(window, 64, 64, {})
    assert picture(ranges, make_layout(ranges, 2, 1), 4, 8)[-1] == "1...1111"


#: What strategies took on H100s: rates and factors were fitted to the table of 2 GPUs.
MEASURED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "mesh").glob("*.json"))

#: Specs of its modules.
OF_MODULES = {
    "mesh_d128": CAUSAL,
    "mesh_window_d128": WINDOW,
    "mesh_documents_d128": AttentionSpec(16, mask=document() & causal(), forms=FORMS),
}

#: Its ways, as arguments of `predicted`; what "flashgen" was, the table says.
OF_WAYS: dict[str, dict[str, Any]] = {
    "rows come again": {"strategy": "all-to-all", "keep": False, "parts": 1},
    "two groups of heads": {"strategy": "all-to-all", "parts": 2},
    "all-gather": {"strategy": "all-gather", "parts": 1},
    "ring": {"strategy": "ring"},
    "ulysses": {"strategy": "ulysses"},
    "grid": {"strategy": "grid"},
}


def _plan_of(ranges: Ranges, ranks: int, sent: dict) -> Plan:
    """The plan by which rows travelled: of evenly many chunks a rank, or of layouts of few cuts."""
    for balance in (sent["chunks"], "auto"):
        layout = make_layout(ranges, ranks, balance)
        plan = make_plan(ranges, layout, layout)
        if [plan.received(r) for r in range(ranks)] == sent["received_rows"]:
            return plan
    raise AssertionError(f"no layout has these rows travel: {sent}")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_the_choice_is_within_3_percent_of_the_fastest_measured(path: Path) -> None:
    document_ = json.loads(path.read_text())
    for cell in document_["cells"]:
        case = Case(**cell["case"])
        ids = case.document_ids(torch.device("cpu"))
        module = rendered_module(OF_MODULES[case.module])
        ranges = Ranges(module, case.tokens, case.tokens, ids)
        plan = _plan_of(ranges, document_["gpus"], cell["sent"]["flashgen"])
        sizes = replace(SIZES, num_q_heads=case.num_q_heads, num_kv_heads=case.num_kv_heads)
        first = {"strategy": cell["sent"]["flashgen"]["strategy"], "parts": 1}
        times = {}
        for name, way in {"flashgen": first, **OF_WAYS}.items():
            if name in cell["ms"]:
                options = dict(way)
                cost = predicted(options.pop("strategy"), plan, sizes, Machine(), **options)
                times[name] = cost.forward + cost.backward, cell["ms"][name][1]
        _, taken = min(times.values())
        fastest = min(ms for _, ms in times.values())
        # Two measurements of one strategy differ by up to 1.5 percent.
        assert taken <= 1.03 * fastest, f"{cell['title']}: {times}"

"""Layouts and plans, of any number of ranks, without a process group."""

from __future__ import annotations

from itertools import chain, pairwise
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, causal, document, sliding_window
from flashgen.distributed.layout import (
    Layout,
    balanced,
    contiguous,
    halved,
    imbalance,
    joined,
    zigzag,
)
from flashgen.distributed.plan import GAP, Plan, Ranges, make_layout, make_plan
from flashgen.reference import visibility
from support.cases import Case
from support.meshed import FORMS, SERVED, SPECS
from support.variants import rendered_module
from support.vocabulary import VOCABULARY

CAUSAL = AttentionSpec(16, mask=causal(), forms=FORMS)
WINDOW = AttentionSpec(16, mask=sliding_window(4095, 0), forms=FORMS)
DOCUMENTS = AttentionSpec(16, mask=document() & causal(), forms=FORMS)


def square(begin: int, end: int) -> int:
    """The pairs of causal queries."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


def planned(
    module: ModuleType,
    length: int,
    ranks: int,
    balance: str | int = "auto",
    **parameters: torch.Tensor,
) -> Plan:
    ranges = Ranges(module, length, length, parameters)
    layout = make_layout(ranges, ranks, balance)
    return make_plan(ranges, layout, layout)


@pytest.mark.parametrize("name", SERVED)
def test_runs_hold_what_the_mask_shows(name: str) -> None:
    """And nothing else, where the module says so."""
    spec, entry = SPECS[name], VOCABULARY[name]
    heads = entry.odd_heads if any(c.limits for c in spec.constants) else 4
    length = 48 if name == "natten_2d_fixed" else 43
    whole = {"whole_q_len": length, "whole_kv_len": length}
    values = entry.values(Case(length, length, 2, heads, heads))
    case = Case(length, length, 2, heads, heads, params=values | whole)
    arguments = case.arguments(spec)
    seen = visibility(
        spec.mask, 2, heads, length, length, params=arguments, device=torch.device("cpu")
    )
    module = rendered_module(spec)
    given = {name: arguments[name] for name in module.MESH["of_runs"]}
    runs = module.visible_runs(length, length, batch=2, num_q_heads=heads, **given)
    at = torch.arange(length)
    inside = torch.zeros(2, heads, length, length, dtype=torch.bool)
    for begin, end in runs:
        inside = inside | ((at >= begin[..., None]) & (at < end[..., None]))
    assert not (seen & ~inside).any()
    if module.MESH["exact"]:
        assert torch.equal(seen.expand_as(inside), inside)


@pytest.mark.parametrize(
    "ids", [[1, 1, 2, 2, 2, 5, 5], [3, 3, 4, -1, -1, -1], [2, 2, 3, 0, 0, 0], [2, 1, 2, 1, 1]]
)
def test_documents_in_any_order(ids: list[int]) -> None:
    """Padding behind the ids is no disorder; where ids are in none, all keys are in a run."""
    module, document_ids = rendered_module(DOCUMENTS), torch.tensor([ids], dtype=torch.int32)
    length = len(ids)
    [(begin, end)] = module.visible_runs(length, length, document_ids=document_ids)
    for q, x in enumerate(ids):
        seen = [k for k in range(q + 1) if ids[k] == x and x != -1]
        run = range(int(begin[0, 0, q]), int(end[0, 0, q]))
        assert set(seen) <= set(run)
        assert len(run) == (length if ids == [2, 1, 2, 1, 1] else len(seen))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 5, 100, 4096, 5000])
def test_each_position_is_on_one_rank(length: int, ranks: int) -> None:
    for layout, align in (
        (contiguous(length, ranks), 1),
        (zigzag(length, ranks), 1),
        (balanced(length, ranks, square, 5), 1),
        (contiguous(length, ranks, 16), 16),
        (zigzag(length, ranks, 16), 16),
        (halved(length, ranks, torch.arange(length), torch.zeros(length).long()), 1),
        (halved(length, ranks, torch.ones(length).long(), torch.arange(length), 16), 16),
    ):
        every = torch.cat([layout.positions(rank) for rank in range(ranks)])
        assert torch.equal(every.sort().values, torch.arange(length))
        chunks = max(map(len, layout.chunks))
        assert all(layout.chunks), "a rank without tokens has an empty chunk"
        assert max(layout.lengths) - min(layout.lengths) <= chunks * (2 * align - 1)
        begins = [begin for spans in layout.chunks for begin, end in spans if begin < end]
        assert all(begin % align == 0 for begin in begins)
        for rank in range(ranks):
            assert [len(p) for p in [layout.positions(rank)]] == [layout.lengths[rank]]
            starts = layout.starts(rank)
            firsts = [begin for begin, end in layout.chunks[rank] if begin < end]
            positions = layout.positions(rank)
            spans = zip(starts, layout.chunks[rank], strict=True)
            assert [int(positions[s]) for s, (begin, end) in spans if begin < end] == firsts


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_queries_are_shared_by_two_chunks(ranks: int) -> None:
    plan = planned(rendered_module(CAUSAL), 2048 * ranks, ranks)
    expected = zigzag(2048 * ranks, ranks)
    for rank in range(ranks):
        assert torch.equal(plan.queries.positions(rank), expected.positions(rank))
    assert len(plan.queries.chunks[ranks - 1]) == 1  # its two chunks follow one another
    assert plan.imbalance < 1.0001
    assert imbalance(contiguous(2048 * ranks, ranks), square) > 1.4


def test_a_window_stays_in_one_chunk_and_sends_its_rows_alone() -> None:
    plan = planned(rendered_module(WINDOW), 131072, 4)
    assert plan.queries == contiguous(131072, 4)
    assert [plan.received(rank) for rank in range(4)] == [0, 4095, 4095, 4095]
    assert 1.0 < plan.imbalance < 1.02


def test_a_layout_that_is_more_even_but_sends_more_is_not_taken() -> None:
    """A window's first rank has 10% less to do; 16 chunks a rank would send all its rows."""
    plan = planned(rendered_module(WINDOW), 65536, 4)
    assert plan.queries == contiguous(65536, 4)
    assert plan.imbalance > 1.03
    even = planned(rendered_module(WINDOW), 65536, 4, balance=16)
    assert even.imbalance < 1.03
    assert even.received(2) > 11 * plan.received(2)


def test_documents_are_balanced_within_two_percent() -> None:
    torch.manual_seed(3)
    lengths = torch.distributions.LogNormal(7.8, 1.0).sample((400,)).long()
    ids = torch.repeat_interleave(torch.arange(400), lengths)[None, :131072].int()
    plan = planned(rendered_module(DOCUMENTS), 131072, 4, document_ids=ids)
    assert plan.imbalance < 1.02
    # Fewer cuts than 4 chunks of a rank have, at other costs, and fewer rows that are sent.
    assert sum(map(len, plan.queries.chunks)) <= 7
    cut = planned(rendered_module(DOCUMENTS), 131072, 4, balance=4, document_ids=ids)
    assert sum(map(plan.received, range(4))) < sum(map(cut.received, range(4)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 7, 8])
def test_halves_share_any_cost_with_few_cuts(ranks: int) -> None:
    """Causal queries, and costs at random that rise within documents."""
    length = 1920 * ranks
    spread = torch.Generator().manual_seed(ranks)
    ends = (torch.rand(length, generator=spread) < 0.005).nonzero().flatten().tolist()
    rising = [torch.arange(b - a) for a, b in pairwise([0, *ends, length])]
    for costs in (torch.arange(length), torch.cat(rising)):
        layout = halved(length, ranks, costs, torch.zeros(length).long())
        assert sum(map(len, layout.chunks)) <= 2 * ranks - 1
        assert set(layout.lengths) == {1920}
        loads = [int(costs[layout.positions(rank)].sum()) for rank in range(ranks)]
        assert max(loads) * ranks < 1.005 * sum(loads)


def test_halves_cut_where_it_costs_little() -> None:
    """Of windows that cost the same, and all do, one without a cut is taken."""
    crossed = torch.arange(1024) % 256
    layout = halved(1024, 4, torch.ones(1024).long(), crossed)
    assert sorted(layout.chunks) == [((i, i + 256),) for i in range(0, 1024, 256)]


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_plans_of_many_ranks(ranks: int) -> None:
    plan = planned(rendered_module(CAUSAL), 1 << 18, ranks)
    assert plan.imbalance < 1.001
    rows = [sum(p.number for s in range(ranks) for p in plan.pieces(s, r)) for r in (0, ranks - 1)]
    assert rows == [plan.rows(0), plan.rows(ranks - 1)]


def test_pieces_and_calls_name_the_same_rows() -> None:
    """Each row that a rank needs comes once, from its owner, to its place."""
    ranges = Ranges(rendered_module(WINDOW), 9000, 9000, {})
    layout = make_layout(ranges, 3, 4)
    plan = make_plan(ranges, layout, layout)
    for rank in range(3):
        buffer = torch.full((plan.rows(rank),), -1)
        for sender in range(3):
            positions = layout.positions(sender)
            for piece in plan.pieces(sender, rank):
                assert (buffer[slice(*piece.places)] == -1).all()
                buffer[slice(*piece.places)] = positions[slice(*piece.rows)]
        needed = [torch.arange(*run) for run in plan.needed[rank]]
        assert torch.equal(buffer, torch.cat(needed))
        for call in chain(*plan.calls(rank)):
            assert torch.equal(
                buffer[slice(*call.keys)],
                torch.arange(call.kv_offset, call.kv_offset + call.keys[1] - call.keys[0]),
            )
            assert int(layout.positions(rank)[call.queries[0]]) == call.q_offset


def test_parts_with_dropout_begin_where_random_numbers_do() -> None:
    """Queries and keys at multiples of 16, in windows of any width."""
    spec = AttentionSpec(16, mask=sliding_window(29, 0), forms=FORMS, dropout=True)
    plan = planned(rendered_module(spec), 1000, 4)
    calls = [call for rank in range(4) for calls in plan.calls(rank) for call in calls]
    assert calls and all(c.q_offset % 16 == c.kv_offset % 16 == 0 for c in calls)


def test_near_runs_are_joined() -> None:
    assert list(joined([(5, 9), (0, 2), (2, 3)])) == [(0, 3), (5, 9)]
    assert list(joined([(5, 9), (0, 2)], 4)) == [(0, 9)]
    assert list(joined([(0, 9), (2, 3), (9 + GAP, 700)], GAP)) == [(0, 9), (9 + GAP, 700)]


def test_the_text_of_a_plan() -> None:
    text = str(planned(rendered_module(CAUSAL), 4096, 2))
    assert text.splitlines()[0] == "4,096 queries and 4,096 keys on 2 ranks"
    assert "1.000 of the mean" in text


def test_no_layout_is_of_no_rank() -> None:
    assert Layout(0, ((),)).lengths == (0,)

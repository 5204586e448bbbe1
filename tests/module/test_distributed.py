"""Attention over a mesh of processes: equal to one process, and the same errors on all ranks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    alibi,
    block_sparse,
    causal,
    document,
    sink_tokens,
    sliding_window,
    softmax,
)
from flashgen.distributed import Machine, context_parallel
from flashgen.distributed.costs import STRATEGIES, Sizes, why_not
from flashgen.explain.call import Asked
from flashgen.loader import Variant
from flashgen.ranks import explain_variant_ranks
from support.cases import Case, inputs
from support.meshed import FORMS, SERVED, SPECS
from support.oracle import error_and_bound
from support.ranks import Pool
from support.sharded import (
    Sharded,
    by_all,
    by_one,
    drawn_seed,
    module_in,
    problems_of,
    refused_dtensors,
    round_trips,
    shown_plan,
)
from support.variants import lowered, rendered, shipped_module
from support.vocabulary import VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


CAUSAL = AttentionSpec(16, "float32", mask=causal(), forms=FORMS)
#: Several runs of keys, each a call: they are merged.
RUNS = AttentionSpec(
    16,
    "float32",
    mask=causal() & (sink_tokens(3) | sliding_window(Int("left", 9), 0)),
    forms=FORMS,
)

#: A table of blocks: its lists of tiles are made for each part.
BLOCKS = block_sparse(Tensor("layout", ("num_q_heads", None, None), "bool"), 16) & causal()

#: Weights that are dropped are told by positions and heads in the whole.
DROPPING = {
    "dropout": replace(CAUSAL, dropout=True),
    "dropout of runs": replace(RUNS, score=alibi(4), dropout=True),
    "dropout of documents": AttentionSpec(
        16, "float32", mask=document() & causal(), dropout=True, forms=FORMS
    ),
    "dropout without a mask": AttentionSpec(16, "float32", dropout=True, forms=FORMS),
}

#: Parameters of calls with dropout; others do not take them.
DROPPED = {"dropout_p": 0.3, "seed": torch.tensor([2**40])}

Write = Callable[[AttentionSpec], str]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a spec's module, and returns its file."""
    folder, files = tmp_path_factory.mktemp("modules"), {}

    def written(spec: AttentionSpec) -> str:
        if spec not in files:
            files[spec] = folder / f"module_{len(files)}.py"
            files[spec].write_text(rendered(lowered(spec)))
        return str(files[spec])

    return written


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    yield from _pool(tmp_path_factory.mktemp("two"), 2)


def _pool(scratch: Path, ranks: int, **options: Any) -> Iterator[Pool]:
    pool = Pool(ranks, scratch, **options)
    yield pool
    pool.close()


def call_of(
    path: str, spec: AttentionSpec, length: int, heads: tuple[int, int], **options: Any
) -> Sharded:
    whole = {"whole_q_len": length, "whole_kv_len": length}
    batch, params = options.pop("batch", 2), whole | options.pop("params", {})
    case = Case(length, length, batch, *heads, params=params)
    tensors = inputs(case, spec, torch.float32)
    seed = torch.Generator().manual_seed(zlib.crc32(f"{case}".encode()))
    grad_out = torch.randn(*tensors[0].shape[:3], spec.v_head_dim, generator=seed)
    known = module_in(path).MESH["parameters"]
    given = {name: x for name, x in case.arguments(spec).items() if name in known}
    return Sharded(path, (*tensors, grad_out), given, **options)


def hold(found: list[Any], call: Sharded, name: str) -> None:
    """Fails unless each rank has what one process has, as near to float64 as that."""
    exact, alone = by_one(call, torch.float64), by_one(call)
    for rank, results in enumerate(found):
        assert isinstance(results, dict), f"{name}, rank {rank}: {results}"
        assert results.keys() == exact.keys()
        for what, got in results.items():
            error, allowed = error_and_bound(got, exact[what], alone[what])
            assert error <= allowed, f"{name}, rank {rank}: {what} is off by {error:.3g}"


def vocabulary_calls(write: Write, ranks: int, names: list[str]) -> dict[str, Sharded]:
    """A call of each of the vocabulary's entries, in several ways."""
    calls = {}
    for number, name in enumerate(names):
        entry, spec = VOCABULARY[name], SPECS[name]
        limits = [limit for constant in spec.constants for limit in constant.limits]
        q_heads = entry.odd_heads if limits else 4
        heads = q_heads, q_heads if q_heads % 2 else 2
        length = 61 if number % 2 else 16 * ranks
        params = entry.values(Case(length, length, 2, *heads))
        strategy = STRATEGIES[number // 3 % len(STRATEGIES)]
        sizes = Sizes(2, *heads, spec.qk_head_dim, spec.v_head_dim)
        if why_not(strategy, module_in(write(spec)), sizes, ranks):
            strategy = "all-to-all"
        options = {
            "balance": (3, "zigzag", "contiguous")[number % 3],
            "strategy": strategy,
            "keep": number % 4 > 1,
        }
        calls[name] = call_of(write(spec), spec, length, heads, params=params, **options)
    return calls


def more_calls(write: Write) -> dict[str, Sharded]:
    """Ranks without queries, one token a rank, no token at all, two documents, chunks of a tile."""
    causal_at, runs_at = write(CAUSAL), write(RUNS)
    documents, two = INTERPRETED["documents"], (torch.arange(45) > 30).int().expand(2, 45)
    return {
        "two documents": call_of(
            write(documents), documents, 45, (4, 1), params={"document_ids": two.contiguous()}
        ),
        "two tokens": call_of(causal_at, CAUSAL, 2, (2, 1), balance="contiguous"),
        "five tokens in pairs": call_of(causal_at, CAUSAL, 5, (2, 1), balance="zigzag"),
        "no token": call_of(causal_at, CAUSAL, 0, (2, 1)),
        "many runs": call_of(runs_at, RUNS, 150, (4, 2), balance=5),
        "rows that are kept": call_of(runs_at, RUNS, 150, (4, 2), balance=5, parts=2, keep=True),
        "rows that come again": call_of(runs_at, RUNS, 150, (4, 2), balance=5, keep=False),
        "in one part": call_of(causal_at, CAUSAL, 70, (8, 4), balance=2, parts=1),
        "computed again": call_of(runs_at, RUNS, 70, (4, 2), balance=2, again=True),
        "in four parts": call_of(causal_at, CAUSAL, 70, (8, 4), balance=2, parts=4),
        "balanced": call_of(causal_at, CAUSAL, 1030, (2, 2)),
        "as is fastest": call_of(causal_at, CAUSAL, 70, (4, 4), strategy="auto", batch=1),
        "all rows of uneven shards": call_of(
            runs_at, RUNS, 151, (4, 2), balance=5, strategy="all-gather", parts=2
        ),
        "a ring of many runs": call_of(runs_at, RUNS, 150, (4, 2), balance=5, strategy="ring"),
        "a ring with one token": call_of(causal_at, CAUSAL, 1, (2, 1), strategy="ring"),
        "a ring without queries": call_of(
            causal_at, CAUSAL, 3, (2, 1), strategy="ring", balance="contiguous"
        ),
        "heads of shared keys": call_of(runs_at, RUNS, 151, (8, 1), balance=3, strategy="ulysses"),
        "heads and no token": call_of(causal_at, CAUSAL, 0, (4, 4), strategy="ulysses"),
        "heads of uneven shards": call_of(
            causal_at, CAUSAL, 5, (4, 4), strategy="ulysses", balance="zigzag"
        ),
    }


def dropping_calls(write: Write) -> dict[str, Sharded]:
    """Chunks and keys that begin anywhere in a tile, heads in groups, ranks without queries."""
    calls = {}
    for number, (name, spec) in enumerate(DROPPING.items()):
        for length in (150, 20):
            balance = ("zigzag", 3, "contiguous")[number % 3]
            strategy = ("ulysses", "ring", "all-gather", "all-to-all")[number]
            options = {"balance": balance, "strategy": strategy}
            call = call_of(write(spec), spec, length, (4, 2), params=dict(DROPPED), **options)
            if number % 2:
                call = replace(call, parameters={**call.parameters, "seed": -number})
            calls[f"{name}, {length}"] = call
    return calls


def grid_calls(write: Write) -> dict[str, Sharded]:
    """Groups of two ranks: chunks of a group that follow one another or do not, empty ones."""
    causal_at, runs_at, dropping = write(CAUSAL), write(RUNS), DROPPING["dropout of documents"]
    calls = {
        "zigzag": (causal_at, CAUSAL, 67, (8, 4), {"balance": "zigzag", "parts": 2, "keep": True}),
        "many runs": (runs_at, RUNS, 150, (4, 2), {"balance": 5, "keep": False}),
        "shared keys": (runs_at, RUNS, 151, (8, 1), {"balance": 3}),
        "few tokens": (causal_at, CAUSAL, 3, (4, 4), {"balance": "zigzag"}),
        "dropping": (write(dropping), dropping, 150, (4, 2), {"balance": 3, "params": DROPPED}),
    }
    return {
        f"a grid, {name}": call_of(path, spec, length, heads, strategy="grid", **options)
        for name, (path, spec, length, heads, options) in calls.items()
    }


def test_two_ranks_are_equal_to_one(two: Pool, write: Write) -> None:
    calls = vocabulary_calls(write, 2, SERVED) | more_calls(write) | dropping_calls(write)
    for results, (name, call) in zip(
        zip(*two.run(by_all, list(calls.values())), strict=True), calls.items(), strict=True
    ):
        hold(list(results), call, name)


def test_four_ranks_are_equal_to_one(tmp_path: Path, write: Write) -> None:
    calls = vocabulary_calls(write, 4, SERVED) | more_calls(write) | dropping_calls(write)
    calls |= grid_calls(write)
    calls |= wrapped_calls(
        write,
        {
            "documents": ((2, 2), Shard(1)),
            "runs": ((2, 2), Replicate()),
            "learned": ((2, 2), Shard(0)),
        },
    )
    for pool in _pool(tmp_path, 4):
        found = pool.run(by_all, list(calls.values()))
    for results, (name, call) in zip(zip(*found, strict=True), calls.items(), strict=True):
        hold(list(results), call, name)


#: In Triton's interpreter: runs that are merged, ids that only data knows, what dropout
#: keeps, lists of tiles, a learned sink and bias.
INTERPRETED = {
    "runs": replace(RUNS, score=alibi(4)),
    "documents": AttentionSpec(16, "float32", mask=document() & causal(), forms=FORMS),
    "dropping": DROPPING["dropout of documents"],
    "blocks": AttentionSpec(16, "float32", mask=BLOCKS, forms=FORMS),
    "learned": AttentionSpec(
        16,
        "float32",
        mask=sliding_window(20, 0),
        score=lambda s, b, h, q, kv: s + Tensor("bias", ("num_q_heads", "kv_len"))[h, kv],
        normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",))),
        forms=FORMS,
    ),
}


def test_kernels_compute_parts(tmp_path: Path, write: Write) -> None:
    layout = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.6
    params = {**DROPPED, "layout": layout}
    calls = {
        name: call_of(write(spec), spec, 33, (4, 2), balance=2, batch=1, params=dict(params))
        for name, spec in INTERPRETED.items()
    }
    for pool in _pool(tmp_path, 2, interpret=True):
        found = pool.run(by_all, list(calls.values()))
    for results, (name, call) in zip(zip(*found, strict=True), calls.items(), strict=True):
        hold(list(results), call, name)


def wrapped_calls(
    write: Write, ways: dict[str, tuple[tuple[int, ...], Placement]]
) -> dict[str, Sharded]:
    """Calls with DTensors, of parameters too: meshes, and placements over their other dimension."""
    return {
        f"{name}, DTensors": call_of(
            write(INTERPRETED[name]),
            INTERPRETED[name],
            64,
            (4, 2),
            mesh=mesh,
            beside=beside,
            reduce_learned=len(mesh) == 1,
        )
        for name, (mesh, beside) in ways.items()
    }


def test_dtensors(two: Pool, write: Write) -> None:
    calls = wrapped_calls(
        write,
        {
            "documents": ((2,), Replicate()),
            "runs": ((1, 2), Replicate()),
            "learned": ((2,), Replicate()),
        },
    )
    for results, (name, call) in zip(
        zip(*two.run(by_all, list(calls.values())), strict=True), calls.items(), strict=True
    ):
        hold(list(results), call, name)


def test_dtensors_that_are_refused(two: Pool, write: Write) -> None:
    first, second = two.run(refused_dtensors, write(INTERPRETED["learned"]))
    assert first == second
    for found, message in zip(
        first,
        [
            "q: is Replicate() over the ranks of the call; redistribute() it to Shard(2)",
            "q: is Shard(dim=1) over the ranks of the call; redistribute() it to Shard(2)",
            "k: is (Replicate(), Replicate()) over",
            "k: is no DTensor, q is one; pass q, k and v alike",
            "q: is Shard(dim=2) over dimension 0 of its mesh; beside Shard(2)",
            "q: is a DTensor of",
            "q: has heads on several ranks, over dimension 0 of its mesh, but the module differs",
            "q: a DTensor of 31 positions on 2 ranks has uneven shards",
            "bias: is (Replicate(), Shard(dim=1)) over",
        ],
        strict=True,
    ):
        assert re.fullmatch("rank [01]: (Type|Value)Error: " + re.escape(message) + ".*", found)


def test_a_seed_is_drawn_for_all_ranks(two: Pool, write: Write) -> None:
    """By the first one's generator, and again where the forward pass is computed again."""
    path = write(DROPPING["dropout"])
    torch.manual_seed(0)
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64)
    for found in two.run(drawn_seed, path):
        q = found["whole"].double().requires_grad_()
        out = module_in(path).reference(q, q, q, dropout_p=0.5, seed=seed)
        out.sum().backward()
        assert q.grad is not None
        torch.testing.assert_close(found["out"].double(), out.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["q"].double(), q.grad, rtol=1e-5, atol=1e-5)


def test_shards_and_wholes(two: Pool, write: Write) -> None:
    """The layout of the first tensor holds for the others; a tensor of any dtype and dimension."""
    for found in two.run(round_trips, write(INTERPRETED["documents"])):
        assert found == ["", "", "unshard: passes no gradient; call it under torch.no_grad()"]


def test_a_plan_is_what_explain_shows(two: Pool, write: Write) -> None:
    variant = Variant("causal", CAUSAL, "causal.py")
    _, shown = explain_variant_ranks(variant, Asked(4096, heads=8, kv_heads=2), 2, Machine())
    assert two.run(shown_plan, write(CAUSAL)) == [str(shown)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "tree"}, "strategy: got 'tree'; pass one of 'auto', 'all-to-all', 'ulysses'"),
        ({"parts": 0}, "parts: got 0; pass a number of groups from 1 on, or None"),
        (
            {"balance": "even"},
            "balance: got 'even'; pass 'auto', 'contiguous', 'zigzag' or a number",
        ),
        ({"balance": 0}, "balance: got 0; pass"),
        ({"balance": True}, "balance: got True; pass"),
        ({"mesh": 3}, "mesh: got int; pass a DeviceMesh or a process group"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str, write: Write) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        context_parallel(module_in(write(CAUSAL)), **options)
    assert str(error.value).startswith(message)


def test_a_module_without_the_form_is_refused() -> None:
    with pytest.raises(TypeError) as error:
        context_parallel(shipped_module("causal_d64"))
    message = "takes no offsets; build its spec with forms=('dense', 'mesh')"
    assert str(error.value) == f"module: generated.causal_d64 {message}"


#: What a rank does differently, and what both are told of it.
DIFFERENT = {
    "parameter": (
        "parameter left: rank 1 has 7, rank 0 has 8",
        {"parameters": [{"left": 8}, {"left": 7}]},
    ),
    "scale": ("scale: rank 1 has 0.5, rank 0 has None", {"scales": [None, 0.5]}),
    "heads": (
        "q's batch, heads and head_dim: rank 1 has (2, 2, 16), rank 0 has (2, 4, 16)",
        {"heads": [4, 2]},
    ),
    "gradient": (
        "k's requires_grad: rank 1 has False, rank 0 has True",
        {"gradients": [True, False]},
    ),
    "one alone": (
        "rank 1: ValueError: this rank has 9 tokens; its shard of 16 has 8: pass what `shard` "
        "returns",
        {"tokens": [8, 9]},
    ),
    "unknown": (
        "rank 0: TypeError: right: is no parameter of sharded: left",
        {"parameters": [{"right": 8}, {}]},
    ),
    "silent": (
        "rank 1 made no such call within 1 s: all ranks of the mesh call with the same shapes, in "
        "the same order",
        {"silent": [False, True]},
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree_are_told(name: str, two: Pool, write: Write) -> None:
    message, differences = DIFFERENT[name]
    first, second = two.run(problems_of, write(RUNS), differences)
    assert first == f"Disagreement: {message}"
    assert second == ("" if name == "silent" else first)

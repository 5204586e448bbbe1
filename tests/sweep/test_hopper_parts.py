"""The Gluon backward kernel where tiles of the last heads are divided into parts, on the CPU."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashgen import AttentionSpec, Int, Mask, Tensor, causal, sliding_window
from support.cases import Case
from support.contract import check_gradients
from support.gluon import interpreted, start_over
from support.gluon.values import Block
from support.mutants import Mutant
from support.mutants.mutant import source_of
from support.mutants.order import SYNCHRONISES
from support.variants import imported, rendered_module, shipped_specs

SLOPES = Tensor("slopes", ("num_q_heads",))
LIFTS = Tensor("lifts", ("batch", "num_q_heads", "kv_len"))

SPECS = {
    **{name: shipped_specs()[name] for name in ("causal_d128", "causal_d64", "dropout_causal_d64")},
    # The last tiles of keys are the longest; each part has sums of its own heads' keys.
    "anticausal": AttentionSpec(64, mask=Mask(lambda b, h, q, kv: kv >= q, "what comes after")),
    # Queries that do not reach the end.
    "window": AttentionSpec(96, mask=sliding_window(left=Int("left", min=0), right=0)),
    "learned": AttentionSpec(
        128, mask=causal(), score=lambda s, b, h, q, kv: s + LIFTS[b, h, kv], dtype="float16"
    ),
}

#: (num_whole, num_parts) of some heads, and of all; parts that are as long as one another and not.
DIVISIONS = [(1, 2), (0, 3), (3, 4)]
CALLS = [("causal_d128", by) for by in DIVISIONS]
CALLS += [(name, (1, 3)) for name in SPECS if name != "causal_d128"]
CASE = Case(200, 200, batch=2, q_heads=8, kv_heads=2)


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], hopper=True, edit_source=interpreted)


def divided(module: ModuleType, by: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a module divide so, whatever the call."""
    assert hasattr(module, "_divided"), "this variant's tiles are never divided"
    monkeypatch.setattr(module, "_divided", lambda *_: by)


@pytest.mark.parametrize(("name", "by"), CALLS, ids=str)
def test_gradients(name: str, by: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads whose tiles are whole beside those of the others."""
    divided(_module(name), by, monkeypatch)
    check_gradients(_module(name), SPECS[name], CASE)


def test_gradients_of_keys_are_the_same_bits_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are stored, and added up in their order: those of queries alone meet in any."""
    module = _module("causal_d64")
    divided(module, (1, 3), monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 300, 64).bfloat16().requires_grad_() for heads in (6, 2, 2))
    grads = []
    for course in (1, 5):
        start_over(course)
        out = module.attention(q, k, v)
        grads.append(torch.autograd.grad(out, (k, v), torch.ones_like(out)))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("tiles", "heads", "whole", "parts"), [(5, 6, 4, 3), (1, 4, 0, 2), (7, 4, 4, 1), (4, 5, 2, 8)]
)
def test_every_part_once(tiles: int, heads: int, whole: int, parts: int) -> None:
    """The longest first: of whole tiles, in groups of heads, then of parts."""
    count = tiles * (whole + (heads - whole) * parts)
    call = SimpleNamespace(
        kv_len=Block(torch.tensor(tiles * 128)),
        num_kv_heads=Block(torch.tensor(2)),
        heads_together=Block(torch.tensor(2)),
        num_whole=Block(torch.tensor(whole)),
        num_parts=Block(torch.tensor(parts)),
        parts_together=Block(torch.tensor((heads - whole) * parts or 1)),
    )
    index = Block(torch.arange(count, dtype=torch.int32))
    found = _module("causal_d128")._keys_of(index, call, 128, parts > 1)

    def numbers(x: object) -> list[int]:
        data = x.data if isinstance(x, Block) else torch.tensor(x)
        return data.expand(count).tolist()

    places = list(
        zip(
            [2 * b + h for b, h in zip(numbers(found.batch), numbers(found.kv_head), strict=True)],
            [first // 128 for first in numbers(found.kv_first)],
            numbers(found.part),
            numbers(found.num_parts),
            strict=True,
        )
    )
    expected = [
        (head, tile, part, of)
        for head in range(heads)
        for of in [1 if head < whole else parts]
        for tile in range(tiles)
        for part in range(of)
    ]
    assert sorted(places) == sorted(expected)
    of_whole = tiles * whole
    assert {head for head, *_ in places[:of_whole]} == set(range(whole))
    for start in range(0, of_whole, 2 * tiles):
        ranks = [tile for _, tile, _, _ in places[start : start + 2 * tiles]]
        assert ranks == sorted(ranks)
    ranks = [tile for _, tile, _, _ in places[of_whole:]]
    assert ranks == sorted(ranks)


def _slips() -> list[Mutant]:
    """Kernels that are wrong where tiles have parts, and right where they are whole."""

    def slip(function: str, right: str, wrong: str, number: int | None = 0) -> Mutant:
        name = f"{function}: {wrong} for {right}"
        return Mutant(name, "backward_hopper", "causal_d128", function, right, wrong, number)

    found = [
        slip("_members", "(part + 1)", "part"),
        slip("_keys_of", "first + batch_head", "batch_head"),
        slip("_keys_of", "index -= gl.where(divided, whole_tiles, 0)", "pass"),
        slip("_backward_consumer", "- num_whole", ""),
        slip("_backward_consumer", "+ work_tile.part", ""),
        slip("_backward_consumer", "row + 256", "row"),
        slip("_store_part", "row + 128", "row"),
        slip("_place", "range(1, num_parts)", "range(2, num_parts)"),
        slip("_place_sums", "num_whole * kv_rows_len", "0"),
        slip("_place_sums", "row % BLOCK_N * 256", "0"),
        slip("_place_sums", "kv_rows_len, 1.0", "kv_rows_len, scale"),
        slip("_place_sums", "kv_rows_len, scale", "kv_rows_len, 1.0"),
    ]
    source = source_of("causal_d128", hopper=True)
    body = source.partition("def _store_part(")[2].partition("\n@gluon.jit")[0]
    waits = [line.strip() for line in body.splitlines() if SYNCHRONISES.match(line)]
    assert len(waits) == 2, "a wait for what the tile held, a fence"
    return found + [slip("_store_part", statement, "pass") for statement in waits]


@pytest.mark.parametrize("mutant", _slips(), ids=lambda mutant: mutant.name)
def test_slips_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    source = mutant.edited(source_of("causal_d128", hopper=True))
    module = imported("causal_d128", interpreted(source))
    divided(module, (1, 3), monkeypatch)
    case = Case(200, 200, batch=2, q_heads=4, kv_heads=1)

    def is_found(course: int) -> bool:
        start_over(course)
        try:
            check_gradients(module, SPECS["causal_d128"], case)
        except AssertionError:
            return True
        return False

    assert any(map(is_found, range(4)))

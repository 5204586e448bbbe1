"""The Gluon kernel on documents: tiles of queries that start where segments begin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import Tensor
from flashgen.plan import lower
from gpu.launch import check_hopper, hopper_candidates, native, poison
from support.cases import Case, inputs
from support.oracle import check
from support.segments import CUT, begins, ids_of, tile_starts
from support.variants import rendered_module

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

#: Of segments: at and beside the sizes of tiles, of their halves, and from which on they are cut.
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 153, 154, 192, 193, 230, 231, 256, 257, 448, 449, 777]

CASES = (
    Case(1777, 1777, batch=3, q_heads=6, kv_heads=2),
    Case(640, 640, batch=2, q_heads=5, kv_heads=5),
    Case(70, 70, batch=4, q_heads=3, kv_heads=1),
    Case(1, 1, batch=2, q_heads=1, kv_heads=1),
)


@functools.cache
def _module(name: str) -> ModuleType:
    module = rendered_module(CUT[name], hopper=True)
    module.HOPPER_CONFIG.update(hopper_candidates(lower(CUT[name], name))[0].as_dict())
    return module


def _packed(name: str, case: Case, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Case:
    """The case with segments of these lengths."""
    tensors = [param for param in CUT[name].params if isinstance(param, Tensor)]
    ids = ids_of(lengths, case.batch, case.kv_len, seed)
    return replace(case, params={x.name: ids if len(x.dims) == 2 else ids[0] for x in tensors})


@pytest.mark.parametrize("name", CUT)
def test_values(name: str) -> None:
    """With every BLOCK_M that there is, as often as it takes to see that it is the same bits."""
    candidates = hopper_candidates(lower(CUT[name], name))
    for config in {config.BLOCK_M: config for config in reversed(candidates)}.values():
        for case in CASES:
            check_hopper(_module(name), CUT[name], _packed(name, case), config)


@pytest.mark.parametrize("name", CUT)
def test_the_same_bits_every_time(name: str) -> None:
    """Calls that repeat a launch; every row is written, and by one tile alone."""
    spec, module = CUT[name], _module(name)
    for seed, case in enumerate(CASES):
        packed = _packed(name, case, seed=seed)
        tensors = inputs(packed, spec, native(spec), "cuda")
        params = packed.arguments(spec, "cuda")
        poison()
        first = module.attention(*tensors, return_lse=True, **params)
        check(first[0], first[1], tensors, spec, packed)
        for _ in range(30):
            again = module.attention(*tensors, return_lse=True, **params)
            assert all(map(torch.equal, first, again))
            for x in again:
                x.fill_(torch.nan)  # the next call is likely to get this memory
        assert torch.equal(first[0], module.attention(*tensors, **params))
        assert module._counter(tensors[0].device).item() == 0


@pytest.mark.parametrize("length", [100, 130, 300, 350, 1000, 4000])
def test_documents_of_one_length(length: int) -> None:
    case = _packed("causal", Case(4096, 4096, batch=2, q_heads=4, kv_heads=2), [length])
    config = hopper_candidates(lower(CUT["causal"], "causal"))[0]
    check_hopper(_module("causal"), CUT["causal"], case, config)


def test_other_documents_change_nothing() -> None:
    """Rows of the next document, in what a document's last tile loads, have scores of any size."""
    spec, module = CUT["causal"], _module("causal")
    case = _packed("causal", Case(2000, 2000, q_heads=4, kv_heads=4), [350])
    (q, k, v), params = inputs(case, spec, native(spec), "cuda"), case.arguments(spec, "cuda")
    odd = (torch.arange(2000, device="cuda") // 350 % 2 == 1)[:, None]
    right = module.attention(q, k, v, return_lse=True, **params)
    found = module.attention(torch.where(odd, 1e4 * q, q), k, v, return_lse=True, **params)
    for got, expected in zip(found, right, strict=True):
        assert torch.equal(got[:, :, ~odd[:, 0]], expected[:, :, ~odd[:, 0]])


def test_where_tiles_start() -> None:
    """As the GPU finds it, with one entry and with many."""
    module = _module("causal")
    for batch, length in ((1, 100_000), (40, 2500)):
        ids = ids_of([1, 100, 192, 193, 5000], batch, length)
        q = torch.empty(batch, 1, length, 1, device="cuda")
        begin, unordered, starts_of_tiles, _ = module._segment_tiles(
            q, ids.cuda(), module._counter(q.device), module.HOPPER_CONFIG, None
        )
        assert not unordered.any()
        rows = ids.tolist()
        block_m = module.HOPPER_CONFIG["BLOCK_M"]
        starts = [b * length + r for b in range(batch) for r in tile_starts(rows[b], block_m)]
        expected = []
        for row in rows:
            end = max((i + 1 for i, value in enumerate(row) if value == -1), default=0)
            pairs = zip(row, begins(row), strict=True)
            expected.append([end if value == -1 else first for value, first in pairs])
        assert begin.tolist() == expected, "ids of -1 see no key: theirs is the row behind them"
        assert starts_of_tiles[: len(starts) + 2].tolist() == [len(starts), *starts, batch * length]


def test_documents_that_change_in_a_graph() -> None:
    """The number of tiles is known to the GPU alone."""
    spec, module = CUT["causal"], _module("causal")
    case = _packed("causal", Case(1500, 1500, batch=2, q_heads=4, kv_heads=2))
    tensors, params = inputs(case, spec, native(spec), "cuda"), case.arguments(spec, "cuda")
    module.attention(*tensors, **params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.attention(*tensors, **params)
    for lengths in ([1500], [1], [129], LENGTHS):
        params["document_ids"].copy_(ids_of(lengths, 2, 1500, 5))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, module.attention(*tensors, **params))
        assert not out.isnan().any()


def test_ids_out_of_order() -> None:
    """By the GPU's own threads: of some entries, long and short ones, one neighbour each falls."""
    module = _module("causal")
    for batch, length in ((4, 100_000), (40, 2500), (70, 90)):
        ids = (torch.arange(length) // 50).int().expand(batch, -1).clone()
        fallen = torch.arange(batch) % 3 == 1
        places = torch.randint(51, length, (batch,), generator=torch.Generator().manual_seed(0))
        for entry in fallen.nonzero().flatten().tolist():
            ids[entry, places[entry]] = ids[entry, places[entry]] // 2
            ids[entry, 0] = -5  # and so no wrapped order either
        q = torch.empty(batch, 1, length, 1, device="cuda")
        found = module._segment_tiles(
            q, ids.cuda(), module._counter(q.device), module.HOPPER_CONFIG, None
        )[1]
        assert found.view(-1).tolist() == fallen.int().tolist()
        tables = module._row_tables(ids.cuda(), ids.cuda(), True, True, True, -1, 1)
        assert tables[2].view(-1).tolist() == fallen.int().tolist()


@pytest.mark.parametrize("name", CUT)
def test_values_of_ids_in_any_order(name: str) -> None:
    tensors = [param for param in CUT[name].params if isinstance(param, Tensor)]
    case = CASES[1]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, 3, (case.batch, case.kv_len // 40), generator=generator)
        ids = ids.int().repeat_interleave(40, 1)
        params = {x.name: ids if len(x.dims) == 2 else ids[0] for x in tensors}
        for config in hopper_candidates(lower(CUT[name], name))[:1]:
            check_hopper(_module(name), CUT[name], replace(case, params=params), config)

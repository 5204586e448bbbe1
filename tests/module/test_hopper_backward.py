"""The launch of the backward pass's Gluon kernels, seen on the CPU: when they run, with what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.plan import lower
from flashgen.plan.head_dims import Segment
from support.cases import LAYOUTS, Case
from support.specialised import NUM_SMS
from support.turns import in_turns
from support.watched_backward import (
    CASE,
    KERNELS,
    LENGTHS,
    PORTABLE,
    SPECS,
    Watched,
    kernels_of,
    lists_of,
    names_of,
)


@pytest.mark.parametrize("name", SPECS)
def test_one_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(name, monkeypatch)
    for turn, length in enumerate(LENGTHS):
        heads = (1, 2, 4, 16)[turn % 4]
        watched.call(Case(length, length, batch=turn % 3 + 1, q_heads=heads, kv_heads=heads))
    assert watched.launched == {*kernels_of(name), *lists_of(name)}
    for function in kernels_of(name):
        kernel = watched.kernels[function]
        assert len(kernel.grids) == len(LENGTHS)
        if function == "_backward_rows" and SPECS[name].v_head_dim % 16:
            continue  # which reads the output's gradient by its strides, aligned or not
        assert len(kernel.keys) == 1, "\n".join(sorted(kernel.keys))


#: Variants whose passes launch the same kernels.
ALIKE: dict[tuple[str, ...], list[str]] = {}
for _name in SPECS:
    ALIKE.setdefault(kernels_of(_name), []).append(_name)

#: Of one row, beside a tile and of it. A fast run has one or two with each variant, and each with
#: some variant of those that launch the same kernels.
Q_LENGTHS = (1, 127, 128, 129, 300)
ARGUMENTS = [
    row for names in ALIKE.values() for row in in_turns(names, Q_LENGTHS, every=min(3, len(names)))
]


@pytest.mark.parametrize(("name", "q_len"), ARGUMENTS)
def test_the_arguments(name: str, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(Watched(name, monkeypatch), name, q_len)


#: Slips of what launches the kernels: what stands there, and what instead.
SLIPS = [
    ("rows_len = -(-q_len // 128) * 128", "rows_len = -(-q_len // 64) * 64"),
    ("rows_len = -(-q_len // 128) * 128", "rows_len = -(-(q_len + 1) // 128) * 128"),
    ("_tiles_of(grad_k, 64, ", "_tiles_of(grad_k, 32, "),
]


@pytest.mark.parametrize("slip", SLIPS, ids=[wrong for _, wrong in SLIPS])
@pytest.mark.parametrize("name", ["window_d128", "causal_d256", "softcap_by_head"])
def test_slips_are_found(name: str, slip: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a length that the fast run has with some variant that launches the same kernels."""
    alike = ALIKE[kernels_of(name)]
    lengths = {row.values[1] for row in ARGUMENTS if row.values[0] in alike and not row.marks}

    def edited(source: str) -> str:
        assert slip[0] in source, "the launcher no longer reads so"
        return source.replace(*slip)

    def is_found(q_len: int) -> bool:
        try:
            check_arguments(Watched(name, monkeypatch, edited), name, q_len)
        except AssertionError:
            return True
        return False

    assert any(map(is_found, sorted(lengths)))


def parts_of(names: HopperBackwardSplit, tensor: str) -> tuple[Segment, ...]:
    """The segments of columns that a tensor has descriptors of."""
    return names.v_parts if tensor in ("v", "grad_v", "grad_out") else names.qk_parts


def check_arguments(watched: Watched, name: str, q_len: int) -> None:
    """What the kernels are launched with."""
    spec = SPECS[name]
    kv_len = q_len if lower(spec, name).equal_lengths else 200
    results = watched.call(Case(q_len, kv_len, batch=3, q_heads=4, kv_heads=2))
    names, (qk, v) = names_of(spec), (spec.qk_head_dim, spec.v_head_dim)
    block_n = {64: 128, 128: 128, 256: 64}[names.width]
    rows_len = math.ceil(q_len / 128) * 128
    (given,), (grid,) = (
        getattr(watched.kernels["_backward_hopper"], x) for x in ("arguments", "grids")
    )
    num_tiles = math.ceil(kv_len / block_n) * 3 * 2
    assert grid == ((NUM_SMS if given.get("num_shared") else num_tiles),)
    sizes = ("num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len")
    assert [given[size] for size in sizes] == [4, 2, q_len, kv_len, rows_len]
    fewer = spec.dropout or (names.of_keys_alone and bool(names.text.score_gradient))
    # Sums of what is learned, and terms of a distance, take the registers of 64 queries.
    fewer |= not names.split and bool(names.text.input_gradients or names.text.code.distances)
    assert given["BLOCK_M"] == (64 if fewer else {64: 128, 128: 64, 256: 64}[names.width])
    assert (given["BLOCK_N"], given["NUM_STAGES"]) == (block_n, 2)
    if not names.split:
        assert given["counter_ptr"].tolist() == [0] and given["num_tiles"] == num_tiles
    rows = {"q": (q_len, qk), "k": (kv_len, qk), "v": (kv_len, v), "grad_out": (q_len, v)}
    rows |= {"grad_k": (kv_len, qk), "grad_v": (kv_len, v)}
    for tensor, shape in rows.items():
        heads = 4 if tensor in ("q", "grad_out") else 2
        block = given["BLOCK_M"] if heads == 4 else 64 if tensor.startswith("grad") else block_n
        for part in parts_of(names, tensor):
            described = given[f"{tensor}_desc{part.suffix}"]
            assert tuple(described.shape) == (3, heads, *shape)
            assert described.block_shape == [1, 1, block, part.width]
            assert described.layout.element_bitwidth == 16
    # What tiles of queries reach past the last one is memory of its own, in whole tiles.
    assert tuple(given["rows_desc"].shape) == (2, 3 * 4, rows_len)
    assert given["rows_desc"].block_shape == [1, 1, given["BLOCK_M"]]
    if names.queries_portable:
        check_portable_queries(watched, given, results[0], q_len)
    elif names.split:
        check_queries(watched, given, results[0], q_len)
    else:
        check_sums(watched, given, results)
    (of_rows,) = watched.kernels["_backward_rows"].arguments
    assert of_rows["rows_len"] == rows_len and of_rows["HAS_GRAD_LSE"]
    assert (of_rows["SUMS_COLUMNS"] == 0) == names.split
    shapes = [tuple(x.shape) for x in results[:3]]
    assert shapes == [(3, 4, q_len, qk), (3, 2, kv_len, qk), (3, 2, kv_len, v)]
    for tensor, result in (("grad_k", results[1]), ("grad_v", results[2])):
        for part in parts_of(names, tensor):
            assert given[f"{tensor}_desc{part.suffix}"].base is result
    assert all(x.is_contiguous() for x in results)


def test_a_program_for_each_sm_takes_one_tile_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched("causal_d64", monkeypatch)
    watched.call(Case(1000, 1000, batch=3, q_heads=12, kv_heads=6))
    kernel = watched.kernels["_backward_hopper"]
    assert kernel.grids == [(NUM_SMS,)]
    assert kernel.arguments[0]["num_tiles"] == 8 * 3 * 6 > NUM_SMS


def check_sums(watched: Watched, given: dict[str, Any], results: tuple[torch.Tensor, ...]) -> None:
    """What sums of gradients meet in, and what brings them to their places."""
    names, grads = names_of(watched.spec), results[:3]
    shared = given.get("num_shared", 0)
    if names.shares:
        visits = math.ceil(given["q_len"] / given["BLOCK_M"]) * 2
        assert shared == watched.module._num_shared(given["num_tiles"], visits, NUM_SMS)
    num_sums = 3 * 4 * given["rows_len"] + 2 * shared * given["BLOCK_N"]
    if names.divides:  # of which these calls have too few tiles
        assert given["num_whole"] == 3 * 2 and not given["DIVIDED"]
    (of_rows,) = watched.kernels["_backward_rows"].arguments
    for width in names.sums_widths:
        suffix, columns = f"_{width}" * names.segmented, width // 2
        described = [given[f"{x}_desc{suffix}"] for x in ("grad_q", *("parts",) * names.divides)]
        for sums in described:
            assert sums.base.data_ptr() == of_rows["sums_ptr"].data_ptr()
            assert tuple(sums.shape) == (num_sums * names.columns // columns, columns)
            assert sums.block_shape == [128, columns]
    cleared = of_rows["num_sums"] * of_rows["SUMS_COLUMNS"]
    assert cleared == num_sums * names.columns == of_rows["sums_ptr"].numel()
    (placed,), (grid,) = (
        getattr(watched.kernels["_place_sums"], x) for x in ("arguments", "grids")
    )
    assert grid == (num_sums // 64,)
    assert placed["sums_ptr"] is of_rows["sums_ptr"]
    of_all = names.shares or names.divides
    for name, grad in list(zip("qkv", grads, strict=True))[: 3 if of_all else 1]:
        assert placed[f"grad_{name}_ptr"] is grad
    sizes = ["q_len", "rows_len", *("kv_len",) * of_all]
    sizes += ("num_tiles", "num_shared") * names.shares
    sizes += ("num_whole", "num_parts", "BLOCK_N") * names.divides
    assert [placed[size] for size in sizes] == [given[size] for size in sizes]
    assert placed.get("num_sums", num_sums) == num_sums


@pytest.mark.parametrize(
    ("num_tiles", "visits", "expected"),
    [
        (1, 132, 1),
        (1, 131, 0),  # a program would have no visit
        (99, 2, 99),
        (99, 1, 0),
        (100, 2, 0),  # few programs would be idle
        (131, 256, 0),
        (132, 256, 0),
        (2048, 256, 68),
    ],
)
def test_the_last_tiles_are_shared_where_others_would_be_idle(
    num_tiles: int, visits: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Watched("full_d128", monkeypatch).module
    assert module._num_shared(num_tiles, visits, 132) == expected


@pytest.mark.parametrize(
    ("num_heads", "group", "length", "expected"),
    [
        (8, 1, 8192, (8, 1)),  # one query head has no parts
        (8, 4, 512, (8, 1)),  # parts would cost more than they spare
        (32, 4, 1024, (32, 1)),
        (10, 8, 2048, (0, 4)),
        (4, 8, 5555, (0, 8)),
        (4, 3, 5555, (0, 3)),
        (4, 7, 5555, (0, 7)),
        (4, 7, 8192, (0, 7)),
        (4, 8, 8192, (0, 4)),
        (16, 8, 4096, (12, 4)),  # four heads, of 32 tiles, have parts for 132 programs
        (13, 4, 8192, (10, 4)),
        (32, 4, 2048, (24, 2)),
        (32, 3, 4096, (28, 3)),
        (4, 4, 16384, (4, 1)),
        (64, 4, 4096, (64, 1)),
    ],
)
def test_tiles_of_the_last_heads_are_divided_where_whole_ones_would_keep_others_waiting(
    num_heads: int,
    group: int,
    length: int,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Watched("causal_d128", monkeypatch).module
    assert module._divided(num_heads, group, length, math.ceil(length / 128), 132) == expected


def test_parts_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("causal_d128", monkeypatch)
    monkeypatch.setattr(watched.module, "_divided", lambda *_: (4, 3))
    grads = watched.call(Case(200, 200, batch=3, q_heads=12, kv_heads=4))
    (given,), (grid,) = (
        getattr(watched.kernels["_backward_hopper"], x) for x in ("arguments", "grids")
    )
    num_tiles_n, divided = 2, 3 * 4 - 4
    assert given["num_tiles"] == 4 * num_tiles_n + divided * num_tiles_n * 3 == grid[0]
    assert (given["num_whole"], given["num_parts"], given["DIVIDED"]) == (4, 3, True)
    assert (given["heads_together"], given["parts_together"]) == (4, 8)
    parts = given["parts_desc"]
    # Of 128 keys and their values, each 128 columns.
    assert parts.base.numel() == divided * num_tiles_n * 3 * 2 * 128 * 128
    assert parts.block_shape == [128, 32]
    (placed,), (grid,) = (
        getattr(watched.kernels["_place_sums"], x) for x in ("arguments", "grids")
    )
    assert placed["parts_ptr"] is parts.base and placed["num_parts"] == 3
    num_sums = 3 * 12 * given["rows_len"]
    assert grid == (num_sums // 64 + divided * num_tiles_n * 2 * 2,)
    assert [tuple(x.shape) for x in grads[1:]] == [(3, 4, 200, 128)] * 2


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "length", "parts", "expected"),
    [
        (1, 16, 16, 16384, 1, 1),  # 16 MiB of queries, gradients and sums a head
        (1, 16, 16, 8192, 1, 2),
        (8, 16, 16, 2048, 1, 8),
        (1, 16, 4, 2048, 1, 2),  # four heads of queries each
        (1, 16, 4, 2048, 2, 4),  # two each
        (1, 6, 6, 1024, 1, 2),  # no power of two above it divides six
        (1, 1, 1, 2**20, 1, 1),
        (0, 4, 4, 2048, 1, 1),
    ],
)
def test_heads_side_by_side(
    batch: int,
    q_heads: int,
    kv_heads: int,
    length: int,
    parts: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = (
        torch.empty(batch, heads, length, 128, dtype=torch.bfloat16, device="meta")
        for heads in (q_heads, kv_heads)
    )
    module = Watched("causal_d128", monkeypatch).module
    assert module._kv_heads_together(q, k, k, batch * kv_heads, parts) == expected


def check_queries(
    watched: Watched, of_keys: dict[str, Any], grad_q: torch.Tensor, q_len: int
) -> None:
    """What the kernel that computes the gradient of q is launched with."""
    names = names_of(watched.spec)
    (given,), (grid,) = (
        getattr(watched.kernels["_backward_queries_hopper"], x) for x in ("arguments", "grids")
    )
    assert grid == (3 * 4 * given["rows_len"] // 128,)
    shape = {x: given[x] for x in ("BLOCK_M", "BLOCK_N", "K_STAGES", "V_STAGES")}
    assert shape == names.of_queries.constants
    if names.queries_learn and names.of_queries.learned.diagonals:
        check_strips(watched, given)
    for size in ("num_q_heads", "num_kv_heads", "q_len", "kv_len", "rows_len"):
        assert given[size] == of_keys[size]
    blocks = {"q": 128, "grad_out": 128, "k": shape["BLOCK_N"], "v": shape["BLOCK_N"]}
    for tensor, rows in blocks.items():
        for part in parts_of(names, tensor):
            name = f"{tensor}_desc{part.suffix}"
            described, before = given[name], of_keys[name]
            assert described.base is before.base and described.shape == before.shape
            assert described.block_shape == [1, 1, rows, before.block_shape[3]]
    for part in names.qk_parts:
        result = given[f"grad_q_desc{part.suffix}"]
        assert result.base is grad_q and tuple(result.shape) == tuple(grad_q.shape)
        assert result.block_shape == [1, 1, 64, part.width]
    assert given["rows_ptr"] is of_keys["rows_desc"].base or (
        given["rows_ptr"].data_ptr() == of_keys["rows_desc"].base.data_ptr()
    )


def check_strips(watched: Watched, given: dict[str, Any]) -> None:
    """The memory of sums for distances of 64 queries, and what adds them up."""
    (summed,), (grid,) = (
        getattr(watched.kernels["_sum_strips"], x) for x in ("arguments", "grids")
    )
    num_tiles = given["rows_len"] // given["BLOCK_M"]
    assert (given["first_tile"], given["num_tiles"]) == (0, num_tiles)
    block_n, q_len, kv_len = given["BLOCK_N"], given["q_len"], given["kv_len"]
    distances = math.ceil(kv_len / block_n) * block_n + 64
    (item,) = names_of(watched.spec).of_queries.learned.diagonals
    strips = given[f"{item.variable}_ptr"]
    assert strips.numel() == 3 * 4 * 2 * num_tiles * distances
    assert summed["strips_ptr"] is strips
    assert tuple(summed["sums_ptr"].shape) == (3, 4, q_len + kv_len - 1)
    assert grid == (math.ceil((q_len + kv_len - 1) / 128) * 3 * 4,)
    for name in ("q_len", "kv_len", "first_tile", "num_tiles", "BLOCK_N"):
        assert summed[name] == given[name]


def check_portable_queries(
    watched: Watched, of_keys: dict[str, Any], grad_q: torch.Tensor, q_len: int
) -> None:
    """What the portable one is launched with: the same rows."""
    (given,), (grid,) = (
        getattr(watched.kernels["_backward_of_queries"], x) for x in ("arguments", "grids")
    )
    config = watched.module.BACKWARD_OF_QUERIES["sm_90"]
    assert grid == (math.ceil(q_len / config["BLOCK_M"]) * 3 * 4,)
    for name in ("BLOCK_M", "BLOCK_N", "USE_TMA"):
        assert given[name] == config[name]
    for size in ("num_q_heads", "num_kv_heads", "q_len", "kv_len", "scale"):
        assert given[size] == of_keys[size]
    rows = given["rows_ptr"]
    assert rows.is_contiguous() and rows.shape == (2, 3, 4, math.ceil(q_len / 128) * 128)
    assert rows.data_ptr() == of_keys["rows_desc"].base.data_ptr()
    assert given["num_rows"] == rows[0].numel() and given["grad_q_ptr"] is grad_q
    source = next(x for name, x in given.items() if name.startswith("q_src"))
    first, *_ = parts_of(names_of(watched.spec), "q")
    assert source.base is of_keys[f"q_desc{first.suffix}"].base


#: Of views, those that TMA cannot read.
UNREADABLE = {"unaligned", "one_head", "one_row"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tma_decides(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("causal_d64", monkeypatch)
    watched.call(Case(100, 100, batch=2, q_heads=4, kv_heads=2, layout=layout))
    gluon = layout not in UNREADABLE
    assert ("_backward_hopper" in watched.launched) == gluon
    assert (set(PORTABLE) <= watched.launched) == (not gluon)


def check_gradient_read(watched: Watched, grad_out: torch.Tensor, *, copied: bool) -> None:
    """The kernels read the output's gradient, or a copy of it."""
    assert watched.launched == set(KERNELS)
    (rows,), (given,) = (watched.kernels[x].arguments for x in KERNELS[:2])
    read = given["grad_out_desc"].base
    assert rows["grad_out_ptr"] is read
    assert torch.equal(read, grad_out)
    assert (read.data_ptr() != grad_out.data_ptr()) == copied
    assert not copied or (read.is_contiguous() and read.data_ptr() % 16 == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_tma_cannot_read_is_copied(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched("causal_d64", monkeypatch)
    memory = torch.full((999_999,), math.nan, dtype=torch.bfloat16)
    shape = (2, 4, 200, 64)
    view = LAYOUTS[layout](*shape, memory).fill_(1.0).expand(shape)
    watched.call(CASE, grad_out=view)
    check_gradient_read(watched, view, copied=layout in UNREADABLE)


def test_so_is_one_whose_columns_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `out.mT.sum()`, or an expanded number."""
    for grad_out in (
        torch.ones(2, 4, 64, 200, dtype=torch.bfloat16).mT,
        torch.ones((), dtype=torch.bfloat16).expand(2, 4, 200, 64),
    ):
        watched = Watched("causal_d64", monkeypatch)
        watched.call(CASE, grad_out=grad_out)
        check_gradient_read(watched, grad_out, copied=True)

"""Gluon on the CPU: what a kernel does wrong with memory and barriers shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.gluon.language import (
    fence_async_shared,
    gl,
    hopper,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from support.gluon.machine import Deadlock, Program
from support.gluon.modules import Kernel
from support.gluon.values import Block

SEEDS = range(40)  # of whatever may happen at one time or another
DATA = torch.arange(64 * 16).view(64, 16).to(torch.bfloat16) % 7
SHARED = gl.NVMMASharedLayout([16, 16])


def _tiles() -> Any:
    return hopper.TensorDescriptor(DATA, [64, 16], [16, 1], [16, 16], SHARED)


def _run(kernel: Callable[[], None], seed: int = 0) -> None:
    Program(0, 1, seed).run(kernel, num_warps=4)


def _fails(kernel: Callable[[], Any]) -> int:
    """How many of the seeds a fault shows with."""
    failed = 0
    for seed in SEEDS:
        try:
            _run(kernel, seed)
        except AssertionError:
            failed += 1
    return failed


def _barrier(count: int = 1) -> Any:
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=count)
    return barrier


def _memory(dtype: torch.dtype = torch.bfloat16, tiles: int = 1) -> Any:
    return gl.allocate_shared_memory(dtype, [tiles, 16, 16], SHARED)


def _is(block: Any, right: torch.Tensor) -> None:
    assert torch.equal(block.data.float(), right.float())


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_has_to_be_waited_for(waits: bool) -> None:
    def kernel() -> None:
        tile, full = _memory().index(0), _barrier()
        mbarrier.expect(full, 512)
        tma.async_load(_tiles(), [16, 0], full, tile)
        mbarrier.wait(full, 0, pred=waits)
        _is(tile.load(), DATA[16:32])

    assert (_fails(kernel) == 0) == waits


def test_a_load_past_the_end_is_zero() -> None:
    def kernel() -> None:
        tile, full = _memory().index(0), _barrier()
        mbarrier.expect(full, 512)
        tma.async_load(_tiles(), [56, -8], full, tile)
        mbarrier.wait(full, 0)
        _is(tile.load(), torch.nn.functional.pad(DATA[56:, :8], (8, 0, 0, 8)))

    _run(kernel)


@pytest.mark.parametrize("fault", ["", "too few bytes", "two arrivals"])
def test_a_phase_ends_when_all_is_there(fault: str) -> None:
    def kernel() -> None:
        tile, full = _memory().index(0), _barrier()
        mbarrier.expect(full, 512 + 2 * (fault == "too few bytes"))
        if fault == "two arrivals":
            mbarrier.arrive(full)
        tma.async_load(_tiles(), [0, 0], full, tile)
        mbarrier.wait(full, 0)

    if not fault:
        _run(kernel)
        return
    with pytest.raises(AssertionError, match="nobody else" if "few" in fault else "arrivals"):
        _run(kernel)


@pytest.mark.parametrize("waits", [True, False])
def test_a_product_has_to_be_waited_for(waits: bool) -> None:
    def kernel() -> None:
        tile = _memory().index(0)
        tile.store(Block(DATA[:16]))
        fence_async_shared()
        acc = gl.zeros([16, 16], gl.float32)
        a = Block(DATA[16:32])
        first = warpgroup_mma(a, tile, acc, use_acc=False, is_async=True)
        second = warpgroup_mma(a, tile.permute((1, 0)), first, is_async=True)
        second = warpgroup_mma_wait(0 if waits else 1, deps=(second,))
        a, b = DATA[16:32].float(), DATA[:16].float()
        _is(second, a @ b + a @ b.T)

    if waits:
        _run(kernel)
        return
    with pytest.raises(AssertionError, match="while it is being computed"):
        _run(kernel)


@pytest.mark.parametrize("waits", [True, False])
def test_operands_stay_until_a_product_is_done(waits: bool) -> None:
    def kernel() -> None:
        tile = _memory().index(0)
        tile.store(Block(DATA[:16]))
        fence_async_shared()
        acc = gl.zeros([16, 16], gl.float32)
        product = warpgroup_mma(tile, tile, acc, is_async=True)
        if waits:
            product = warpgroup_mma_wait(0, deps=(product,))
        tile.store(Block(DATA[16:32]))
        fence_async_shared()
        product = warpgroup_mma_wait(0, deps=(product,))
        _is(product, DATA[:16].float() @ DATA[:16].float())

    assert (_fails(kernel) == 0) == waits


@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("reader", ["product", "store"])
def test_what_threads_write_needs_a_fence(reader: str, fences: bool) -> None:
    def kernel() -> None:
        tiles, out = _memory(tiles=2), DATA.clone()
        tiles.index(1).store(Block(DATA[:16]))
        fence_async_shared()
        tiles.index(0).store(Block(DATA[16:32]))
        if fences:
            fence_async_shared()
        if reader == "product":
            acc = gl.zeros([16, 16], gl.float32)
            warpgroup_mma(tiles.index(1), tiles.index(0), acc)
        else:
            where = hopper.TensorDescriptor(out, [64, 16], [16, 1], [16, 16], SHARED)
            tma.async_store(where, [48, 0], tiles.index(0))
            tma.store_wait(0)
            _is(Block(out[48:]), DATA[16:32])

    assert _fails(kernel) == (0 if fences else len(SEEDS))


@pytest.mark.parametrize("fault", ["", "overwritten", "left behind"])
def test_a_store_reads_shared_memory_until_it_is_waited_for(fault: str) -> None:
    out = torch.zeros_like(DATA)

    def kernel() -> None:
        tile = _memory().index(0)
        tile.store(Block(DATA[:16]))
        fence_async_shared()
        where = hopper.TensorDescriptor(out, [64, 16], [16, 1], [16, 16], SHARED)
        tma.async_store(where, [56, 0], tile)  # past the end there is nothing
        if fault == "overwritten":
            tile.store(Block(DATA[16:32]))
        if fault != "left behind":
            tma.store_wait(0)
        if not fault or fault == "overwritten":
            _is(Block(out[56:]), DATA[:8])

    failed = _fails(kernel)
    assert failed == len(SEEDS) if fault == "left behind" else (failed == 0) == (not fault)


def test_memory_that_nobody_wrote_is_no_number() -> None:
    def kernel() -> None:
        assert _memory().load().data.isnan().all()
        with pytest.raises(AssertionError, match="read before it was written to"):
            _memory(torch.int32).load()

    _run(kernel)


@pytest.mark.parametrize("fault", ["", "reads early", "overwrites early"])
def test_two_roles_that_share_a_buffer(fault: str) -> None:
    """A producer of numbers, and a consumer that takes ten of them."""
    taken: list[int] = []

    def produce(slot: Any, full: Any, empty: Any) -> None:
        for i in range(10):
            mbarrier.wait(empty, i % 2 ^ 1, pred=fault != "overwrites early")
            slot.store(gl.full([1], i, gl.int32))
            mbarrier.arrive(full)

    def consume(slot: Any, full: Any, empty: Any) -> None:
        for i in range(10):
            mbarrier.wait(full, i % 2, pred=fault != "reads early")
            taken.append(int(gl.max(slot.load(), 0)))
            mbarrier.arrive(empty)

    def kernel() -> None:
        taken.clear()
        slot = gl.allocate_shared_memory(gl.int32, [1], SHARED)
        both = (slot, _barrier(), _barrier())
        gl.warp_specialize([(consume, both), (produce, both)], [1], [24])
        assert taken == list(range(10))

    failed = _fails(kernel)
    assert failed == 0 if not fault else failed > len(SEEDS) // 2


def test_a_deadlock_says_so() -> None:
    def wait(barrier: Any) -> None:
        mbarrier.wait(barrier, 0)

    def kernel() -> None:
        gl.warp_specialize([(wait, (_barrier(),)), (wait, (_barrier(),))], [4], [24])

    with pytest.raises(Deadlock, match="every role waits for another"):
        _run(kernel)


def test_a_role_that_fails_stops_the_others() -> None:
    def fail() -> None:
        raise AssertionError("on purpose")

    def wait(barrier: Any) -> None:
        mbarrier.wait(barrier, 0)

    def kernel() -> None:
        gl.warp_specialize([(wait, (_barrier(),)), (fail, ())], [4], [24])

    for seed in SEEDS:
        with pytest.raises(AssertionError, match="on purpose"):
            _run(kernel, seed)


def test_hardware_barriers_meet_and_pass_turns() -> None:
    order: list[str] = []

    def bar(kind: str, number: int) -> None:
        lanes = gl.full([128], 0, gl.int32)
        text = f"bar.{kind} {number}, 256; mov.b32 $0, $1;"
        gl.inline_asm_elementwise(text, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)

    def first() -> None:
        for _ in range(3):
            order.append("first")
            bar("arrive", 8)
            bar("sync", 9)

    def second() -> None:
        for _ in range(3):
            bar("sync", 8)
            order.append("second")
            bar("arrive", 9)

    for seed in SEEDS:
        order.clear()
        _run(lambda: gl.warp_specialize([(first, ()), (second, ())], [4], [24]), seed)
        assert order == ["first", "second"] * 3


@pytest.mark.parametrize(("offset", "masked"), [(0, False), (1, False), (1, True), (-1, False)])
def test_pointers_stay_inside_of_their_tensor(offset: int, masked: bool) -> None:
    x = torch.arange(16, dtype=torch.float32)

    def kernel(ptr: Any) -> None:
        places = gl.arange(0, 16) + offset
        mask = places < 16 if masked else None
        gl.store(ptr + places, gl.load(ptr + places, mask, 0.0) + 1.0, mask)

    def load(ptr: Any) -> None:
        gl.load(ptr + gl.arange(0, 16) + offset)

    def store(ptr: Any) -> None:
        gl.store(ptr + gl.arange(0, 16) + offset, 0.0)

    if offset and not masked:
        for one in (load, store):
            with pytest.raises(AssertionError, match="outside of a tensor's memory"):
                Kernel(one)[(1,)](x, num_warps=4)
        return
    Kernel(kernel)[(1,)](x, num_warps=4)
    assert torch.equal(x[offset:], torch.arange(16)[offset:] + 1.0)


def test_what_was_loaded_does_not_change_with_memory() -> None:
    """At one place and at several."""
    x = torch.zeros(17, dtype=torch.int32)

    def kernel(ptr: Any) -> None:
        for places in (Block(torch.tensor(0)), gl.arange(0, 16)):
            before = gl.load(ptr + places)
            gl.store(ptr + places, before + 1)
            gl.store(ptr + 16, gl.load(ptr + 16) + before.data.max().item())

    Kernel(kernel)[(1,)](x, num_warps=4)
    assert x.tolist() == [2, *[1] * 15, 1]


def test_programs_of_a_grid_count_together() -> None:
    counter, taken = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)

    def kernel(counter_ptr: Any, taken_ptr: Any) -> None:
        index = gl.atomic_add(counter_ptr, 2)
        gl.store(taken_ptr + index, gl.program_id(0) + 10 * gl.num_programs(0))

    Kernel(kernel)[(4,)](counter, taken, num_warps=4)
    assert counter.item() == 8
    assert taken.tolist() == [40, 0, 41, 0, 42, 0, 43, 0]


def test_numbers_are_computed_with_as_in_triton() -> None:
    seven, two = (
        Block(torch.tensor(-7, dtype=torch.int32)),
        Block(torch.tensor(2, dtype=torch.int32)),
    )
    assert int(seven // two) == -3 and int(seven % two) == -1
    assert (seven / two).data.dtype == torch.float32 and (seven * 2.0).data.dtype == torch.float32
    assert (seven.to(gl.int64) + two).data.dtype == torch.int64
    assert ((seven < two) + 1).data.dtype == torch.int32
    assert int(Block(torch.tensor(2**31 - 1, dtype=torch.int32)) + 1) == -(2**31)
    assert bool(~(seven > two)) and int(gl.where(seven < two, 3, 4)) == 3
    assert torch.equal(
        gl.maximum(Block(torch.tensor([torch.nan, 1.0])), 0.5).data, torch.tensor([0.5, 1.0])
    )
    held = Block(torch.tensor([[True, False], [True, True]]))
    assert gl.min(held, 1).data.tolist() == [False, True]
    assert gl.max(~held, 1).data.tolist() == [True, False]
    some = Block(torch.tensor([[torch.nan, 1.0], [torch.nan, torch.nan], [-torch.inf, 2.0]]))
    assert gl.max(some, 1).data.tolist() == [1.0, -torch.inf, 2.0]
    assert gl.min(some, 1).data.tolist() == [1.0, torch.inf, -torch.inf]


SELECTED = """
{
    .reg .b32 bit, other;
    .reg .pred p;
    and.b32 bit, $1, $2;
    setp.RELATION.s32 p, bit, 0;
    selp.f32 $0, $3, 0fFF800000, p;
}
"""


def _selected(text: str, dtype: torch.dtype = torch.int32) -> Any:
    bits = Block(torch.tensor([[5], [6]], dtype=dtype))
    which = Block(torch.tensor([1, 2, 4], dtype=torch.int32))
    values = Block(torch.arange(6.0).view(2, 3))
    return gl.inline_asm_elementwise(
        text, "=f,r,r,f", [bits, which, values], dtype=gl.float32, is_pure=True, pack=1
    )


def test_instructions_in_a_row() -> None:
    seen = _selected(SELECTED.replace("RELATION", "ne")).data
    assert seen.tolist() == [[0.0, -torch.inf, 2.0], [-torch.inf, 4.0, 5.0]]
    unseen = _selected(SELECTED.replace("RELATION", "eq")).data
    assert unseen.tolist() == [[-torch.inf, 1.0, -torch.inf], [3.0, -torch.inf, -torch.inf]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{ xor.b32 $0, $1, $2; }", NotImplementedError),
        ("{ add.rn.f16 $0, $1, $2; }", NotImplementedError),
        ("{ and.b32 $0, $1, $2; }", AssertionError),  # $0 holds floats
        ("{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.f32 $0, $3, $3, p; }", AssertionError),
        ("{ .reg .pred p; selp.f32 $0, $3, $3, p; }", KeyError),
    ],
)
def test_instructions_that_cannot_be(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        _selected(text)


def test_registers_are_of_one_type() -> None:
    with pytest.raises(AssertionError, match="int64"):
        _selected(SELECTED.replace("RELATION", "ne"), torch.int64)

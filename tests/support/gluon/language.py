"""What kernels import of Gluon, by the same names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from support.gluon import values
from support.gluon.instructions import inline_asm
from support.gluon.machine import pause, program, role
from support.gluon.memory import (
    Barriers,
    Descriptor,
    Pointer,
    Shared,
    copy_in,
    copy_out,
    fence,
    poison,
    wait_for_stores,
)
from support.gluon.products import multiply, wait_for_products
from support.gluon.values import Block, Layout


class BarrierLayout(Layout):
    """Of memory that holds barriers."""


class SharedLayout(Layout):
    """Of a tile in shared memory."""

    @staticmethod
    def get_default_for(shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """The one that TMA and matrix units take."""
        return SharedLayout(shape, dtype)


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Layout) -> Shared | Barriers:
    """Of a program."""
    if isinstance(layout, BarrierLayout):
        return Barriers(torch.Size(shape).numel())
    data = torch.empty(list(shape), dtype=dtype)
    poison(data)  # nobody has written to it
    return Shared(data)


def warp_specialize(
    functions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    num_warps: Sequence[int],
    registers: Sequence[int],
) -> None:
    """Divides a program into roles."""
    assert len(functions) == len(num_warps) + 1 == len(registers) + 1
    program().divide([lambda f=f, a=a: f(*a) for f, a in functions], num_warps)


def convert_layout(x: Block, layout: Layout, assert_trivial: bool = False) -> Block:
    """The same values, in other threads."""
    return x


def wait(barrier: Barriers, phase: Any, pred: Any = True) -> None:
    """Until the phase of this parity is over."""
    if pred:
        parity = int(phase)
        program().wait(lambda: barrier.one.passed(parity))


def arrive(barrier: Barriers, count: int = 1, pred: Any = True) -> None:
    """One of those that a phase needs, or several."""
    if pred:
        barrier.one.change(count, 0)
        pause()


def expect(barrier: Barriers, size: Any, pred: Any = True) -> None:
    """Announces bytes, and arrives."""
    if pred:
        barrier.one.change(1, int(size))


def init(barrier: Barriers, count: int) -> None:
    """How many arrivals a phase needs."""
    barrier.one.count = barrier.one.pending = count


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks the compiler for an instruction, where Gluon has no name for it yet."""
    return function


class constexpr:
    """Constants are what they are."""

    def __new__(cls, value: Any) -> Any:
        return value


gl = SimpleNamespace(
    **{str(x).removeprefix("torch."): x for x in (torch.bfloat16, torch.float16, torch.float32)},
    **{str(x).removeprefix("torch."): x for x in (torch.int8, torch.int16, torch.int32)},
    int64=torch.int64,
    int1=torch.bool,
    constexpr=constexpr,
    tensor=Block,
    tuple=tuple,
    static_range=range,
    program_id=lambda axis: Block(torch.tensor(program().number, dtype=torch.int32)),
    num_programs=lambda axis: Block(torch.tensor(program().count, dtype=torch.int32)),
    num_warps=lambda: role().num_warps,
    NVMMADistributedLayout=Layout,
    NVMMASharedLayout=SharedLayout,
    SwizzledSharedLayout=Layout,
    BlockedLayout=Layout,
    SliceLayout=Layout,
    DotOperandLayout=Layout,
    DistributedLinearLayout=Layout,
    **{name: getattr(values, name) for name in ("arange", "full", "zeros", "zeros_like", "where")},
    **{name: getattr(values, name) for name in ("maximum", "minimum", "join", "cdiv")},
    max=values.largest,
    min=values.smallest,
    sum=values.total,
    cast=lambda x, dtype: Block(values.of(x).to(dtype)),
    to_tensor=lambda x: x if isinstance(x, Block) else Block(torch.tensor(x, dtype=torch.int32)),
    **{
        name: values.unary(getattr(torch, name))
        for name in (
            "exp",
            "exp2",
            "log",
            "log2",
            "sin",
            "cos",
            "sqrt",
            "rsqrt",
            "abs",
            "erf",
            "floor",
        )
    },
    convert_layout=convert_layout,
    barrier=lambda: None,  # what a role's threads do, they do at once here
    inline_asm_elementwise=inline_asm,
    allocate_shared_memory=allocate_shared_memory,
    shared_memory_descriptor=Shared,
    warp_specialize=warp_specialize,
    load=Pointer.load,
    store=Pointer.store,
    atomic_add=Pointer.atomic_add,
)
mbarrier = SimpleNamespace(
    MBarrierLayout=BarrierLayout, init=init, wait=wait, arrive=arrive, expect=expect
)
# By the names of the newest Triton.
tma = SimpleNamespace(
    async_load=copy_in,
    async_store=copy_out,
    async_atomic_add=functools.partial(copy_out, add=True),
    store_wait=wait_for_stores,
    tensor_descriptor=Descriptor,
)
hopper = SimpleNamespace(TensorDescriptor=Descriptor)
fence_async_shared = fence


warpgroup_mma = multiply
warpgroup_mma_wait = wait_for_products

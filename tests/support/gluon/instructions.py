"""The inline PTX of the kernels, by what each piece of it does."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from support.gluon import ptx
from support.gluon.machine import pause, program
from support.gluon.values import Block, of


def inline_asm(
    text: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """What a piece of PTX gives.

    Raises:
        NotImplementedError: there is no such piece in the kernels that were known here.
    """
    if barrier := _barrier(text):
        meet(int(barrier[2]), stays=barrier[1] == "sync")
        return args[0]
    if text in ("mov.b32 $0, $1;", "mov.b32 $0, 0;"):
        return args[0] if "$1" in text else Block(torch.zeros((), dtype=torch.int32))
    if text == "tanh.approx.f32 $0, $1;":
        return Block(of(args[0]).tanh())  # the instruction has 11 bits
    if pair := _pair(text):
        low, high = (x.data.to(_HALVES[pair[1]]) for x in args)
        return Block(torch.stack([low, high], -1).view(torch.int32)[..., 0])
    if text == "mul.rn.bf16x2 $0, $1, $2;":
        packed, factor = (x.data.contiguous() for x in args)
        ones = factor.expand_as(packed).contiguous().view(torch.bfloat16)
        return Block((packed.view(torch.bfloat16) * ones).view(torch.int32))
    if text == "mov.b32 {$0, $1}, $2;":
        halves = args[0].data.contiguous().view(dtype[0]).unflatten(-1, (-1, 2))
        return Block(halves[..., 0]), Block(halves[..., 1])
    if text == "shfl.sync.idx.b32 $0, $1, $2, 31, -1;":
        # A thread has one element: the last dimensions are the lanes of a warp.
        x, lane = (y.reshape(-1, 32) for y in torch.broadcast_tensors(*map(of, args)))
        return Block(x.gather(1, lane.long()).reshape(args[0].shape))
    if "redux.sync.or" in text:
        # Each warp has 16 of the rows, and each row up to three bits.
        rows = args[0].data.reshape(-1, 16)
        warps = (rows & 1).amax(1) | (rows & 2).amax(1) | (rows & 4).amax(1)
        return Block(warps.repeat_interleave(16).to(torch.int32))
    if text.lstrip().startswith("{"):
        return Block(ptx.run(text, [of(x) for x in args], dtype))
    raise NotImplementedError(text)


@functools.cache
def _barrier(text: str) -> re.Match[str] | None:
    return re.fullmatch(r"bar\.(sync|arrive) (\d+), 256; mov\.b32 \$0, \$1;", text)


@functools.cache
def _pair(text: str) -> re.Match[str] | None:
    return re.fullmatch(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$2, \$1;", text)


_HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def meet(number: int, *, stays: bool) -> None:
    """A hardware barrier of two groups of four warps: one may only arrive, and go on."""
    arrived = program().hardware_barriers
    before = arrived.get(number, 0)
    arrived[number] = before + 1
    if stays:
        phase = before // 2
        program().wait(lambda: arrived[number] // 2 > phase)
    else:
        pause()

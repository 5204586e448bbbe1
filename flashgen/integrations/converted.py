"""Captured tensors in the dtypes of their parameters: int64 as int32, float64 as float32."""

from __future__ import annotations

import weakref

import torch

from flashgen.errors import MaskError

#: Captured tensors in another dtype, by the id of the tensor, for as long as it is not written to.
_converted_once: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}


def converted(name: str, x: torch.Tensor, dtype: torch.dtype, *, waits: bool) -> torch.Tensor:
    """A tensor in another dtype; numbers that 32 bits do not hold end in an error.

    Those of float64 are rounded as long as a difference of two stays right to 2**-4.

    Args:
        name: of the tensor.
        x: the tensor.
        dtype: the other dtype.
        waits: whether to wait for numbers of a GPU, so that they can be refused. Else the GPU ends
            with an error of its own.

    Raises:
        MaskError: numbers that 32 bits do not hold, where the host sees them.
    """
    once = not (torch.compiler.is_compiling() or x.requires_grad or x.is_inference())
    once = once and not x.is_cpu  # which may share memory with an array, whose writes are not seen
    if once and x.is_cuda:
        once = not torch.cuda.is_current_stream_capturing()  # a replay converts what is there then
    at = id(x)
    known = _converted_once.get(at) if once else None
    if known is not None and known[0]() is x and known[1] == x._version:
        return known[2]
    if x.dtype == torch.int64 and x.numel() > 0:
        low, high = torch.aminmax(x)
        fits = (low >= -(2**31)) & (high < 2**31)
        _require(fits, f"{name}: a captured tensor of int64 exceeds 32 bits", waits)
    made = x.to(dtype)
    if x.dtype == torch.float64:
        near = (x.detach().abs() < 2**20) | (made.detach() == x.detach()) | x.detach().isnan()
        what = f"{name}: a captured tensor of float64 is too large for float32"
        _require(near.all(), what, waits)
    if once:
        held = weakref.ref(x, lambda _: _converted_once.pop(at, None))
        _converted_once[at] = held, x._version, made
    return made


def _require(holds: torch.Tensor, problem: str, waits: bool) -> None:
    """Refuses a tensor for which a condition does not hold."""
    message = f"{problem}; subtract what its numbers have in common"
    seen = not torch.compiler.is_compiling() and type(holds) is torch.Tensor and not holds.is_meta
    if seen and holds.is_cuda:
        seen = waits and not torch.cuda.is_current_stream_capturing()
    if not seen:
        torch._assert_async(holds, message)
    elif not holds:
        raise MaskError(message)

"""The calls that variants are tried with: lengths, heads, memory layouts and parameters."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from flashgen import AttentionSpec, Float, Int, Tensor
from flashgen.block_lists import BlockLists
from flashgen.declared import Param
from flashgen.dropout import DropoutP, Seed
from flashgen.symbols import evaluate

#: What a call drops where a case says nothing of it.
SOME_DROPOUT = 0.3


@dataclass(frozen=True)
class Case:
    """One call of a variant.

    Attributes:
        layout: how q, k and v lie in memory, a key of `LAYOUTS`; or `MIXED`, each in its own way.
        scale: None leaves it to the variant.
        params: values of run-time parameters; the others keep their defaults, and what has none
            is drawn. Where nothing is said of dropout, some weights are dropped.
        outlier: what one key in the middle, shortly before a multiple of 64, is times.
    """

    q_len: int
    kv_len: int
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    layout: str = "contiguous"
    scale: float | None = None
    params: dict[str, Any] = field(default_factory=dict, hash=False)
    outlier: float = 1.0

    def __str__(self) -> str:
        words = [f"q{self.q_len}", f"kv{self.kv_len}"]
        words += [f"batch{self.batch}"] if self.batch != 1 else []
        words += [f"heads{self.q_heads}of{self.kv_heads}"] if self.q_heads != 1 else []
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"scale{self.scale}"] if self.scale is not None else []
        words += [f"outlier{self.outlier}"] if self.outlier != 1.0 else []
        for name, value in self.params.items():
            is_tensor = isinstance(value, torch.Tensor)
            words.append(f"{name}{list(value.shape) if is_tensor else value}")
        return "-".join(words)

    def arguments(self, spec: AttentionSpec, device: str = "cpu") -> dict[str, Any]:
        """The value of each of the spec's parameters, in the order that the module takes them."""
        values: dict[str, Any] = {}
        # Numbers first: the sizes of tensors may depend on them.
        for param in sorted(spec.params, key=lambda param: isinstance(param, Tensor)):
            default = SOME_DROPOUT if isinstance(param, DropoutP) else param.default
            value = self.params.get(param.name, default)
            value = drawn(param, self, values) if value is None else value
            values[param.name] = moved(value, device) if isinstance(param, Tensor | Seed) else value
        return {param.name: values[param.name] for param in spec.params}


def _contiguous(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    return nan[: b * h * s * d].view(b, h, s, d)


def _transposed(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    """(batch, seq, heads, head_dim) memory, as a projection writes it."""
    return nan[: b * s * h * d].view(b, s, h, d).transpose(1, 2)


def _padded(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    """Rows and columns of a larger tensor, at 16-byte steps."""
    rows, cols = s + 3, d + 32
    return nan[: b * h * rows * cols].view(b, h, rows, cols)[:, :, :s, 16 : 16 + d]


def _unaligned(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    """Columns of a larger tensor, at odd steps that TMA cannot take."""
    rows, cols = s + 3, d + 13
    return nan[: b * h * rows * cols].view(b, h, rows, cols)[:, :, :s, 5 : 5 + d]


def _every_other_row(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    return nan[: b * h * 2 * s * d].view(b, h, 2 * s, d)[:, :, ::2]


def _one_head(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    """Heads that are one head, expanded: a stride of 0."""
    return nan[: b * s * d].view(b, 1, s, d)


def _one_row(b: int, h: int, s: int, d: int, nan: torch.Tensor) -> torch.Tensor:
    """Positions that are one position, expanded: a stride of 0."""
    return nan[: b * h * min(s, 1) * d].view(b, h, min(s, 1), d)


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """x on a device, with what lies between its elements: ``to`` would leave that behind."""
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


#: Views into memory that is NaN wherever q, k and v are not: what reads too far shows.
LAYOUTS = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "padded": _padded,
    "unaligned": _unaligned,
    "every_other_row": _every_other_row,
    "one_head": _one_head,
    "one_row": _one_row,
}


#: As where keys come from a cache and queries from a projection: a kernel that takes the strides of
#: one for those of another is right as long as all lie alike.
MIXED = "mixed"
_OF_MIXED = ("transposed", "padded", "contiguous")


def drawn(param: Param, case: Case, given: dict[str, Any]) -> Any:
    """A random value of a parameter without a default, the same for the same case.

    Sorted tensors are the ids of some documents a sequence, other integers some number of keys;
    a third of a boolean tensor holds. Where the case's layout is not contiguous, neither is this:
    between its elements are others that give themselves away.

    Args:
        param: the parameter.
        case: the lengths.
        given: the values of other parameters, which sizes may depend on.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}{param.name}".encode()))
    if isinstance(param, Int):
        return param.min + int(torch.randint(0, max(1, case.kv_len), (), generator=generator))
    if isinstance(param, Seed):
        return torch.randint(2**63 - 1, (1,), generator=generator)
    if isinstance(param, Float):
        return 1.5 if param.above is None else param.above + 1.5
    assert isinstance(param, Tensor)
    sizes = given | {
        "batch": case.batch,
        "num_q_heads": case.q_heads,
        "num_kv_heads": case.kv_heads,
        "q_len": case.q_len,
        "kv_len": case.kv_len,
    }
    if isinstance(param, BlockLists):
        *lists, blocks = (evaluate(dim.sym, sizes) for dim in param.dims if dim is not None)
        # Some entries are no block, on either side, and some are there twice.
        shape = (*lists, 2 + blocks // 4)
        return torch.randint(-2, blocks + 2, shape, generator=generator, dtype=torch.int32)
    shape = [evaluate(dim.sym, sizes) for dim in param.dims if dim is not None]
    assert len(shape) == len(param.dims), f"{param}: of which size?"
    if param.dtype == "bool":
        value = torch.rand(shape, generator=generator) < 0.3
        poison = ~value
    elif param.dtype == "int32":
        most = case.kv_len // 8 if param.sorted else case.kv_len
        value = torch.randint(0, most + 2, shape, generator=generator, dtype=torch.int32)
        value = value.sort(dim=-1).values if param.sorted else value
        poison = torch.full_like(value, 2**30)
    else:
        value = torch.randn(shape, generator=generator).to(getattr(torch, param.dtype))
        poison = torch.full_like(value, torch.nan)
    return value if case.layout == "contiguous" else torch.stack([value, poison], dim=-1)[..., 0]


def inputs(
    case: Case, spec: AttentionSpec, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random normal q, k and v, the same for the same case and dtype."""
    seed = zlib.crc32(f"{case}{spec.digest}{dtype}".encode())
    generator = torch.Generator(device).manual_seed(seed)

    layouts = _OF_MIXED if case.layout == MIXED else (case.layout,) * 3

    def tensor(layout: str, heads: int, length: int, head_dim: int) -> torch.Tensor:
        shape = (case.batch, heads, length, head_dim)
        room = case.batch * heads * (2 * length + 3) * (head_dim + 32) + 4096
        nan = torch.full((room,), torch.nan, dtype=dtype, device=device)
        view = LAYOUTS[layout](*shape, nan)
        # Half precision's own generator differs between versions of torch: round instead.
        view.copy_(torch.randn(view.shape, generator=generator, device=device))
        return view.expand(shape)

    q, k, v = (
        tensor(layouts[0], case.q_heads, case.q_len, spec.qk_head_dim),
        tensor(layouts[1], case.kv_heads, case.kv_len, spec.qk_head_dim),
        tensor(layouts[2], case.kv_heads, case.kv_len, spec.v_head_dim),
    )
    if case.outlier != 1.0:
        k[:, :, case.kv_len // 2 // 64 * 64 - 3] *= case.outlier
    return q, k, v


def every_remainder(block_m: int, block_n: int, *, equal_lengths: bool) -> Iterator[Case]:
    """Lengths with every remainder by both tile sides, from 1 to more than a tile of each.

    Unless ``equal_lengths`` is demanded, both q_len < kv_len and q_len > kv_len, by differences of
    every remainder too.
    """
    large, small = max(block_m, block_n), min(block_m, block_n)
    for length in range(1, large + small + 2):
        yield Case(length, length)
    if equal_lengths:
        return
    for r in range(large):
        # 7 is coprime to a power of two: both lengths run through all remainders.
        short, long = 7 * r % large or large, large + small + r
        yield Case(short, long) if r % 2 else Case(long, short)
    for shift in range(1, block_n + 1):
        # Where a bottom-right diagonal leaves a full tile: at every place of a tile of keys.
        length = large + 7 * shift % large
        yield Case(length, length + shift)
        yield Case(length + shift, length)


def around_tiles(block_m: int, block_n: int, *, equal_lengths: bool) -> Iterator[Case]:
    """A few lengths at and beside the multiples of the tile sides, for large tiles."""
    edges = {1, *(b + e for b in (block_m, block_n) for e in (-1, 0, 1)), block_m + block_n + 9}
    for length in sorted(edges):
        yield Case(length, length)
    if not equal_lengths:
        yield Case(block_m + 5, 2 * block_n + 8)
        yield Case(5, block_n + 16)
        yield Case(block_m + 17, block_n - 3)
        yield Case(2 * block_m, 1)
        yield Case(1, 3 * block_n)

"""The attentions that are compared, each on the tensors of a cell.

A peer is a context manager: entered, it gives a function of no arguments that runs the forward pass
once and returns the output, (batch, heads, seq, v_head_dim). It raises where it cannot run a cell.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo.config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.accuracy import Inputs
from benchmarks.cells import WINDOW, Cell

Call = Callable[[], torch.Tensor]
Peer = Callable[[Cell, Inputs], AbstractContextManager[Call]]

#: Where modules are looked for that are built for the benchmark alone.
BENCHMARK_MODULES = Path(__file__).parent / "generated"


@cache
def load_module(name: str) -> ModuleType:
    """The generated module of this name: a shipped one, or one built from benchmarks/specs."""
    path = BENCHMARK_MODULES / f"{name}.py"
    if not path.exists():
        return importlib.import_module(f"generated.{name}")
    spec = importlib.util.spec_from_file_location(f"benchmarks.generated.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def flashgen(cell: Cell, inputs: Inputs) -> Iterator[Call]:
    """The generated module, with the configuration that it ships."""
    attention = load_module(cell.module).attention
    parameters = {"left": WINDOW} if cell.mask == "window" else {}
    yield lambda: attention(*inputs, **parameters)


@contextmanager
def flex(cell: Cell, inputs: Inputs) -> Iterator[Call]:
    """FlexAttention under torch.compile for this shape; its BlockMask is made beforehand."""
    compiled = _compiled_flex()
    block_mask = make_block_mask(cell, inputs[0].device)
    yield lambda: compiled(*inputs, block_mask=block_mask)


def sdpa(backend: SDPBackend) -> Peer:
    """SDPA, torch's scaled_dot_product_attention, held to one backend."""

    @contextmanager
    def peer(cell: Cell, inputs: Inputs) -> Iterator[Call]:
        if cell.mask == "window":
            raise NotImplementedError("no sliding window")
        is_causal = cell.mask == "causal"
        with sdpa_kernel(backend):
            yield lambda: scaled_dot_product_attention(*inputs, is_causal=is_causal)

    return peer


@contextmanager
def fa4(cell: Cell, inputs: Inputs) -> Iterator[Call]:
    """FlashAttention 4 (CuTe), where it is installed; it takes (batch, seq, heads, head_dim)."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    window = {"window_size": (WINDOW, 0)} if cell.mask == "window" else {}

    def call() -> torch.Tensor:
        result = flash_attn_func(q, k, v, causal=cell.mask != "full", **window)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    yield call


PEERS: dict[str, Peer] = {
    "flashgen": flashgen,
    "FlexAttention": flex,
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "FA4": fa4,
}


def peers_of(cell: Cell, with_fa4: bool = False) -> tuple[str, ...]:
    """The names of the peers to try on a cell: of torch's backends, those that take its dtype."""
    sdpa_names = ("SDPA efficient",) if cell.dtype == "float32" else ("SDPA cuDNN", "SDPA flash")
    return ("flashgen", "FlexAttention", *sdpa_names, *(["FA4"] if with_fa4 else []))


def make_block_mask(cell: Cell, device: torch.device) -> BlockMask | None:
    """What FlexAttention needs for a mask; None where the mask shows everything."""
    mask_mod = {"full": None, "causal": _causal, "window": _window}[cell.mask]
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, None, None, cell.seq_len, cell.seq_len, device=device)


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    # A shape costs a compilation, and dynamo gives up after 8 of them unless told otherwise.
    torch._dynamo.config.recompile_limit = 64
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled

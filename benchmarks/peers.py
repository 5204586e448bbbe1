"""The implementations that are compared, each on the tensors of a cell.

A peer is a context manager: entered, it gives a function of no arguments that runs the forward pass
once and returns the output, (batch, heads, seq, v_head_dim). It raises where it cannot run a cell.
`benchmarks.passes` makes peers of the backward pass from these.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.accuracy import Inputs, Results
from benchmarks.attentions import DOCUMENT, Attention
from benchmarks.cells import Cell
from benchmarks.fa4 import document_ends, fa4, fa4_mask_mod

Call = Callable[[], torch.Tensor | Results]
Peer = Callable[[Cell, Attention, Inputs], AbstractContextManager[Call]]

#: The folder of modules that are built for the benchmarks alone.
BENCHMARK_MODULES = Path(__file__).parent / "generated"


@cache
def load_module(name: str) -> ModuleType:
    """The generated module of this name: a shipped one, or one built from benchmarks/specs."""
    path = BENCHMARK_MODULES / f"{name}.py"
    if not path.exists():
        return importlib.import_module(f"generated.{name}")
    return load_file(path, f"benchmarks.generated.{name}")


def load_file(path: Path, name: str) -> ModuleType:
    """The module in a file, under its own name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_copy(label: str, text: str, name: str, scratch: Path) -> ModuleType:
    """A generated module from its text, with its own operators: torch allows one for each name.

    Args:
        label: distinguishes it from other modules of its name.
        text: its source.
        name: its name.
        scratch: a folder, kept until the end, for the file that is loaded.
    """
    copy = scratch / label / f"{name}.py"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text.replace('"flashgen::', f'"flashgen_{label}::'))
    return load_file(copy, f"benchmarks.copies.{label}.{name}")


@contextmanager
def flashgen(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
    """The generated module's own call, checks and tables of bounds included."""
    call = load_module(cell.module).attention
    yield lambda: call(*inputs, **attention.parameters)


@contextmanager
def portable(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
    """`flashgen` without Gluon kernels, as on another GPU or if TMA cannot read the tensors."""
    module = load_module(cell.module)
    with ExitStack() as patches:
        for runs in ("_runs_hopper", "_runs_hopper_backward"):
            if hasattr(module, runs):
                patches.enter_context(patch.object(module, runs, lambda q, k, v: False))
        module._LAUNCHES.clear()  # kept launches belong to a kernel
        patches.callback(module._LAUNCHES.clear)
        yield lambda: module.attention(*inputs, **attention.parameters)


@contextmanager
def flex(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
    """FlexAttention under torch.compile for this shape; its BlockMask is made beforehand."""
    compiled = compiled_flex()
    block_mask = make_block_mask(cell, attention, inputs[0].device)
    given = {"score_mod": attention.score_mod, "block_mask": block_mask, **_grouped(cell)}
    yield lambda: compiled(*inputs, **given)


def sdpa(backend: SDPBackend) -> Peer:
    """SDPA, torch's scaled_dot_product_attention, held to one backend."""

    @contextmanager
    def peer(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
        if cell.attention not in ("full", "causal", "dropout"):
            raise NotImplementedError(f"no {cell.attention}")
        given: dict[str, Any] = {"is_causal": cell.attention != "full", **_grouped(cell)}
        given["dropout_p"] = attention.dropout_p
        with sdpa_kernel(backend):
            yield lambda: scaled_dot_product_attention(*inputs, **given)

    return peer


def _grouped(cell: Cell) -> dict[str, Any]:
    """The keywords by which torch lets heads of queries share heads of keys."""
    return {"enable_gqa": True} if cell.num_heads != cell.num_kv_heads else {}


@contextmanager
def varlen(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
    """The varlen_attn of torch over packed documents; it takes (tokens, heads, head_dim)."""
    from torch.nn.attention.varlen import varlen_attn

    if cell.attention != "documents" or cell.batch != 1:
        raise NotImplementedError(f"no {cell.attention}")
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in inputs)
    cu_seq = document_ends(cell.seq_len, q.device)
    # Since torch 2.12 a causal mask is a window that ends at the query.
    has_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if has_window else {"is_causal": True}

    def call() -> torch.Tensor:
        out: Any = varlen_attn(q, k, v, cu_seq, cu_seq, DOCUMENT, DOCUMENT, **causal)
        heads_first: torch.Tensor = out.transpose(0, 1)[None]
        return heads_first

    yield call


PEERS: dict[str, Peer] = {
    "flashgen": flashgen,
    "flashgen, portable": portable,
    "FlexAttention": flex,
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "varlen_attn": varlen,
    "FA4": fa4,
    "FA4 mask_mod": fa4_mask_mod,
}


def peers_of(cell: Cell, with_fa4: bool = False, which: str = "forward") -> tuple[str, ...]:
    """The names of the peers to try on a cell: those that have its attention and take its dtype.

    Of the backward pass, `which`, the portable kernels are measured too in the cells of the grid.
    """
    others: tuple[str, ...] = ()
    is_float32 = cell.dtype == "float32"
    if cell.attention == "dropout":  # FlexAttention and FlashAttention 4 have none
        return ("flashgen", "SDPA cuDNN", "SDPA flash")
    if cell.attention in ("full", "causal"):
        others = ("SDPA efficient",) if is_float32 else ("SDPA cuDNN", "SDPA flash")
    if cell.attention == "documents":
        others = ("varlen_attn",)
    if with_fa4 and not is_float32:
        others += ("FA4", "FA4 mask_mod") if cell.attention == "chunked" else ("FA4",)
    if which == "backward" and cell.in_grid:
        others += ("flashgen, portable",)
    return ("flashgen", "FlexAttention", *others)


def make_block_mask(cell: Cell, attention: Attention, device: torch.device) -> BlockMask | None:
    """FlexAttention's BlockMask for a mask; None if the mask shows everything."""
    if attention.mask_mod is None:
        return None
    length = cell.seq_len
    return create_block_mask(attention.mask_mod, None, None, length, length, device=device)


@cache
def compiled_flex() -> Callable[..., torch.Tensor]:
    """FlexAttention under torch.compile, with a kernel for each shape."""
    # A shape costs a compilation, and dynamo gives up after 8 of them unless told otherwise.
    torch._dynamo.config.recompile_limit = 64
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled

"""CPU time of a call, in microseconds: flashgen's modules beside torch's attention.

    python -m benchmarks.launch [--json FILE]

Batch 1, 16 heads, 128 tokens, no CUDA graph: the GPU finishes before the CPU. A figure is the
median over many batches of calls. A batch is timed without waiting for the GPU; between batches the
CPU waits, so that the GPU's queue never fills. The implementations of a case take turns, batch by
batch, because the speed of a CPU drifts. Calls of the first table need no gradient; calls of the
second are training in eager mode, a forward and a backward pass each. One column of both is of
packed sequences, two of 50 and 78 tokens. A third table divides flashgen's call.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.call_tables import launch_table
from benchmarks.figures import OWN
from benchmarks.forms import build_own
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.varlen import MODULE as PACKED
from benchmarks.varlen import Packing, tensors_of, ways
from flashgen.errors import first_line

HEADS, TOKENS = 16, 128
CALLS, BATCHES = 50, 100

#: Peers whose training calls are measured: FlashAttention-4 gets copies, which have no gradients.
TRAINED = (OWN, "SDPA", "SDPA cuDNN", "SDPA flash", "FlexAttention")

Call = Callable[[], Any]
#: The context of a call, made for each batch.
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A shipped module, with the arguments of others for the same attention.

    Attributes:
        module: the module's name.
        head_dim: head dimension of queries, keys and values.
        mask: FlexAttention's mask function, None for none.
        sdpa: keywords of SDPA, None where it cannot express the mask without a tensor of it.
        fa4: keywords of flash_attn.cute, None if it cannot express the mask.
        params: keywords of the module.
    """

    module: str
    head_dim: int
    mask: Callable[..., torch.Tensor] | None
    sdpa: Mapping[str, Any] | None
    fa4: Mapping[str, Any] | None
    params: Mapping[str, Any] = field(default_factory=dict)


def cases(device: torch.device) -> Iterator[Case]:
    """The measured cases."""
    ids = (torch.arange(TOKENS, device=device, dtype=torch.int32) // 50).expand(1, TOKENS)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 64)

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    yield Case("full_d64", 64, None, {}, {})
    yield Case("causal_d128", 128, causal, {"is_causal": True}, {"causal": True})
    window_size = {"causal": True, "window_size": (64, 0)}
    yield Case("window_d128", 128, window, None, window_size, {"left": 64})
    document_ids = {"document_ids": ids.contiguous()}
    yield Case("documents_d128", 128, document, None, None, document_ids)


def calls(case: Case, qkv: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Context, Call]]:
    """(name, a context for timing, the call) of every implementation of a case."""
    attention = importlib.import_module(f"generated.{case.module}").attention
    params = dict(case.params)
    yield OWN, nullcontext, lambda: attention(*qkv, **params)
    if case.sdpa is not None:
        keywords = dict(case.sdpa)
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        for name, context in {
            "SDPA": nullcontext,
            **{f"SDPA {name}": partial(sdpa_kernel, which) for name, which in backends.items()},
        }.items():
            yield name, context, lambda: scaled_dot_product_attention(*qkv, **keywords)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    mask = None
    if case.mask is not None:
        mask = create_block_mask(case.mask, 1, None, TOKENS, TOKENS, device=qkv[0].device)
    yield "FlexAttention", nullcontext, lambda: compiled(*qkv, block_mask=mask)
    if case.fa4 is not None:
        try:
            from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
        except ImportError:
            return
        rows = [x.transpose(1, 2).contiguous() for x in qkv]
        yield "FlashAttention-4", nullcontext, lambda: flash_attn_func(*rows, **case.fa4)


def packed_calls(
    device: torch.device, *, trained: bool = False
) -> Iterator[tuple[str, Context, Call]]:
    """`calls` of packed sequences; those that have gradients, for a forward and a backward pass."""
    lengths = (50, TOKENS - 50)
    packing = Packing("packed", lengths, lengths, HEADS, HEADS)
    qkv, _ = tensors_of(packing, device)
    for name, call in ways(packing, device, importlib.util.find_spec("flash_attn") is not None):
        if trained:
            yield (
                name,
                partial(_with_gradients, nullcontext),
                partial(_step, partial(call, *qkv), qkv),
            )
        else:
            yield name, nullcontext, partial(call, *qkv)


def training_calls(
    case: Case, qkv: tuple[torch.Tensor, ...]
) -> Iterator[tuple[str, Context, Call]]:
    """`calls` for a forward and a backward pass; gradients are discarded."""
    leaves = tuple(x.detach().requires_grad_() for x in qkv)
    for name, context, call in calls(case, leaves):
        if name in TRAINED:
            yield name, partial(_with_gradients, context), partial(_step, call, leaves)


@contextmanager
def _with_gradients(context: Context) -> Iterator[None]:
    with context(), torch.enable_grad():
        yield


def _step(call: Call, leaves: tuple[torch.Tensor, ...]) -> None:
    out = call()
    out = out[0] if isinstance(out, tuple) else out
    torch.autograd.grad(out, leaves, out.detach())


def parts(case: Case, qkv: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Call]]:
    """(name, a part of flashgen's call), after a first call; some parts contain others."""
    module = importlib.import_module(f"generated.{case.module}")
    q, k, v = qkv
    params = dict(case.params)
    out, lse = module.attention(q, k, v, return_lse=True, **params)
    tables = [x for x in params.values() if isinstance(x, torch.Tensor)]
    numbers = [x for x in params.values() if not isinstance(x, torch.Tensor)]
    scale = case.head_dim**-0.5
    yield "an empty call", lambda: None
    yield "_check_numbers", lambda: module._check_numbers(scale, *numbers)
    # What finds a call like the one before it, in place of the next two.
    yield "_again", lambda: module._again("dense", (q, k, v, *tables))
    yield "_is_plain", lambda: module._is_plain(q, k, v, *tables)
    yield "_known", lambda: module._known(q, k, v, *tables)
    yield "out", lambda: q.new_empty(1, HEADS, TOKENS, case.head_dim)
    yield "lse, where asked for", lambda: q.new_empty(1, 2, 3, dtype=torch.float32)
    yield from launches(module, lambda: module.attention(q, k, v, **params))
    if hasattr(module, "_counter"):
        yield "_counter", lambda: module._counter(q.device)
    grad_out = torch.randn_like(out)
    saved = (out, lse, grad_out, None)
    yield (
        "a backward pass without autograd",
        lambda: module._gradients(q, k, v, scale, *params.values(), *saved),
    )
    yield "_check_tensors, once", lambda: module._check_tensors(q, k, v, *tables)
    yield (
        "a call that Triton prepares",
        lambda: module._forward(q, k, v, scale, *params.values()),
    )


def launches(module: ModuleType, attention: Call) -> Iterator[tuple[str, Call]]:
    """Each launch that a further call repeats, and Triton's share of it; the kernel's is last."""
    kept = repeated(module, attention)
    if not kept:
        sys.exit(f"{module.__name__} keeps no launch with triton of this version")
    for launch, addresses, numbers in kept:
        of = "" if launch is kept[-1][0] else f" of {launch.kernel.name}"
        yield f"repeat{of}", partial(launch.repeat_at, addresses, numbers)
        args = launch.args.copy()
        for (place, maps), address in zip(launch.places, addresses, strict=True):
            args[place] = address if maps is None else maps[address]
        yield f"Triton's launch{of}", partial(_launch, launch, args)


def repeated(module: ModuleType, call: Call) -> list[tuple[Any, tuple[int, ...], Any]]:
    """(launch, addresses, numbers) of the kept launches that a call repeats, in their order."""
    found: list[tuple[Any, tuple[int, ...], Any]] = []
    repeat = module._Launch.repeat_at

    def recorded(launch: Any, addresses: tuple[int, ...], numbers: Any) -> None:
        found.append((launch, addresses, numbers))
        repeat(launch, addresses, numbers)

    with patch.object(module._Launch, "repeat_at", recorded):
        call()
    return found


def _launch(launch: Any, args: list[Any]) -> None:
    launch.launch(launch.stream_of(launch.device), args)


def possible(
    module: str, named: Iterable[tuple[str, Context, Call]]
) -> Iterator[tuple[str, Context, Call]]:
    """The calls beside a module's that work here; prints why the others do not.

    Raises:
        Exception: the error of flashgen's own call.
    """
    for name, context, call in named:
        try:
            _batch(context, call)
        except Exception as error:  # for example, a backend that this machine lacks
            if name == OWN:
                raise
            print(f"{module}, {name}: {first_line(error)}", file=sys.stderr)
        else:
            yield name, context, call


def microseconds(named: Iterable[tuple[str, Context, Call]]) -> dict[str, float]:
    """The median CPU time of each call; batches of all calls take turns."""
    held = list(named)
    taken: dict[str, list[float]] = {name: [] for name, _, _ in held}
    for _ in range(BATCHES):
        for name, context, call in held:
            taken[name].append(_batch(context, call))
    return {name: round(statistics.median(found) / 1000, 2) for name, found in taken.items()}


def _batch(context: Context, call: Call) -> float:
    """Nanoseconds of the CPU for each of some calls."""
    with torch.no_grad(), context():
        torch.cuda.synchronize()
        call()  # the first calls after another's find the caches cold
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        return (time.perf_counter_ns() - started) / CALLS


def main() -> int:
    """Measures, and shows the table."""
    options = make_parser("launch", __doc__).parse_args()
    if not sees_gpu("launch"):
        return 2
    device = torch.device("cuda")
    found: dict[str, Any] = {
        "benchmark": "launch",
        "environment": environment(device),
        "calls": {},
        "training": {},
        "parts": {},
    }
    for case in cases(device):
        shape = (1, HEADS, TOKENS, case.head_dim)
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
        name = case.module
        found["calls"][name] = microseconds(possible(name, calls(case, (q, k, v))))
        found["training"][name] = microseconds(possible(name, training_calls(case, (q, k, v))))
        alone = ((name, nullcontext, call) for name, call in parts(case, (q, k, v)))
        found["parts"][name] = microseconds(alone)
    build_own(PACKED)
    for key, trained in (("calls", False), ("training", True)):
        found[key][PACKED] = microseconds(possible(PACKED, packed_calls(device, trained=trained)))
    tell(found, launch_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

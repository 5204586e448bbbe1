"""bench: one variant's module beside FlexAttention and torch's SDPA backends, in one run.

Linear attention and Linformer are beside softmax attention with the same mask, and fla.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashgen.bench_linear import FLA, copied_bytes, fla_call, moved_bytes, softmax_of
from flashgen.build import Options, is_current
from flashgen.errors import FlashgenError, first_line
from flashgen.kernels.linear_workload import declared
from flashgen.kernels.workload import (
    random_inputs,
    typical_params,
    usual_lengths,
    visible,
    visible_flops,
)
from flashgen.loader import Variant, load
from flashgen.normalisers import softmax
from flashgen.place import Place
from flashgen.plan import KernelPlan, lower
from flashgen.spec import AttentionSpec
from flashgen.tuning.device import detect_gpu
from flashgen.tuning.linear_bench import captured
from flashgen.tuning.typical_calls import typical_call

if TYPE_CHECKING:
    import torch

    Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

Call = Callable[[], Any]

LENGTHS = (2048, 8192, 16384)
WARMUP_MS, REPETITION_MS = 25, 100

OWN = "flashgen"
SDPA_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


@dataclass(frozen=True)
class Timing:
    """One kernel at one length.

    Attributes:
        length: q_len and kv_len.
        kernel: ``"flashgen"``, ``"FlexAttention"``, ``"SDPA flash"``...
        ms: median milliseconds of a forward call; None where it cannot run.
        tflops: TFLOP/s over the elements that the mask shows; None where it cannot run, and for
            linear attention by states and Linformer, whose time does not grow with them.
        ratio: this one's time over flashgen's; None where it cannot run.
        problem: why it cannot run; empty where it can.
        share: for these the time of a copy that moves as many bytes as q, k, v and the output have,
            over this one; else None.
    """

    length: int
    kernel: str
    ms: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    problem: str = ""
    share: float | None = None


def bench(name: str, specs: Path, out: Path) -> list[Timing]:
    """Times the variant's published module and its peers on this machine's GPU, forward only.

    Raises:
        FlashgenError: no GPU to measure on, no such variant, or its module is not up to date.
    """
    variant = _variant(name, specs)
    _require_gpu(variant)
    place = Place(out, name)
    if not is_current(variant, place, Options(out=out), None):
        raise FlashgenError(f"{place.module}: not up to date; build {variant.file} first")
    plan, module = lower(variant.spec, name), _import(place)
    lengths = usual_lengths(plan, LENGTHS)
    return [timing for length in lengths for timing in _timings(plan, variant.spec, module, length)]


def to_json(timings: list[Timing]) -> str:
    """The timings as a JSON list, an object each."""
    return json.dumps([asdict(timing) for timing in timings], indent=1) + "\n"


def _variant(name: str, specs: Path) -> Variant:
    variants = {variant.name: variant for variant in load([specs])}
    if name not in variants:
        raise FlashgenError(f"{name}: no spec of this name in {specs}; write {_or(variants)}")
    return variants[name]


def _require_gpu(variant: Variant) -> None:
    gpu = detect_gpu()
    if gpu is None:
        raise FlashgenError(f"{variant.name}: no GPU to measure on; run bench where there is one")
    if gpu.target not in variant.spec.targets:
        raise FlashgenError(
            f"{variant.name}: targets={variant.spec.targets}: this machine's GPU, {gpu.name}, is "
            f"{gpu.target}; run bench on a {_or(variant.spec.targets)}"
        )


def _import(place: Place) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flashgen_bench_{place.name}", place.module)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _timings(
    plan: KernelPlan, spec: AttentionSpec, module: ModuleType, length: int
) -> Iterator[Timing]:
    """The module first, then its peers, all on the same tensors."""
    q, k, v = random_inputs(plan, length)
    is_softmax = not (declared(plan) or spec.linformer)
    peer = plan if is_softmax else softmax_of(spec, plan.name)
    params = typical_params(peer, q)
    others, keywords = (), plan.by_keyword(params)
    if not is_softmax:
        others, keywords = typical_call(plan, module, q)
    own: Call = partial(module.attention, q, k, v, *others, **keywords)
    seen = visible(peer, q, params)
    # Where time grows with the length, and not with the scores, the tensors are what is counted.
    counts_bytes = bool(plan.linear or spec.linformer)
    copied = copied_bytes(_ms, q.device) if counts_bytes else 1.0
    ways: list[tuple[str, KernelPlan, Callable[[], Call]]] = [
        (OWN, plan, lambda: captured(own) if counts_bytes else own)
    ]
    if fla := fla_call(plan, (q, k, v), keywords):
        ways.append((FLA, plan, partial(captured, fla)))
    for name, make in _peers(peer, (q, k, v), seen, params):
        ways.append((name if is_softmax else f"{name}, softmax", peer, make))

    own_ms = 0.0
    for kernel, of, make in ways:
        try:
            ms = _ms(make())
        except Exception as error:  # whatever torch, its compiler or the driver raise
            if kernel == OWN:
                raise
            yield Timing(length, kernel, problem=first_line(error))
            continue
        own_ms = own_ms or ms
        rate, share = None, None
        if counts_bytes:
            share = moved_bytes(q, k, v) / ms / copied
        else:
            rate = visible_flops(of, q, seen) / ms / 1e9
        yield Timing(length, kernel, ms, rate, ms / own_ms, share=share)


def _ms(call: Call) -> float:
    """The median milliseconds of a call."""
    import triton

    ms: float = triton.testing.do_bench(
        call, warmup=WARMUP_MS, rep=REPETITION_MS, return_mode="median"
    )
    return ms


def _peers(
    plan: KernelPlan, qkv: Inputs, seen: torch.Tensor, params: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Each peer's name and what makes its call: what may be done beforehand is, and not timed."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    yield "FlexAttention", partial(_flex_call, plan, qkv, seen, params)

    if plan.score_torch or plan.spec.normaliser != softmax():
        return  # SDPA has neither

    # SDPA knows the causal mask; any other it gets as a tensor, if its backend takes one.
    causal = seen.ndim == 2 and torch.equal(seen, torch.ones_like(seen).tril())
    attn_mask = None if causal or bool(seen.all()) else seen

    def sdpa_call(backend: SDPBackend) -> Call:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    *qkv,
                    attn_mask=attn_mask,
                    dropout_p=params.get("dropout_p", 0.0),
                    is_causal=causal,
                    scale=plan.scale,
                )

        return call

    for name in SDPA_BACKENDS:
        backend = getattr(SDPBackend, name)
        yield f"SDPA {name.removesuffix('_ATTENTION').lower()}", partial(sdpa_call, backend)


def _flex_call(plan: KernelPlan, qkv: Inputs, seen: torch.Tensor, params: dict[str, Any]) -> Call:
    """FlexAttention compiled for these shapes, its BlockMask made from the same predicate.

    Raises:
        FlashgenError: a normaliser that FlexAttention does not have, or dropout.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if plan.spec.normaliser != softmax():
        raise FlashgenError(f"it has no {plan.spec.normaliser}")
    if plan.dropout:
        raise FlashgenError("it has no dropout")
    length = seen.shape[-1]
    values = {**params, "q_len": length, "kv_len": length}
    values |= {constant.name: constant.tensor(seen.device) for constant in plan.spec.constants}
    block_mask = None
    if plan.masks:
        batch, heads = (1, 1, *seen.shape)[-4:-2]
        block_mask = create_block_mask(
            torch_mask_mod(plan, values), batch, heads, length, length, seen.device
        )
    score_mod = torch_score_mod(plan, values) if plan.score_torch else None
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*qkv, score_mod=score_mod, block_mask=block_mask, scale=plan.scale)


def torch_mask_mod(plan: KernelPlan, values: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The plan's predicate as a mask_mod of plain torch, for given lengths and parameters."""
    source = " & ".join(f"({term})" for term in plan.mask_torch)
    return _function(f"lambda b, h, q_idx, kv_idx: {source}", values)


def torch_score_mod(plan: KernelPlan, values: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The plan's score function as a score_mod of plain torch, likewise."""
    return _function(f"lambda scores, b, h, q_idx, kv_idx: {plan.score_torch}", values)


def _function(source: str, values: dict[str, Any]) -> Callable[..., torch.Tensor]:
    import torch

    names = {"torch": torch, "math": math, "dtype": torch.float32}
    function: Callable[..., torch.Tensor] = eval(source, {**names, **values})
    return function


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)

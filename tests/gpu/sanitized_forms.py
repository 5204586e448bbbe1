"""Both passes of every form once on small tensors: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python tests/gpu/sanitized_forms.py [FOLDER]

A program of its own, from the root of the repository, with tests/ on PYTHONPATH. What is right is
what the same modules give on the CPU. Modules are copied into the folder, if one is given. It
prints a line for each call, and `FINISHED` at the end.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    alibi,
    causal,
    chosen_blocks,
    elu_plus_one,
    identity,
    linear,
    sliding_window,
    softmax,
)
from gpu.sanitized import FINISHED, TOLERANCE
from support.cached import CacheCall, cached
from support.packed import offsets
from support.variants import rendered_module

#: The device under test; "cpu" tries the program itself.
DEVICE = os.environ.get("SANITIZED_DEVICE", "cuda")

SLOPES, SINKS = Tensor("slopes", ("num_q_heads",)), Tensor("sinks", ("num_q_heads",))
IMG = Tensor("img", ("batch", "kv_len"), "int32")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 64))


def _islands(b, h, q, kv):  # type: ignore[no-untyped-def]
    return (kv <= q) | ((IMG[b, q] == IMG[b, kv]) & (IMG[b, q] > 0))


SPECS = {
    "causal_d64": AttentionSpec(64, mask=causal()),
    "causal_d128": AttentionSpec(128, mask=causal()),
    "causal_d192": AttentionSpec((192, 128), mask=causal()),
    "learned_d64": AttentionSpec(
        64, mask=causal(), score=alibi(SLOPES), normaliser=softmax(sink=SINKS)
    ),
    "islands_d128": AttentionSpec(128, mask=Mask(_islands, "islands", equal_lengths=True)),
    "chosen_d128": AttentionSpec(128, mask=chosen_blocks() & causal()),
    "varlen_d128": AttentionSpec(128, mask=causal(), forms=("dense", "varlen")),
    "window_d64": AttentionSpec(
        64,
        mask=sliding_window(100, 0),
        align="bottom_right",
        forms=("dense", "varlen", "cache"),
    ),
    "cache_d128": AttentionSpec(128, mask=causal(align="bottom_right"), forms=("dense", "cache")),
    "decided_d128": AttentionSpec(
        128,
        mask=Mask(lambda b, h, q, kv: (kv <= q) & (IMG[b, q] == IMG[b, kv]), "ids"),
        align="bottom_right",
        forms=("dense", "cache"),
    ),
    "elu_d64": AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one())),
    "gla_d64": AttentionSpec(
        64, mask=causal(), normaliser=linear(identity(), decay=DECAY, normalise=False)
    ),
}

Tensors = list[torch.Tensor]


@functools.cache
def module_of(name: str) -> ModuleType:
    """A form's module, with the Gluon kernels that it can have."""
    module = rendered_module(SPECS[name], name=name, hopper=True)
    for folder in sys.argv[1:]:
        shutil.copy(str(module.__file__), folder)
    return module


def normal(device: str, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Drawn on the CPU, as the next numbers of its generator."""
    return torch.randn(*sizes).to(device, dtype)


def with_gradients(call: Callable[..., torch.Tensor], leaves: Tensors, device: str) -> Tensors:
    """The output and the gradients of these."""
    leaves = [x.requires_grad_() for x in leaves]
    out = call()
    grads = torch.autograd.grad(out, leaves, normal(device, *out.shape, dtype=out.dtype))
    return [out.detach(), *grads]


def dense(name: str, device: str, length: int, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """Both passes of one sequence, with what the module declares."""
    width, v_width = SPECS[name].qk_head_dim, SPECS[name].v_head_dim
    q = normal(device, 1, heads, length, width)
    k, v = (normal(device, 1, kv_heads, length, x) for x in (width, v_width))
    given, learned = {}, list[torch.Tensor]()
    if name == "learned_d64":
        # Gentle slopes: weights of a few keys would leave the gradient to rounding.
        learned = [0.1 * normal(device, heads, dtype=torch.float32).abs() for _ in range(2)]
        given = dict(zip(("slopes", "sinks"), learned, strict=True))
    if name == "islands_d128":
        at = torch.arange(length)
        given = {"img": (at // 50 % 3 * (at // 50 % 2)).int()[None].to(device)}
    if name == "chosen_d128":
        lists = torch.arange(-(-length // 64), dtype=torch.int32, device=device)
        entries = torch.stack([lists, lists // 2], -1)
        given = {"chosen": entries.expand(1, kv_heads, *entries.shape).contiguous()}
    if name == "gla_d64":
        learned = [-normal(device, 1, kv_heads, length, width, dtype=torch.float32).abs()]
        given = {"decay": learned[0]}
    attention = functools.partial(module_of(name).attention, q, k, v, **given)
    return with_gradients(attention, [q, k, v, *learned], device)


def varlen(name: str, device: str) -> Tensors:
    """Both passes of packed sequences; padding of NaN behind them."""
    lens, width = (130, 0, 1, 70), SPECS[name].qk_head_dim
    end = sum(lens)
    q, k, v = (normal(device, end + 5, heads, width) for heads in (4, 2, 2))
    for x in (q, k, v):
        x[end:] = torch.nan
    begins = offsets(lens, device)

    def call() -> torch.Tensor:
        out: torch.Tensor = module_of(name).varlen_attention(
            q, k, v, begins, begins, max(lens), max(lens)
        )
        return out[:end]

    found = with_gradients(call, [q, k, v], device)
    return [found[0], *(x[:end] for x in found[1:])]


#: Rows, pages with parts of the keys, few queries, and as many as the Gluon kernel takes.
CACHES = (
    CacheCall((1, 300, 0, 129)),
    CacheCall((4, 500, 63, 150), 4, heads=8, kv_heads=2, page_size=16, num_splits=3),
    CacheCall((40, 300, 65), (3, 0, 40), page_size=64, padding=5),
    CacheCall((200, 330), 200, heads=8, kv_heads=2, page_size=64),
)


def cache(name: str, device: str, number: int) -> Tensors:
    """A step over a cache."""
    call, spec = CACHES[number], SPECS[name]
    if name == "decided_d128":
        at, entry = torch.arange(call.capacity), torch.arange(len(call.kv_lens))[:, None]
        call = CacheCall(**(vars(call) | {"params": {"img": ((at + entry) // 90 % 2).int()}}))
    given = cached(call, spec, torch.bfloat16, device).arguments
    with torch.no_grad():
        out: torch.Tensor = module_of(name).cache_attention(**given)
    return [out[: sum(call.lengths)] if call.packed else out]


def append(device: str) -> Tensors:
    """Keys and values are written into pages."""
    k_cache, v_cache = (normal(device, 9, 16, 2, 128) for _ in range(2))
    k_new, v_new = (normal(device, 2, 5, 2, 128) for _ in range(2))
    table = torch.tensor([[3, 1, 7], [0, 8, 2]], dtype=torch.int32, device=device)
    lens = torch.tensor([37, 21], dtype=torch.int32, device=device)
    module_of("cache_d128").append(k_new, v_new, k_cache, v_cache, lens, table)
    return [k_cache, v_cache]


CALLS: dict[str, Callable[[str], Tensors]] = {
    **{
        f"{name}, {length}": functools.partial(dense, name, length=length)
        for name in ("causal_d64", "causal_d128", "causal_d192", "learned_d64", "islands_d128")
        for length in (1, 200)
    },
    "chosen_d128": functools.partial(dense, "chosen_d128", length=300, heads=16, kv_heads=2),
    "elu_d64": functools.partial(dense, "elu_d64", length=200),
    "gla_d64": functools.partial(dense, "gla_d64", length=200),
    **{
        f"{name}, packed": functools.partial(varlen, name) for name in ("varlen_d128", "window_d64")
    },
    **{
        f"{name}, cache {number}": functools.partial(cache, name, number=number)
        for name in ("cache_d128", "window_d64", "decided_d128")
        for number in range(len(CACHES))
    },
    "append": append,
}


def wrong(name: str) -> list[str]:
    """What differs between a call on the device and the same one on the CPU, by relative error.

    Gradients that are 0, such as those of a single query and key, hold what rounding leaves: a
    result counts as if its elements were a hundredth at least, of inputs around 1.
    """
    found = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        found.append([x.detach().cpu().double() for x in CALLS[name](device)])
    problems = []
    for number, (mine, right) in enumerate(zip(*found, strict=True)):
        if not torch.equal(mine.isnan(), right.isnan()):
            problems.append(f"{name}: result {number} is NaN elsewhere")
        mine, right = mine.nan_to_num(), right.nan_to_num()
        error = float((mine - right).norm() / right.norm().clamp(min=1e-2 * right.numel() ** 0.5))
        print(f"{name}: error {error:.1e}", flush=True)
        if not error < TOLERANCE:
            problems.append(f"{name}: result {number} is off by {error:.1e}")
    return problems


if __name__ == "__main__":
    problems = [problem for name in CALLS for problem in wrong(name)]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("\n".join(problems) or FINISHED)
    sys.exit(bool(problems))

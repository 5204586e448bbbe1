"""Both kernels of several modules once on small tensors: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python tests/gpu/sanitized.py

A program of its own, from the root of the repository. It prints a line for each launch, and
`FINISHED` at the end. The work of torch on the GPU is kept small: the tensors and the expected
values are made on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

FINISHED = "every launch is done and right"
TOLERANCE = 2e-2  # relative, Frobenius norm: bfloat16 gives 0.004


@dataclass(frozen=True)
class Launch:
    """A call of a module: queries and keys of one length, and its parameters.

    Attributes:
        module: of generated/.
        length: no multiple of any tile, so that the last one is ragged.
        kv_heads: of two or four query heads.
        q_heads: more than kv_heads where heads are grouped.
        parameters: of the module's kernel, in the order of its `_launch`.
    """

    module: str
    length: int
    q_heads: int = 2
    kv_heads: int = 2
    parameters: Callable[[int], tuple[Any, ...]] = lambda length: ()


def _documents(length: int) -> tuple[torch.Tensor]:
    """Documents of 70 tokens, on the GPU."""
    return ((torch.arange(length, dtype=torch.int32) // 70)[None].cuda(),)


LAUNCHES = (
    Launch("causal_d64", 200, q_heads=4),
    Launch("causal_d128", 129),
    Launch("causal_d128", 200, q_heads=4),
    Launch("causal_d128", 1),
    Launch("causal_d256", 129),
    Launch("full_d128", 200),
    Launch("full_d64", 129),
    Launch("window_d128", 200, parameters=lambda length: (40,)),
    Launch("documents_d128", 200, parameters=_documents),
    Launch("documents_d128", 1, parameters=_documents),
    Launch("sink_window_d128", 200, parameters=lambda length: (4, 40)),
    Launch("softcap_d128", 129, parameters=lambda length: (30.0,)),
)


def kernels(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Those that a module has for this GPU: name, launcher and configuration."""
    major, minor = torch.cuda.get_device_capability()
    yield "portable", module._launch, module.CONFIGS[f"sm_{major}{minor}"]
    if hasattr(module, "HOPPER_CONFIG") and (major, minor) == (9, 0):
        yield "hopper", module._launch_hopper, module.HOPPER_CONFIG


def run(launch: Launch) -> None:
    """Launches a module's kernels, and compares with its reference on the CPU.

    Raises:
        AssertionError: a result is wrong.
    """
    module = importlib.import_module(f"generated.{launch.module}")
    head_dim = int(launch.module.rpartition("_d")[2])
    torch.manual_seed(0)

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, launch.length, head_dim).bfloat16()

    inputs = tensor(launch.q_heads), tensor(launch.kv_heads), tensor(launch.kv_heads)
    given = launch.parameters(launch.length)
    there = [x.cpu() if isinstance(x, torch.Tensor) else x for x in given]
    names = module._launch.__code__.co_varnames[4 : 4 + len(given)]
    expected = module.reference(
        *(x.float() for x in inputs), **dict(zip(names, there, strict=True))
    )
    for form, kernel, config in kernels(module):
        out, _ = kernel(*(x.cuda() for x in inputs), head_dim**-0.5, *given, config)
        out = out.cpu().float()
        error = float((out - expected).norm() / expected.norm())
        print(f"{launch.module} {form} N={launch.length}: error {error:.1e}", flush=True)
        assert error < TOLERANCE


if __name__ == "__main__":
    for launch in LAUNCHES:
        run(launch)
    torch.cuda.synchronize()
    print(FINISHED)

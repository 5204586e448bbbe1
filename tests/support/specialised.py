"""What Triton would compile for the calls of a module, found without a GPU or a compiler."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)

#: SMs of the GPU that stands in for one.
NUM_SMS = 132


class Specialisations:
    """Stands in for a kernel: launches nothing, and notes what each launch asks Triton for.

    Attributes:
        keys: the different kernels that the launches so far need; Triton's own keys.
        grids: the grid of each launch.
        arguments: what each launch passes, by the names in the kernel's signature.
    """

    def __init__(self, kernel: Any) -> None:
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(HOPPER)
        )
        self._key_cache: dict[Any, str] = {}
        self.keys: set[str] = set()
        self.grids: list[tuple[int, ...]] = []
        self.arguments: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        bound, specialization, options = self._bind(*args, **kwargs)
        self.arguments.append(dict(bound))
        self.keys.add(compute_cache_key(self._key_cache, specialization, options))


def watch(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, kernel: str = "_attention_forward"
) -> Specialisations:
    """Puts a note-taker in the place of one of a module's kernels."""
    watched = Specialisations(getattr(module, kernel))
    monkeypatch.setattr(module, kernel, watched)
    return watched


def watch_hopper(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Specialisations:
    """The same of the Gluon kernel, with a Hopper GPU made of the CPU."""
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)
    monkeypatch.setattr(module, "_num_sms", lambda device: NUM_SMS)
    monkeypatch.setattr(module, "_is_elsewhere", lambda x: False)
    if hasattr(module, "_counter"):
        counter = torch.zeros(1, dtype=torch.int32)
        monkeypatch.setattr(module, "_counter", lambda device: counter)
    return watch(module, monkeypatch, "_attention_hopper")

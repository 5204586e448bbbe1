"""What Triton would compile for the calls of a module, found without a GPU or a compiler."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)


class Specialisations:
    """Stands in for a kernel: launches nothing, and notes what each launch asks Triton for.

    Attributes:
        keys: the different kernels that the launches so far need; Triton's own keys.
    """

    def __init__(self, kernel: Any) -> None:
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(HOPPER)
        )
        self._key_cache: dict[Any, str] = {}
        self.keys: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        _, specialization, options = self._bind(*args, **kwargs)
        self.keys.add(compute_cache_key(self._key_cache, specialization, options))


def watch(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Specialisations:
    """Puts a note-taker in the place of a module's kernel."""
    watched = Specialisations(module._attention_forward)
    monkeypatch.setattr(module, "_attention_forward", watched)
    return watched

"""The sweep runs kernels in Triton's interpreter: see `support.sessions`."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "tests/sweep has a session of its own: ask for it alone, or for all"
        )
    os.environ["TRITON_INTERPRET"] = "1"
# A tile is too small to share between threads: they would only wait for one another.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import torch  # noqa: E402  (numpy reads these variables)

from support.gluon.memory import poison  # noqa: E402
from sweep.interpreter import quicken  # noqa: E402
from sweep.kept import keep_launches  # noqa: E402

quicken()
keep_launches()


@pytest.fixture(autouse=True)
def the_same_course_each_time() -> None:
    """Whatever ran before it, a test of Gluon kernels sees their roles take the same turns."""
    from support.gluon import start_over

    start_over()


@pytest.fixture(autouse=True)
def new_memory_holds_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write gives itself away, also where it was right a call before."""
    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(home, name, _poisoned(getattr(home, name)))


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        x = function(*args, **options)
        poison(x)
        return x

    return made

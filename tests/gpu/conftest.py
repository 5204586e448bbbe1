"""The kernels of a module, one after the other; and what a lost GPU takes with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gpu.launch import on_hopper


@pytest.fixture
def hopper() -> None:
    """Skips a test of the Gluon kernel where the GPU is of another kind."""
    if not on_hopper():
        pytest.skip("the Gluon kernel needs a Hopper GPU")


@pytest.fixture(params=["hopper", "portable"])
def form(request: pytest.FixtureRequest) -> str:
    """Which of them a test is about; the Gluon kernel where the GPU is of Hopper."""
    if request.param == "hopper":
        request.getfixturevalue("hopper")
    return str(request.param)


@pytest.fixture(autouse=True)
def only_one_test_is_lost_with_the_gpu() -> Iterator[None]:
    """After an assertion or a fault on the GPU every call of this process fails, so it ends here.

    pytest-xdist starts another worker in its place.
    """
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"the GPU is lost to this process: {lost}", returncode=1)

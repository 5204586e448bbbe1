"""The kernels of a module, one after the other."""

from __future__ import annotations

import pytest

from gpu.launch import on_hopper


@pytest.fixture(params=["hopper", "portable"])
def form(request: pytest.FixtureRequest) -> str:
    """Which of them a test is about; the Gluon kernel where the GPU is of Hopper."""
    if request.param == "hopper" and not on_hopper():
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    return str(request.param)

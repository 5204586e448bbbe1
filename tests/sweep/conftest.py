"""The sweep runs kernels in Triton's interpreter, which a process chooses before it imports Triton.

TRITON_INTERPRET=1 pytest tests/sweep
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "tests/sweep runs in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/sweep"
    )
# A tile is too small to share between threads: they would only wait for one another.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

from sweep.interpreter import quicken  # noqa: E402  (numpy reads these variables)

quicken()


@pytest.fixture(autouse=True)
def the_same_course_each_time() -> None:
    """Whatever ran before it, a test of Gluon kernels sees their roles take the same turns."""
    from support.gluon import start_over

    start_over()

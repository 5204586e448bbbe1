"""Where tests have flashgen keep the modules that it builds for calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: A folder that all processes and sessions of a run of checks share: `.ci` makes a new one.
VARIABLE = "FLASHGEN_SHARED_TEST_CACHE"


@contextmanager
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of a file's own, or that of the run: what is there is of the same sources."""
    folder = os.environ.get(VARIABLE) or str(tmp_path_factory.mktemp("cache") / "flashgen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", folder)
        yield

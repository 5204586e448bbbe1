"""What tests of integrations share: a cache of their own, and no variants at first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.integrations import variants
from support import caches


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with caches.own_cache(tmp_path_factory):
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant is known yet."""
    monkeypatch.setattr(variants, "_families", {})

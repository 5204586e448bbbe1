"""What tests of integrations share: a cache of their own, and no variants at first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.integrations import variants


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of a file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "flashgen"))
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant is known yet."""
    monkeypatch.setattr(variants, "_families", {})

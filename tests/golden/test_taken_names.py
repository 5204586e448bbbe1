"""The list of names that no parameter can take is that of what modules bind.

pytest tests/golden --update-golden
"""

from __future__ import annotations

import json

import pytest

from flashgen.codegen.names import FILE
from support.taken_names import CACHING, DROPPING, EVERYTHING, taken_by


def test_taken_names(request: pytest.FixtureRequest) -> None:
    always = taken_by(EVERYTHING)
    found = {"always": sorted(always)}
    for kind, specs in (("dropout", DROPPING), ("cache", CACHING)):
        found[kind] = sorted(taken_by(specs) - always)
    text = json.dumps(found, indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        FILE.write_text(text)
    assert text == FILE.read_text(), f"review with git diff after --update-golden: {FILE.name}"

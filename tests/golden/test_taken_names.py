"""The list of names that no parameter can take is that of what modules bind.

pytest tests/golden --update-golden
"""

from __future__ import annotations

import json

import pytest

from flashgen.codegen.names import FILE
from support.taken_names import (
    CACHING,
    DROPPING,
    EVERYTHING,
    OVER_PAIRS,
    PACKED,
    fixed_by,
    taken_by,
)


def test_taken_names(request: pytest.FixtureRequest) -> None:
    always = taken_by(EVERYTHING)
    dropping = taken_by(DROPPING) - always
    found = {
        "always": sorted(always),
        "dropout": sorted(dropping),
        "varlen": sorted(taken_by(PACKED) - always - dropping),
        "cache": sorted(taken_by(CACHING) - always),
        "products": sorted(taken_by(OVER_PAIRS) - always),
        "fixed": sorted(fixed_by((*EVERYTHING, *DROPPING, *PACKED, *CACHING))),
    }
    text = json.dumps(found, indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        FILE.write_text(text)
    assert text == FILE.read_text(), f"review with git diff after --update-golden: {FILE.name}"

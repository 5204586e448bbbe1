"""docs/versions.md shows what docs/versions.json records."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from docs import make_versions
from flashgen.codegen.module import render_module
from flashgen.config import KernelChoice
from support.variants import any_configs, shipped_plan

ROOT = Path(__file__).parents[2]
RECORD = json.loads(make_versions.RECORD.read_text())


def test_the_table_is_made_of_the_record() -> None:
    assert make_versions.page() == make_versions.PAGE.read_text(), "python -m docs.make_versions"


def test_shared_memory_is_predicted_for_each() -> None:
    for modules in RECORD.values():
        for kernels in modules.values():
            for figures in kernels.values():
                assert figures["shared"] == figures["predicted"]


def test_an_unequal_figure_is_shown() -> None:
    figures = [{"shared": 1000, "predicted": 1000}, {"shared": 996, "predicted": 1000}]
    shown = make_versions.shared(figures, ["3.6.0", "3.9.0"])
    assert shown == "996; 1,000 in 3.6.0; predicted 1,000 for 3.9.0"


def test_every_minor_version_is_recorded_that_a_launch_knows() -> None:
    plan = shipped_plan("full_d64")
    module = render_module(plan, {"portable": KernelChoice(any_configs(plan))})
    minors = [".".join(version.split(".")[:2]) for version in RECORD]
    known = ", ".join(f'"{minor}"' for minor in minors)
    assert f"if version not in ({known}):" in module


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = (f"3.{version.split('.')[1]}" for version in (min(RECORD), max(RECORD)))
    assert (oldest, newest) == ("3.6", "3.9")
    assert f"triton>={oldest},<4" in project["dependencies"]

"""Modules of variants that nobody thought of are formatted and lint clean, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.combined import combined
from support.variants import ROOT, any_hopper, any_hopper_backward, rendered

RUNS, A_RUN = 8, 8


@pytest.mark.parametrize("run", range(RUNS))
def test_modules_are_as_ruff_wants_them(run: int, tmp_path: Path) -> None:
    for number in range(run * A_RUN, (run + 1) * A_RUN):
        variant = combined(number)
        plan = variant.plan
        text = rendered(plan, any_hopper(plan), any_hopper_backward(plan))
        (tmp_path / f"{plan.name}.py").write_text(text)
    for command in (["check", "--output-format=concise"], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "-q", "--no-cache",
             f"--config={ROOT / 'pyproject.toml'}", str(tmp_path)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

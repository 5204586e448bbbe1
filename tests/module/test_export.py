"""Programs that are exported beside one build of a module, and run beside another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Int, sliding_window
from support.cases import Case
from support.contract import native_inputs
from support.variants import import_file, lowered, rendered

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

NAME = "exported_variant"
RUN = """
import sys, warnings
import torch
warnings.simplefilter("ignore")
{imports}
tensors, right = torch.load(sys.argv[2])
out = {load}(*tensors)
torch.testing.assert_close(out, right, rtol=0, atol=0)
"""
EXPORTED = "torch.export.load(sys.argv[1]).module()"
PACKAGED = "torch._inductor.aoti_load_package(sys.argv[1])"


def _spec(*targets: str) -> AttentionSpec:
    mask = sliding_window(Int("left", 3), 0, align="bottom_right")
    if not targets:
        return AttentionSpec(16, "float32", mask=mask)
    return AttentionSpec(16, "float32", mask=mask, targets=targets)


def _file(folder: Path, spec: AttentionSpec) -> Path:
    """A module in a folder."""
    folder.mkdir()
    file = folder / f"{NAME}.py"
    file.write_text(rendered(lowered(spec, NAME)))
    return file


class Exported:
    """A program of a layer with a module for some GPUs, and a folder with one for others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        module = import_file(_file(folder / "here", _spec()))
        _file(folder / "there", _spec("sm_80"))

        class Layer(torch.nn.Module):
            def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return 2 * module.attention(q, k, v, left=4)

        length = torch.export.Dim("length", min=2, max=4096)
        case = Case(10, 10, batch=2, q_heads=4, kv_heads=2)
        tensors = native_inputs(case, _spec())
        shapes = ({2: length}, {2: length}, {2: length})
        self.program = torch.export.export(Layer(), tensors, dynamic_shapes=shapes)
        tensors = native_inputs(Case(37, 37, batch=2, q_heads=4, kv_heads=2), _spec())
        torch.save((tensors, Layer()(*tensors)), folder / "tensors.pt")

    def run(self, file: Path, load: str, imports: str) -> Any:
        """Runs it in a process of its own, beside the other module."""
        script = RUN.format(load=load, imports=imports)
        return subprocess.run(
            [sys.executable, "-c", script, str(file), str(self.folder / "tensors.pt")],
            env={**os.environ, "PYTHONPATH": str(self.folder / "there")},
            capture_output=True,
            text=True,
        )


def test_a_program_runs_beside_another_build(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    file = tmp_path / "program.pt2"
    torch.export.save(exported.program, file)
    done = exported.run(file, EXPORTED, f"import {NAME}")
    assert done.returncode == 0, done.stderr
    # Without a module there is no operator, and torch says which one it looked for.
    alone = exported.run(file, EXPORTED, "")
    assert alone.returncode != 0
    assert re.search(rf"torch\.ops\.flashgen\.{NAME}_[0-9a-f]{{8}}\.default", alone.stderr)


@pytest.mark.full
def test_so_does_a_package_that_inductor_compiled(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    file = tmp_path / "package.pt2"
    torch._inductor.aoti_compile_and_package(exported.program, package_path=str(file))
    done = exported.run(file, PACKAGED, f"import {NAME}")
    assert done.returncode == 0, done.stderr
    alone = exported.run(file, PACKAGED, "")
    assert re.search(rf"Could not find schema for flashgen::{NAME}_[0-9a-f]{{8}}", alone.stderr)

"""flashgen export: a wheel that pip installs, and a folder that `kernels` loads."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli import app, main
from flashgen.export import VARIANT, Package, export_hub, export_wheel
from support.variants import ROOT

OUT = ROOT / "generated"
CALL = """
q = torch.randn(1, 2, 40, 64, dtype=torch.bfloat16)
out, lse = {module}.attention(q, q, q, return_lse=True)
assert out.shape == q.shape and lse.shape == q.shape[:3] and bool(lse.isfinite().all())
"""


def run(program: str, path: Path | None = None) -> None:
    """Runs a program in a process of its own, in which flashgen must not be imported."""
    program += "\nimport sys\nassert 'flashgen' not in sys.modules\n"
    environment = {**os.environ, "PYTHONPATH": str(path) if path else ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_a_wheel_is_installed_and_imported_without_flashgen(tmp_path: Path) -> None:
    package = Package(["full_d64", "causal_d64"], OUT, "my-attention", "0.2")
    wheel = export_wheel(package, tmp_path)
    assert wheel.name == "my_attention-0.2-py3-none-any.whl"
    again = export_wheel(replace(package, modules=["causal_d64", "full_d64"]), tmp_path / "b")
    assert again.read_bytes() == wheel.read_bytes()
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    described = (site / "my_attention-0.2.dist-info" / "METADATA").read_text()
    needed = [x for x in described.splitlines() if x.startswith(("Requires", "License"))]
    assert needed == [
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "Requires-Dist: torch<3,>=2.11",
        "Requires-Dist: triton<4,>=3.6",
    ]
    text = (site / "my_attention" / "causal_d64.py").read_text()
    assert text == (OUT / "causal_d64.py").read_text()
    module = CALL.format(module="causal_d64")
    run(f"import torch\nfrom my_attention import causal_d64, full_d64\n{module}", site)


def test_hugging_faces_loader_opens_the_folder_without_flashgen(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["export", "--hub", str(tmp_path), "--name", "my-attention", "--out", str(OUT), "full_d64"],
    )
    assert result.output == f"{tmp_path / VARIANT}\n"
    run(
        "from pathlib import Path\nimport torch\nfrom kernels import get_local_kernel\n"
        f"kernel = get_local_kernel(Path({str(tmp_path)!r}))\n"
        "assert kernel.__name__.startswith('_my_attention_')\n"
        + CALL.format(module="kernel.full_d64")
    )


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    build = export_hub(Package(["causal_d64"], OUT, "mine", "1"), tmp_path)
    first = (build / "metadata.json").read_text()
    assert '"version": 1' in first
    export_hub(Package(["full_d64"], OUT, "mine", "2"), tmp_path)
    names = sorted(path.name for path in build.iterdir())
    assert names == ["__init__.py", "full_d64.py", "metadata.json"]
    assert (build / "metadata.json").read_text().split('"id"')[1] != first.split('"id"')[1]
    (build / "notes.txt").write_text("mine")
    refused = "notes.txt: not exported by flashgen, so not replaced"
    with pytest.raises(Exception, match=refused):
        export_hub(Package(["full_d64"], OUT, "mine", "3"), tmp_path)
    (build / "notes.txt").unlink()
    (build / "notes").mkdir()
    with pytest.raises(Exception, match="notes: not exported by flashgen, so not replaced"):
        export_hub(Package(["full_d64"], OUT, "mine", "3"), tmp_path)
    assert (build / "full_d64.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["full_d64", "--name", "a"], "export: nowhere to; pass --hub DIR, --wheel DIR, or both"),
        (
            ["full_d64", "--name", "a", "--hub", "k", "--version", "1.0"],
            "--version=1.0: kernels count versions; write a whole number",
        ),
        (
            ["full_d64", "--name", "torch", "--wheel", "k"],
            "--name=torch: no name for a package of its own; "
            "write letters, digits and dashes, as in my-attention",
        ),
        (
            ["full_d64", "--name", "class", "--wheel", "k"],
            "--name=class: no name for a package of its own; "
            "write letters, digits and dashes, as in my-attention",
        ),
        (
            ["folder/full_d64", "--name", "a", "--hub", "k"],
            "folder/full_d64: not a module's name; write it without folder and ending",
        ),
        (
            ["gone", "--name", "a", "--hub", "k"],
            "gone.py: missing; build it, or name its folder with --out",
        ),
        (
            ["edited", "--name", "a", "--hub", "k"],
            "edited.py: damaged or edited by hand; build it again",
        ),
        (
            ["full_d64", "--name", "a", "--wheel", "k", "--version", "one"],
            "--wheel: hatchling builds none: ValueError: Invalid version `one`",
        ),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (OUT / "full_d64.py").read_text()
    (tmp_path / "full_d64.py").write_text(text)
    (tmp_path / "edited.py").write_text(text + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full_d64.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["export", "--out", ".", *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "k").exists()

"""Versions of modules beside one another, on the CPU: what is loaded, measured and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, attentions, cells, record, versions
from benchmarks.passes import BACKWARD_PASS, FORWARD_PASS

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "generated"
CPU = torch.device("cpu")
TWICE = """_once = _forward


def _forward(*given):
    out, lse = _once(*given)
    return 2 * out, lse
"""
ENVIRONMENT = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of 64 tokens of two heads, each timed at once."""
    monkeypatch.setattr(cells, "TOKENS", 64)
    monkeypatch.setattr(cells, "WIDTH", 256)
    monkeypatch.setattr(attentions, "WINDOW", 5)
    monkeypatch.setattr(accuracy, "ROWS", 9)
    monkeypatch.setattr(record, "target", lambda: "sm_90")
    monkeypatch.setattr(versions, "sees_gpu", lambda name: True)
    monkeypatch.setattr(versions, "environment", lambda device: ENVIRONMENT)
    monkeypatch.setattr(versions.torch, "device", lambda name: CPU)


def folder_of(tmp_path: Path, name: str, end: str) -> Path:
    """A folder with one shipped module, which has another end."""
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / f"{name}.py").write_text(f"{(GENERATED / f'{name}.py').read_text()}\n\n{end}")
    return folder


def clock(*times: float):
    """A timer that makes each call, and says that it took these times in turn."""
    left = list(times)

    def time_ms(call):
        call()
        return left.pop(0)

    return time_ms


@pytest.mark.filterwarnings("ignore:.*eager reference")
def test_each_version_has_operators_of_its_own(tmp_path: Path) -> None:
    """Of two modules whose operators have one name, the first one's would run for both."""
    changed = folder_of(tmp_path, "causal_d64", TWICE)
    before, after = (
        versions.load_version(label, folder, "causal_d64", tmp_path)
        for label, folder in {"before": GENERATED, "after": changed}.items()
    )
    q = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16)
    out, doubled = (module.op(q, q, q, 0.1)[0] for module in (before, after))
    assert torch.equal(doubled, 2 * out)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:.*eager reference")
@pytest.mark.parametrize("which", [FORWARD_PASS, BACKWARD_PASS], ids=lambda which: which.name)
def test_they_are_measured_and_shown(
    which, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = folder_of(tmp_path, "causal_d128", "# No more.\n")
    monkeypatch.setattr(versions, "TIMERS", {"ms": clock(1e-4, 2e-4, 4e-4, 2e-4)})
    file = tmp_path / "versions.json"
    asked = [f"before={GENERATED}", f"after={changed}", "--modules", "causal_d128"]
    asked += ["--lengths", "32", "--pass", which.name, "--json", str(file)]
    asked += ["--inputs", "scaled:3"]
    assert versions.main(asked) == 0
    document = json.loads(file.read_text())
    [row] = document["cells"]
    # In reverse order the second time.
    assert row["ms"] == {"before": [1e-4, 2e-4], "after": [2e-4, 4e-4]}
    assert set(row["error"]) == {"before", "after"} == set(row["kernels"])
    # Whoever edits a file by hand has another kernel than its digest says.
    kernels = row["kernels"]
    assert len(kernels["before"].pop("kernel")) == 64 and kernels["after"].pop("kernel") is None
    assert kernels["before"] == kernels["after"]
    # 2 sequences x 2 heads x 528 pairs x 4 x 128 FLOPs in 100 ns, 2.5 times as many backward.
    full, half, quarter = (2 * 2 * 528 * 4 * 128 * which.work / ns / 1e3 for ns in (100, 200, 400))
    shown = capsys.readouterr().out
    assert f"TFLOP/s of the {which.name} pass, inputs scaled:3, the repetitions" in shown
    assert row["inputs"] == "scaled:3"
    rates = f"{full:.0f} {half:.0f} | {half:.0f} {quarter:.0f}"
    assert f"| causal_d128 S=32 | {rates} | 0.500 |" in shown


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:.*eager reference")
def test_a_version_that_is_wrong_is_named_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = folder_of(tmp_path, "window_d128", TWICE)
    monkeypatch.setattr(versions, "TIMERS", {"ms": clock(1.0)})
    asked = [f"a={GENERATED}", f"b={changed}", "--modules", "window_d128"]
    assert versions.main([*asked, "--lengths", "32", "--repeat", "1"]) == 1
    shown = capsys.readouterr().out
    assert "- window_d128 S=32, b: ValueError: wrong output" in shown


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["a=generated", "--modules", "full_d64"], "at least two folders"),
        (["a=generated", "a=generated", "--modules", "full_d64"], "a label of its own"),
        (["generated", "b=generated", "--modules", "full_d64"], "generated: not LABEL=FOLDER"),
        (["a=nowhere", "b=generated", "--modules", "full_d64"], "a=nowhere: not LABEL=FOLDER"),
        (["a=generated", "b=docs", "--modules", "full_d64"], "b=docs: has no full_d64.py"),
        (
            ["a=generated", "b=generated", "--modules", "window_d128", "--pass", "sideways"],
            "invalid choice: 'sideways'",
        ),
        (
            ["a=generated", "b=generated", "--modules", "chunked_d128", "--pass", "backward"],
            "no cell of the backward pass measures chunked_d128",
        ),
        (["a=generated", "b=generated", "--modules", "full_d64", "--lengths", "0"], "0 is not"),
        (["a=generated", "b=generated", "--modules", "full_d64", "--repeat", "0"], "at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(
    asked: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        versions.main(asked)
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert versions.main([f"a={GENERATED}", f"b={GENERATED}", "--modules", "full_d64"]) == 2
    assert "torch sees none" in capsys.readouterr().err

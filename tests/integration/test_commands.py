"""Commands of flashgen beside builds, what they say of errors, and what a shell completes."""

import os
import subprocess
import sys

import pytest

from flashgen.publish import FIRST_LINE


def test_list(flashgen, project):
    assert flashgen("list") == (0, ["no generated modules in generated"])
    flashgen("build", "specs")
    status, lines = flashgen("list")
    assert status == 0
    assert [line.split() for line in lines if line.strip()][2] == ["tiny", "whole", "none"]
    (project / "generated" / "tiny.py").write_text(FIRST_LINE)
    assert [line.split() for line in flashgen("list")[1] if line.strip()][2] == [
        "tiny", "damaged", "or", "edited", "none",
    ]  # fmt: skip


def test_clean_removes_modules_and_nothing_else(flashgen, project):
    flashgen("build", "specs")
    generated = project / "generated"
    (generated / "mine.py").write_text("X = 1\n")
    (generated / "tuning").mkdir()
    (generated / "tuning" / "tiny.json").write_text('{"results": []}\n')
    assert flashgen("clean") == (0, ["removed 1 module from generated"])
    assert {path.name for path in generated.iterdir()} == {
        "mine.py", "tuning", ".flashgen", "__init__.py",
    }  # fmt: skip


def test_python_m_flashgen():
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "flashgen 0.1.0\n"


def test_help_gives_flags_no_type(flashgen):
    status, lines = flashgen("build", "--help")
    assert status == 0
    assert "--force Build and measure again what is up to date." in " ".join(
        word for line in lines for word in line.split()
    )


@pytest.mark.parametrize(("no_color", "red"), [("", True), ("1", False)])
def test_errors_are_red_in_a_terminal_unless_it_is_not_wanted(project, no_color, red):
    terminal, end = os.openpty()
    environment = {**os.environ, "NO_COLOR": no_color}
    command = [sys.executable, "-m", "flashgen", "build", "missing.py"]
    done = subprocess.run(command, stderr=end, stdout=end, env=environment)
    os.close(end)
    with open(terminal, "rb") as screen:
        said = screen.read1()
    assert done.returncode == 2
    assert b"error: missing.py: no such file" in said and (b"\x1b[31m" in said) == red


def test_bench_without_a_gpu(flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.bench.detect_gpu", lambda: None)
    assert flashgen("bench", "tiny") == (
        2,
        ["error: tiny: no GPU to measure on; run bench where there is one"],
    )


def test_bench_of_an_unknown_variant(flashgen):
    assert flashgen("bench", "tyni") == (
        2,
        ["error: tyni: no spec of this name in specs; write tiny"],
    )


def test_a_shell_completes_commands_options_and_names(flashgen):
    flashgen("build", "specs")

    def completed(words):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run(
            [sys.executable, "-c", "from flashgen.cli import app; app(prog_name='flashgen')"],
            env=os.environ | asked | {"_FLASHGEN_COMPLETE": "complete_bash"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert completed("flashgen expl") == ["explain"]
    assert "--tune-seconds" in completed("flashgen build --tu")
    assert completed("flashgen build --target sm_8") == ["sm_80", "sm_86", "sm_89"]
    assert completed("flashgen build --form v") == ["varlen"]
    assert completed("flashgen bench ") == ["tiny"]
    assert completed("flashgen export --out elsewhere t") == []

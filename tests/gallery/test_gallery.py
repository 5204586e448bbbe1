"""Bad input: each spec in specs/ beside the exact lines that ``flashgen build`` answers it with.

``pytest tests/gallery --update-golden`` writes the answers anew: read what changed.
"""

from pathlib import Path

import pytest

from flashgen.cli import main

GALLERY = Path(__file__).parent
CASES = sorted(
    path.relative_to(GALLERY) for path in GALLERY.glob("specs/*") if path.suffix != ".txt"
)


@pytest.fixture
def build(tmp_path, monkeypatch, capsys):
    """Runs ``flashgen build`` in this folder; returns the lines of its answer."""
    monkeypatch.chdir(GALLERY)

    def build(*arguments, out=tmp_path / "out"):
        with pytest.raises(SystemExit) as stop:
            main(["build", *map(str, arguments), "--out", str(out)])
        answer = capsys.readouterr()
        assert stop.value.code == 2
        assert answer.out == ""
        return answer.err.replace(str(tmp_path), "TMP").splitlines()

    yield build
    assert not (tmp_path / "out").exists(), "something has been written"


def test_there_are_cases():
    assert len(CASES) > 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_bad_spec(case, build, request):
    answer = "\n".join(build(case)) + "\n"
    expected = (GALLERY / case).with_suffix(".txt")
    if request.config.getoption("--update-golden"):
        expected.write_text(answer)
    assert answer == expected.read_text()


def test_no_such_file(build):
    assert build("specs/missing.py") == [
        "error: specs/missing.py: no such file; name a spec file or a folder of them"
    ]


def test_not_a_spec_file(build):
    assert build("specs/no_spec.txt") == [
        "error: specs/no_spec.txt: not a Python file; name a spec file (*.py) or a folder of them"
    ]


def test_an_empty_folder(build, tmp_path):
    (tmp_path / "specs").mkdir()
    assert build(tmp_path / "specs") == [
        "error: TMP/specs: no spec files in this folder; name a folder of *.py specs"
    ]


def test_an_unknown_target(build, good_spec):
    assert build(good_spec, "--target", "sm_90", "--target", "h100") == [
        "error: --target=h100: unknown target; "
        "write one of sm_80, sm_86, sm_89, sm_90, sm_100, gfx942"
    ]


def test_the_output_folder_is_a_file(build, good_spec, tmp_path):
    (tmp_path / "file").write_text("")
    assert build(good_spec, out=tmp_path / "file") == [
        "error: TMP/file/good.py: cannot be read: Not a directory; choose another folder with --out"
    ]


def test_the_output_folder_cannot_be_made(build, good_spec):
    assert build(good_spec, out="/proc/nowhere") == [
        "error: /proc/nowhere/.flashgen/good.lock: cannot be written: No such file or directory; "
        "choose another folder with --out"
    ]


def test_the_output_is_a_file_of_the_users_own(build, good_spec, tmp_path):
    before = good_spec.read_text()
    assert build(good_spec, out=tmp_path) == [
        "error: TMP/good.py: not written by flashgen, so not replaced; "
        "move it away, or choose another folder with --out"
    ]
    assert good_spec.read_text() == before


@pytest.fixture
def good_spec(tmp_path):
    path = tmp_path / "good.py"
    path.write_text("from flashgen import AttentionSpec\n\nspec = AttentionSpec(head_dim=64)\n")
    return path

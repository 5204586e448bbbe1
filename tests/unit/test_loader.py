import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from flashgen.errors import SpecFileError, SpecInterruptedError
from flashgen.loader import load

SPEC = "from flashgen.spec import AttentionSpec\n"


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    """Messages name files as the user wrote them, so the tests write relative paths."""
    monkeypatch.chdir(tmp_path)


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def mistakes(*paths: str) -> list[str]:
    with pytest.raises(SpecFileError) as caught:
        load(Path(path) for path in paths)
    return str(caught.value).splitlines()


def test_one_spec_is_named_by_its_file():
    write("specs/tiny.py", SPEC + "spec = AttentionSpec(head_dim=64)")
    (variant,) = load([Path("specs/tiny.py")])
    assert (variant.name, variant.file, variant.spec.head_dim) == ("tiny", "specs/tiny.py", 64)


def test_one_spec_may_name_itself():
    write("tiny.py", SPEC + "spec = AttentionSpec(head_dim=64, name='other')")
    assert [variant.name for variant in load([Path("tiny.py")])] == ["other"]


def test_a_family_is_a_list_of_named_specs():
    write("family.py", SPEC + "specs = [AttentionSpec(d, name=f'full_d{d}') for d in (64, 128)]")
    assert [variant.name for variant in load([Path("family.py")])] == ["full_d64", "full_d128"]


def test_a_folder_gives_its_files_in_order_without_helpers():
    write("specs/b.py", "from _dims import D\n" + SPEC + "spec = AttentionSpec(head_dim=D)")
    write("specs/a.py", SPEC + "spec = AttentionSpec(head_dim=64)")
    write("specs/_dims.py", "D = 128")
    variants = load([Path("specs")])
    assert [(variant.name, variant.spec.head_dim) for variant in variants] == [
        ("a", 64),
        ("b", 128),
    ]


def test_a_file_named_twice_is_loaded_once():
    write("specs/a.py", SPEC + "spec = AttentionSpec(head_dim=64)")
    assert len(load([Path("specs"), Path("specs/a.py"), Path("./specs/../specs/a.py")])) == 1


@pytest.mark.parametrize("helper", ["_help.py", "_help/__init__.py", "_help/dims.py"])
def test_folders_have_helpers_of_the_same_names(helper):
    """A module, a package, and one without an __init__.py."""
    name = "from _help.dims import D\n" if "dims" in helper else "from _help import D\n"
    for folder, head_dim in (("one", 64), ("two", 128)):
        write(f"{folder}/{helper}", f"D = {head_dim}")
        write(f"{folder}/{folder}.py", name + SPEC + "spec = AttentionSpec(head_dim=D)")
    variants = load([Path("one"), Path("two")])
    assert [variant.spec.head_dim for variant in variants] == [64, 128]
    assert not [name for name in sys.modules if name.startswith("_help")]


def test_loading_leaves_nothing_behind():
    write("specs/a.py", "import _help\n" + SPEC + "spec = AttentionSpec(head_dim=64)")
    write("specs/_help.py", "")
    before = list(sys.path)
    load([Path("specs")])
    assert sys.path == before
    assert not [name for name in sys.modules if name.startswith("flashgen_spec_")]
    assert sorted(path.name for path in Path("specs").iterdir()) == ["_help.py", "a.py"]


def test_every_mistake_is_reported_at_once():
    write("specs/a.py", "spec = (")
    write("specs/b.py", "pass")
    assert mistakes("specs", "missing.py") == [
        "missing.py: no such file; name a spec file or a folder of them",
        "specs/a.py:1: syntax error: '(' was never closed; fix it",
        "specs/b.py: no spec in it; "
        "write spec = AttentionSpec(...), or specs = [AttentionSpec(..., name='...'), ...]; "
        "or name a helper _b.py",
    ]


def test_an_error_in_a_function_of_the_spec_names_the_innermost_line_of_the_file():
    write("a.py", "def f():\n    return [][1]\n\n\nspec = f()\n")
    assert mistakes("a.py") == [
        "a.py:2: IndexError: list index out of range; a spec file must run by itself"
    ]


@pytest.mark.parametrize("joined", ["f & f", "f | f", "f ^ f", "f - f", "~f"])
def test_functions_joined_as_masks_are_told_how(joined):
    write("a.py", f"def f(b, h, q_idx, kv_idx):\n    return True\n\n\nspec = {joined}\n")
    (line,) = mistakes("a.py")
    assert line.startswith("a.py:5: TypeError: ")
    assert line.endswith(
        "; write full() & a & b, (full() & a) | b or ~(full() & a) of functions that are masks"
    )


def test_a_line_that_a_mistake_names_itself_is_named_once():
    write("a.py", "from flashgen import causal, full\n\nspec = causal() and full()\n")
    (line,) = mistakes("a.py")
    assert line.startswith("a.py:3: `spec = causal() and full()`: the mask causal() is neither")


def test_exit_in_a_spec_file_is_a_mistake_of_the_file():
    write("a.py", "import sys\nsys.exit('no')\n")
    assert mistakes("a.py") == ["a.py:2: SystemExit: no; a spec file must run by itself"]


def test_a_spec_that_changes_the_folder_changes_it_for_itself_alone(tmp_path):
    for name in "ab":
        write(f"{name}.py", f"import os\nos.chdir('/')\n{SPEC}spec = AttentionSpec(head_dim=64)")
    assert [variant.name for variant in load([Path("a.py"), Path("b.py")])] == ["a", "b"]
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("path", ["specs", "specs/a.py"])
def test_a_pipe_is_no_spec_file(path):
    """Reading one would wait for ever."""
    Path("specs").mkdir()
    os.mkfifo("specs/a.py")
    assert mistakes(path) == [
        "specs/a.py: not a regular file; move it away, or name spec files alone"
    ]


def test_a_syntax_error_in_a_helper_names_the_helper():
    write("_help.py", "x = = 1\n")
    write("a.py", "import _help\n")
    (line,) = mistakes("a.py")
    assert line.endswith("_help.py:1: syntax error: invalid syntax; fix it")


def test_an_unknown_field_lists_the_known_ones():
    write("a.py", SPEC + "spec = AttentionSpec(headdim=64)\n")
    assert mistakes("a.py") == [
        "a.py:2: TypeError: AttentionSpec.__init__() got an unexpected keyword argument 'headdim'; "
        "its fields are head_dim, dtype, mask, score, normaliser, scale, input_precision, blocks, "
        "dropout, deterministic, autocast, align, linformer, forms, targets, name"
    ]


def test_a_file_that_does_not_end_is_named_and_its_line_when_it_is_stopped(monkeypatch, capsys):
    """Ctrl-C is an interrupt of this process, here a signal to itself once the file is named."""
    monkeypatch.setattr("flashgen.loader.SLOW", 0.05)
    write(
        "loops.py",
        "import os, signal, time\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "while True:\n"
        "    time.sleep(0.01)\n",
    )
    previous = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(SpecInterruptedError) as stopped:
            load([Path("loops.py"), Path("never_reached.py")])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert re.fullmatch(r"loops.py:[45]: interrupted while it ran; .*", str(stopped.value))
    assert stopped.value.status == 130
    told = "loops.py: has run for 0 s; Ctrl-C stops it, and shows the line\n"
    assert capsys.readouterr().err == told


def test_a_file_that_ends_in_time_is_not_named(monkeypatch, capsys):
    monkeypatch.setattr("flashgen.loader.SLOW", 0.2)
    write("tiny.py", SPEC + "spec = AttentionSpec(head_dim=64)")
    load([Path("tiny.py")])
    time.sleep(0.3)
    assert capsys.readouterr().err == ""

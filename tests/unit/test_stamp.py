"""A stamp is void as soon as an input of a build differs; and a defect for each that it forgets."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen import stamp
from flashgen.build import Options
from flashgen.codegen.names import FILE
from flashgen.paths import PACKAGE, template_dir
from flashgen.place import Place
from flashgen.stamp import Request, keep, look, up_to_date, why_not
from flashgen.tuning.device import Gpu

SPEC = "from flashgen import AttentionSpec\nimport _width\nfrom mine import deep\nspec = 3\n"
H100 = Gpu("NVIDIA H100", "sm_90")
H200 = Gpu("NVIDIA H200", "sm_90")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    # Before this process began, as files are that nobody edits meanwhile.
    os.utime(path, ns=(stamp._STARTED - 10**9 - len(text), stamp._STARTED - 10**9 - len(text)))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Built modules, and all that they were built from; none of it is real but the paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stamp, "detect_gpu", lambda: None)
    write(tmp_path / "specs" / "tiny.py", SPEC)
    write(tmp_path / "specs" / "_width.py", "WIDTH = 5\n")
    write(tmp_path / "lib" / "mine" / "__init__.py", "")
    write(tmp_path / "lib" / "mine" / "deep.py", "DEEP = 1\n")
    write(tmp_path / "lib" / "jinja2" / "__init__.py", "")
    write(tmp_path / "lib" / "triton-3.7.1.dist-info" / "METADATA", "")
    write(tmp_path / "own" / "spec.py", "")
    write(tmp_path / "generated" / "tiny.py", "attention = 1\n")
    write(tmp_path / "generated" / "__init__.py", "")
    write(tmp_path / "generated" / "tuning" / "tiny.json", "{}")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr(stamp, "_own_files", lambda: [tmp_path / "own" / "spec.py"])
    return tmp_path


REQUEST = Request((Path("specs"),), Path("generated"), tune=False)


def built(request=REQUEST, gpu=None, during=lambda: None, done=lambda: True):
    """What a build leaves behind that found everything as it should be."""
    before = look(request, gpu)
    assert before is not None, why_not(request)
    during()
    keep(request, before, gpu, ["tiny"], done)


def test_a_request_with_a_stamp_has_nothing_to_do(project):
    assert up_to_date(REQUEST) is None
    built()
    assert up_to_date(REQUEST) == ["tiny"]
    assert up_to_date(replace(REQUEST, paths=(project / "specs",))) == ["tiny"]


def edit(name):
    return lambda project, patch: write(project / name, (project / name).read_text() + "# new\n")


def add(name):
    return lambda project, patch: write(project / name, "")


def remove(name):
    return lambda project, patch: (project / name).unlink()


def rename(old, new):
    return lambda project, patch: (project / old).rename(project / new)


def patched(target, name, value):
    return lambda project, patch: patch.setattr(target, name, value)


_see = stamp._look
_specs = stamp.spec_inputs

#: What changes, and a defect of the stamp that does not see it.
CHANGES = {
    "a spec": (edit("specs/tiny.py"), ("spec_inputs", lambda file: _specs(file)[1:])),
    "a helper beside it": (
        edit("specs/_width.py"),
        ("spec_inputs", lambda f: [s for s in _specs(f) if "_width" not in s.path]),
    ),
    "a helper's helper": (
        edit("lib/mine/deep.py"),
        ("spec_inputs", lambda f: [s for s in _specs(f) if "deep" not in s.path]),
    ),
    "a helper that comes before another": (
        add("specs/mine/__init__.py"),
        ("spec_inputs", lambda f: [s for s in _specs(f) if "mine" not in s.path]),
    ),
    "another spec": (add("specs/new.py"), ("spec_files", lambda path: [path / "tiny.py"])),
    "the spec's name": (
        rename("specs/tiny.py", "specs/small.py"),
        ("spec_files", lambda path: []),
    ),
    "flashgen": (edit("own/spec.py"), ("_own_files", lambda: [])),
    "a new file of flashgen": (
        lambda project, patch: (
            write(project / "own" / "new.py", ""),
            patch.setattr(
                stamp, "_own_files", lambda: [project / "own" / n for n in ("spec.py", "new.py")]
            ),
        ),
        ("_own_files", lambda: []),
    ),
    "Python": (patched(sys, "version", "3.99"), ("_python", lambda: ())),
    "Python's options": (
        patched(stamp, "_python", lambda: (sys.version, sys.platform, (1,))),
        ("_look", lambda request, gpu: _look_without_python(request, gpu)),
    ),
    "Triton": (
        rename("lib/triton-3.7.1.dist-info", "lib/triton-3.8.0.dist-info"),
        ("_installed", lambda: []),
    ),
    "Jinja, edited": (edit("lib/jinja2/__init__.py"), ("_package", lambda name: ())),
    "the module": (edit("generated/tiny.py"), ("_modules", lambda out, names: "")),
    "no module": (remove("generated/tiny.py"), ("_modules", lambda out, names: "")),
    "the tuning results": (
        edit("generated/tuning/tiny.json"),
        ("Place", type("NoTuning", (Place,), {"tuning": Path("none")})),
    ),
    "no tuning results": (
        remove("generated/tuning/tiny.json"),
        ("Place", type("NoTuning", (Place,), {"tuning": Path("none")})),
    ),
    "no package": (
        remove("generated/__init__.py"),
        ("Place", type("NoPackage", (Place,), {"package_file": None})),
    ),
}


def _look_without_python(request, gpu):
    kept, stamp._python = stamp._python, lambda: ()
    try:
        return _see(request, gpu)
    finally:
        stamp._python = kept


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_voids_the_stamp(project, monkeypatch, change):
    built()
    CHANGES[change][0](project, monkeypatch)
    assert up_to_date(REQUEST) is None


@pytest.mark.parametrize("change", CHANGES)
def test_and_a_stamp_that_forgets_it_is_found_out(project, monkeypatch, change):
    make, (name, defect) = CHANGES[change]
    monkeypatch.setattr(stamp, name, defect)
    built()
    make(project, monkeypatch)
    monkeypatch.setattr(stamp, name, defect)
    assert up_to_date(REQUEST) == ["tiny"]


#: Another request, and how it differs.
REQUESTS = {
    "paths": (Path("specs/tiny.py"),),
    "out": Path("other/../generated"),
    "targets": ("sm_90",),
    "forms": ("varlen",),
    "tune": True,
    "kernels": ("portable",),
    "package": "mine.kernels",
}


@pytest.mark.parametrize("option", REQUESTS)
def test_a_stamp_is_of_one_request(project, monkeypatch, option):
    (project / "other").mkdir()
    built()
    other = replace(REQUEST, **{option: REQUESTS[option]})
    assert up_to_date(other) is None
    path = Request.stamp.fget
    forgets = property(lambda request: path(replace(request, **{option: getattr(REQUEST, option)})))
    with monkeypatch.context() as patch:
        patch.setattr(Request, "stamp", forgets)
        assert up_to_date(other) == ["tiny"]


def test_every_option_of_a_request_is_tried():
    assert REQUESTS.keys() == Request.__dataclass_fields__.keys()
    others = {"tune_seconds", "force"}  # which change nothing that is up to date
    assert REQUESTS.keys() == {"paths", *Options.__dataclass_fields__} - others


def test_a_package_that_is_a_link_elsewhere(project):
    """The module names its package: as the folder is called without links."""
    (project / "a").mkdir()
    (project / "generated").rename(project / "a" / "generated")
    (project / "generated").symlink_to(project / "a" / "generated")
    built()
    assert up_to_date(REQUEST) == ["tiny"]
    (project / "a" / "generated").rename(project / "a" / "kernels")
    (project / "generated").unlink()
    (project / "generated").symlink_to(project / "a" / "kernels")
    assert up_to_date(REQUEST) is None


def test_another_gpu_may_have_something_to_measure(project, monkeypatch):
    tuned = replace(REQUEST, tune=True)
    monkeypatch.setattr(stamp, "detect_gpu", lambda: H100)
    built(tuned, H100)
    assert up_to_date(tuned) == ["tiny"]
    monkeypatch.setattr(stamp, "detect_gpu", lambda: H200)
    assert up_to_date(tuned) is None
    monkeypatch.setattr(stamp, "_look", lambda request, gpu: _see(request, H100))
    assert up_to_date(tuned) == ["tiny"]  # a stamp that forgets it


def test_without_measuring_the_gpu_does_not_count(project, monkeypatch):
    built()
    monkeypatch.setattr(stamp, "detect_gpu", lambda: H200)
    assert up_to_date(REQUEST) == ["tiny"]


def write_twice(path, text):
    old = path.read_text()
    path.write_text(text)
    write(path, old)


#: What happens while a build runs, which then leaves no stamp.
MEANWHILE = {
    "an edited spec": lambda project: write(project / "specs" / "tiny.py", SPEC + "\n"),
    "an edited spec, and back": lambda project: write_twice(project / "specs" / "tiny.py", "a\n"),
    "flashgen edited": lambda project: write_twice(project / "own" / "spec.py", "a\n"),
}


@pytest.mark.parametrize("event", MEANWHILE)
def test_what_changes_during_a_build_leaves_no_stamp(project, monkeypatch, event):
    built(during=lambda: MEANWHILE[event](project))
    assert not REQUEST.stamp.exists()
    before = look(REQUEST, None)
    MEANWHILE[event](project)
    monkeypatch.setattr(stamp, "look", lambda request, gpu: before)  # looks once
    keep(REQUEST, before, None, ["tiny"], lambda: True)
    assert REQUEST.stamp.exists()


def test_a_stamp_that_looks_only_at_contents_is_found_out(project, monkeypatch):
    monkeypatch.setattr(stamp, "look", lambda *_: replace(_see(*_), written=""))
    before = stamp.look(REQUEST, None)
    write_twice(project / "specs" / "tiny.py", "a\n")
    keep(REQUEST, before, None, ["tiny"], lambda: True)
    assert REQUEST.stamp.exists()


@pytest.mark.parametrize("name", ["own/spec.py", "lib/mine/deep.py"])
def test_what_this_process_may_have_imported_before_an_edit(project, monkeypatch, name):
    """It runs the old text: no stamp says that the new one was built."""
    os.utime(project / name)
    built()
    assert not REQUEST.stamp.exists()
    monkeypatch.setattr(stamp, "_STARTED", 2**63)
    built()
    assert REQUEST.stamp.exists()


def test_helpers_beside_a_spec_are_run_each_time(project):
    os.utime(project / "specs" / "tiny.py")
    os.utime(project / "specs" / "_width.py")
    built()
    assert up_to_date(REQUEST) == ["tiny"]


def test_a_module_that_another_build_replaces(project):
    def replaced():
        write(project / "generated" / "tiny.py", "attention = 2\n")
        return True

    built(done=replaced)
    assert not REQUEST.stamp.exists()
    built(done=lambda: False)
    assert not REQUEST.stamp.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"a"', "{}", '{"variants": 3, "inputs": "", "modules": ""}', "\0"]
)
def test_a_damaged_stamp_counts_for_nothing(project, text):
    built()
    REQUEST.stamp.write_text(text)
    assert up_to_date(REQUEST) is None
    built()
    assert up_to_date(REQUEST) == ["tiny"]


def test_a_stamp_of_this_very_state_is_not_written_again(project):
    built()
    before = REQUEST.stamp.stat()
    built()
    assert REQUEST.stamp.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("text", "why"), [("import os\n", "specs/tiny.py:1: imports os"), ("def", "invalid syntax")]
)
def test_of_a_spec_that_may_read_anything_there_is_no_stamp(project, text, why):
    write(project / "specs" / "tiny.py", text)
    assert look(REQUEST, None) is None
    assert why in why_not(REQUEST)


def test_a_folder_that_cannot_be_written_has_no_stamps(project):
    (project / "generated" / ".flashgen").write_text("a file")
    built()
    assert up_to_date(REQUEST) is None


def test_a_pipe_is_not_waited_for(project):
    os.mkfifo(project / "specs" / "pipe.py")
    assert "not a regular file" in why_not(REQUEST)
    (project / "specs" / "pipe.py").unlink()
    built()
    (project / "generated" / "tiny.py").unlink()
    os.mkfifo(project / "generated" / "tiny.py")
    assert up_to_date(REQUEST) is None


def test_all_of_flashgen_counts():
    found = set(stamp._own_files())
    assert {*PACKAGE.rglob("*.py"), *template_dir().rglob("*.jinja")} <= found
    assert {PACKAGE / "explain" / "templates" / "page.html.jinja", FILE} <= found
    assert not any(path.suffix == ".pyc" for path in found)


def test_a_stamp_holds_digests_and_names_alone(project):
    built()
    held = json.loads(REQUEST.stamp.read_text())
    assert held["variants"] == ["tiny"]
    assert {len(held["inputs"]), len(held["modules"])} == {64}

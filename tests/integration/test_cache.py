"""`flashgen.compile`: a spec in, its module out, through a folder that processes share."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen import AttentionSpec, Int, causal, compiling, sliding_window
from flashgen.cache import CachedPlace, cache_folder
from flashgen.errors import OutputError, TuneError, ValidationError
from flashgen.publish import read_seal
from flashgen.tuning.device import Gpu
from flashgen.tuning.store import Measurement, TuneResult
from support.dying import run_and_die_at
from support.turns import is_full

SPEC = AttentionSpec(head_dim=16, mask=causal(), dtype="float32", targets=("sm_90",))
COMPILE = """
import flashgen
from flashgen import AttentionSpec, causal
spec = AttentionSpec(head_dim=16, mask=causal(), dtype="float32", targets=("sm_90",))
"""
H200 = Gpu("NVIDIA H200", "sm_90")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, in a process that has loaded nothing, on a machine without a GPU."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiling, "_loaded", {})
    monkeypatch.setattr("flashgen.build.detect_gpu", lambda: None)
    monkeypatch.setattr("flashgen.compiling.detect_gpu", lambda: None)
    return folder


def modules(cache):
    return sorted(path for path in (cache / "modules").iterdir() if path.suffix == ".py")


def attends(module):
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(module.attention(q, k, v), expected)


def start(code="flashgen.compile(spec)"):
    command = [sys.executable, "-c", f"{COMPILE}\n{code}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_spec_in_and_its_module_out(cache, monkeypatch):
    module = flashgen.compile(SPEC)
    attends(module)
    assert flashgen.compile(AttentionSpec(**vars(SPEC))) is module
    [path] = modules(cache)
    assert module.__file__ == str(path)
    assert (
        "    attention = flashgen.compile(spec)\n    out = attention.attention(q" in module.__doc__
    )

    def never(*arguments):
        raise AssertionError("lowered again")

    monkeypatch.setattr("flashgen.build.lower", never)
    monkeypatch.setattr(compiling, "_loaded", {})
    attends(flashgen.compile(SPEC))


def test_a_module_of_the_cache_is_loaded_without_what_renders_it():
    flashgen.compile(SPEC)
    rendering = {"flashgen.build", "flashgen.kernels.registry", "flashgen.plan", "jinja2"}
    loads = f"flashgen.compile(spec); import sys; print({rendering} & sys.modules.keys())"
    assert start(loads).communicate() == ("set()\n", "")


def test_each_spec_and_each_name_has_a_module(cache):
    specs = [
        SPEC,
        AttentionSpec(**{**vars(SPEC), "name": "mine"}),
        AttentionSpec(**{**vars(SPEC), "mask": sliding_window(Int("left", 4), 0)}),
    ]
    names = [flashgen.compile(spec).__name__.split("_")[2] for spec in specs]
    assert names == ["attention", "mine", "attention"]
    assert len(modules(cache)) == 3


def test_two_caches_have_one_module_that_pickle_finds(cache, monkeypatch):
    module = flashgen.compile(SPEC)
    other = cache.parent / "other"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(other))
    assert flashgen.compile(SPEC) is module
    assert len(modules(other)) == 1
    assert pickle.loads(pickle.dumps(module.attention)) is module.attention


def test_what_is_wrong_with_a_spec_is_said_and_nothing_written(cache):
    with pytest.raises(ValidationError, match=r"^attention: head_dim=7: not a multiple of 8"):
        flashgen.compile(AttentionSpec(head_dim=7))
    with pytest.raises(ValidationError, match="not an identifier"):
        flashgen.compile(AttentionSpec(head_dim=16, name="../../mine"))
    with pytest.raises(TypeError, match="spec: got int; pass an AttentionSpec"):
        flashgen.compile(64)
    assert modules(cache) == []


def test_torch_compile_traces_the_module_and_not_the_compiler():
    module = flashgen.compile(SPEC)
    q = torch.randn(1, 2, 20, 16)
    traced = torch.compile(lambda q: module.attention(q, q, q) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(q), module.attention(q, q, q) * 2)

    def late(q):
        return flashgen.compile(SPEC).attention(q, q, q)

    with pytest.raises(Exception, match=r"flashgen\.compile was called in code that torch"):
        torch.compile(late, fullgraph=True, backend="eager")(q)


def test_processes_at_once_build_one_module(cache):
    started = [start() for _ in range(4)]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    [path] = modules(cache)
    assert read_seal(path) is not None
    attends(flashgen.compile(SPEC))


def test_one_builds_and_the_other_waits_for_its_module(cache):
    """The second finds the lock taken, and has nothing left to build."""
    pause = (
        "import flashgen.build as b, sys\n"
        "publish = b.publish\n"
        "def paused(*arguments):\n"
        "    print('holding', flush=True); sys.stdin.readline(); return publish(*arguments)\n"
        "b.publish = paused\n"
        "flashgen.compile(spec)"
    )
    waits = (
        "import flashgen.build as b, flashgen.files as f\n"
        "flock = f.fcntl.flock\n"
        "def told(file, operation):\n"
        "    if not operation & f.fcntl.LOCK_NB: print('waiting', flush=True)\n"
        "    return flock(file, operation)\n"
        "f.fcntl.flock = told\n"
        "def never(*arguments): raise AssertionError('built twice')\n"
        "b.publish = b.lower = never\n"
        "flashgen.compile(spec)"
    )
    command = [sys.executable, "-c", f"{COMPILE}\n{pause}"]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "holding\n"
    second = start(waits)
    assert second.stdout.readline() == "waiting\n"
    first.communicate("go on\n", timeout=120)
    _, errors = second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), errors
    assert len(modules(cache)) == 1


def test_a_process_killed_at_any_point_leaves_a_cache_that_works(cache):
    flashgen.compile(SPEC)
    [right] = [path.read_bytes() for path in modules(cache)]
    for step in range(1, 100) if is_full() else range(2, 100, 4):
        shutil.rmtree(cache)
        status = run_and_die_at(step, lambda: flashgen.compile(SPEC))
        assert all(path.read_bytes() == right for path in modules(cache))
        compiling._loaded.clear()
        attends(flashgen.compile(SPEC))
        assert [path.read_bytes() for path in modules(cache)] == [right]
        if status != signal.SIGKILL:
            break
    assert status == 0
    assert step > 4


@pytest.mark.parametrize("damage", [b"", b"# Generated by flashgen", b"\0" * 100])
def test_a_damaged_module_is_built_again_or_refused(cache, damage):
    flashgen.compile(SPEC)
    [path] = modules(cache)
    path.write_bytes(damage or path.read_bytes()[:-1])
    compiling._loaded.clear()
    if damage.startswith(b"\0"):
        with pytest.raises(OutputError, match=r"not written by flashgen.* set FLASHGEN_CACHE_DIR"):
            flashgen.compile(SPEC)
    else:
        attends(flashgen.compile(SPEC))


def test_another_version_of_flashgen_has_modules_of_its_own(cache, monkeypatch):
    old = flashgen.compile(SPEC)
    monkeypatch.setattr("flashgen.publish.__version__", "99.0")
    new = flashgen.compile(SPEC)
    assert new is not old
    assert len(modules(cache)) == 2
    assert Path(old.__file__).exists()


def test_a_module_that_is_cleared_before_it_is_loaded_is_built_again(cache, monkeypatch):
    load, cleared = compiling._load, []

    def late(path):
        if not cleared:
            cleared.append(path)
            path.unlink()
        return load(path)

    monkeypatch.setattr(compiling, "_load", late)
    attends(flashgen.compile(SPEC))


class TestTheFolder:
    def test_is_for_its_owner_alone(self, cache):
        flashgen.compile(SPEC)
        for folder in (cache, *(path for path in cache.iterdir() if path.is_dir())):
            assert folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("part", ["", "modules"])
    def test_open_to_others_is_refused(self, cache, part):
        flashgen.compile(SPEC)
        (cache / part).chmod(0o750)
        with pytest.raises(OutputError) as caught:
            flashgen.compile(SPEC)
        folder = cache / part
        assert str(caught.value) == (
            f"{folder}: is open to other users (mode 750), and what lies there is executed; "
            f"run chmod 700 {folder}, or set FLASHGEN_CACHE_DIR to another folder"
        )

    def test_of_another_user_is_refused(self, cache, monkeypatch):
        flashgen.compile(SPEC)
        user, other = cache.stat().st_uid, cache.stat().st_uid + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(OutputError) as caught:
            flashgen.compile(SPEC)
        assert str(caught.value).startswith(
            f"{cache}: belongs to user {user}, and this process, of user {other}, would execute "
        )

    def test_that_cannot_be_made_is_refused(self, cache):
        cache.write_text("a file")
        with pytest.raises(OutputError, match=r"cannot be made.*set FLASHGEN_CACHE_DIR"):
            flashgen.compile(SPEC)

    def test_is_the_users(self, monkeypatch, tmp_path):
        monkeypatch.delenv("FLASHGEN_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "flashgen"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "flashgen"


class TestTuning:
    def test_without_a_gpu_is_refused(self, monkeypatch):
        with pytest.raises(TuneError, match="no GPU to measure on"):
            flashgen.compile(SPEC, tune=True)
        monkeypatch.setattr("flashgen.compiling.detect_gpu", lambda: Gpu("NVIDIA A100", "sm_80"))
        with pytest.raises(TuneError, match="is of sm_80, and the spec's targets are sm_90"):
            flashgen.compile(SPEC, tune=True)

    def test_measures_once_and_its_results_outlive_a_version(
        self, cache, monkeypatch, capsys, flashgen
    ):
        measured = []

        def measure(plan, target, gpu, candidates, rejected=(), *, kernel, report, **options):
            measured.append(kernel.key)
            report(1, 2)
            best = (Measurement(candidates[-1], (1.0,), (500.0,)),)
            return TuneResult(
                target, gpu, "3.7.1", kernel.digest(plan), (2048,), best, (), "complete", kernel.key
            )

        monkeypatch.setattr("flashgen.tuning.measure.measure", measure)
        for place in ("build", "compiling"):
            monkeypatch.setattr(f"flashgen.{place}.detect_gpu", lambda: H200)
        by_model = compiling.compiled(SPEC)
        best = compiling.compiled(SPEC, tune=True)
        assert best is not by_model
        assert measured == ["portable", "backward_keys", "backward_queries"]
        assert "measured on NVIDIA H200" in Path(best.__file__).read_text()
        assert compiling.compiled(SPEC) is compiling.compiled(SPEC, tune=True) is best
        monkeypatch.setattr("flashgen.publish.__version__", "99.0")
        assert "measured on NVIDIA H200" in Path(compiling.compiled(SPEC).__file__).read_text()
        assert len(measured) == 3
        capsys.readouterr()
        rows = [line for line in flashgen("cache", "list")[1] if "attention" in line]
        assert sorted(row.rstrip().endswith("NVIDIA H200") for row in rows) == [True] * 3


class TestTheCommands:
    def test_list_and_clear(self, cache, flashgen):
        assert flashgen("cache", "list") == (0, [f"no modules in {cache}"])
        assert flashgen("cache", "clear") == (0, [f"removed 0 modules from {cache}"])
        compiling.compiled(SPEC)
        [path] = modules(cache)
        (cache / "modules" / f".{path.name}.tmp").write_text("left by a killed process")
        status, lines = flashgen("cache", "list")
        assert status == 0
        assert lines[2].split()[:2] == ["attention", path.stem.split("_")[1][:8]]
        assert "whole" in lines[2] and lines[-1] == f"in {cache}"
        assert flashgen("cache", "clear") == (0, [f"removed 1 module from {cache}"])
        assert list((cache / "modules").rglob("*")) in ([], [cache / "modules" / "__pycache__"])

    def test_clear_keeps_measured_results_unless_told(self, cache, flashgen):
        place = CachedPlace(cache, "attention", SPEC)
        compiling.compiled(SPEC)
        place.tuning.write_text('{"results": []}\n')
        flashgen("cache", "clear")
        assert place.tuning.exists()
        flashgen("cache", "clear", "--measured")
        assert not place.tuning.exists()
        attends(compiling.compiled(SPEC))

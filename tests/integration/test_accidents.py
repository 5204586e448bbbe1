"""Killed builds, builds at once, damaged files, full disks: the next build is right."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from flashgen.cli import main
from support.dying import run_and_die_at
from support.turns import is_full

BUILD = """
import sys
from flashgen.cli import main
main(['build', 'specs', '--no-tune', *sys.argv[1:]])
"""


def start(*arguments, before="", **options):
    """A build in a process of its own, after running ``before`` in it."""
    command = [sys.executable, "-c", f"{before}\n{BUILD}", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def finish(process):
    """Its exit status and output."""
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def files(folder):
    """Every file below a folder, with its content; locks and stamps are no news."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".lock", ".stamp", ".pyc")
    }


@pytest.fixture
def right(flashgen, project):
    """What a build that nothing happens to leaves in generated/."""
    flashgen("build", "specs", "--out", "undisturbed/generated")
    return files(project / "undisturbed" / "generated")


def build():
    main(["build", "specs", "--no-tune"])


# A fast run dies at one of five points: at others with a module there than without.
@pytest.mark.parametrize(("first", "existing"), [(1, "nothing"), (3, "an older module")])
def test_a_build_killed_at_any_point(flashgen, project, right, first, existing):
    generated = project / "generated"
    for step in range(1, 100) if is_full() else range(first, 100, 5):
        shutil.rmtree(generated, ignore_errors=True)
        if existing == "an older module":
            flashgen("build", "specs", "--target", "sm_80")
        old = files(generated)
        status = run_and_die_at(step, build)
        left = {name: text for name, text in files(generated).items() if name[0] != "."}
        assert all(text in (old.get(name), right[name]) for name, text in left.items())
        assert flashgen("build", "specs", "--no-tune")[0] == 0
        assert files(generated) == right
        if status != signal.SIGKILL:
            break
    assert status == 0
    assert step > 10


def test_builds_of_one_spec_at_once(project, right):
    answers = [finish(build) for build in [start() for _ in range(4)]]
    assert [status for status, _ in answers] == [0] * 4, answers
    assert files(project / "generated") == right


def test_a_build_waits_for_another_and_takes_its_module(flashgen, project, right):
    """The first holds the lock until it is told to go on; the second has nothing left to do."""
    pause = (
        "import flashgen.build as b, sys\n"
        "publish = b.publish\n"
        "def paused(*arguments):\n"
        "    print('holding', flush=True); sys.stdin.readline(); return publish(*arguments)\n"
        "b.publish = paused\n"
    )
    first = start(before=pause, stdin=subprocess.PIPE)
    assert first.stdout.readline() == "holding\n"
    second = start("-v")
    steps = ["derive", "budget", "wait for another build"]
    assert [second.stdout.readline() for _ in steps] == [f"tiny: {step}\n" for step in steps]
    first.stdin.write("go on\n")
    first.stdin.flush()
    assert finish(first)[0] == 0
    assert finish(second) == (0, "up to date, nothing to do: tiny\n")
    assert files(project / "generated") == right


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_module_is_built_again(flashgen, project, right, share):
    flashgen("build", "specs")
    module = project / "generated" / "tiny.py"
    module.write_bytes(right["tiny.py"][: int(share * len(right["tiny.py"]))])
    status, lines = flashgen("build", "specs")
    assert status == 0 and any("by model" in line for line in lines)
    assert files(project / "generated") == right


def test_a_missing_package_file_is_written_again(flashgen, project, right):
    flashgen("build", "specs")
    (project / "generated" / "__init__.py").unlink()
    flashgen("build", "specs")
    assert files(project / "generated") == right


def test_a_full_disk(flashgen, project, right, monkeypatch):
    flashgen("build", "specs", "--target", "sm_80")
    before = files(project / "generated")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("flashgen.files.os.fsync", full)
        assert flashgen("build", "specs") == (
            2,
            [
                "error: generated/tiny.py: cannot be written: No space left on device; "
                "free some space, or choose another folder with --out"
            ],
        )
    assert files(project / "generated") == before
    assert flashgen("build", "specs")[0] == 0
    assert files(project / "generated") == right


def test_a_file_size_limit(flashgen, project, right):
    """The same from the system itself: writing past a kilobyte fails."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))"
    assert finish(start(before=limit)) == (
        2,
        "error: generated/tiny.py: cannot be written: File too large; "
        "choose another folder with --out\n",
    )
    assert "tiny.py" not in files(project / "generated")
    assert flashgen("build", "specs")[0] == 0
    assert files(project / "generated") == right


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(flashgen, project):
    (project / "generated").mkdir(mode=0o555)
    assert flashgen("build", "specs") == (
        2,
        [
            "error: generated/.flashgen/tiny.lock: cannot be written: Permission denied; "
            "choose another folder with --out"
        ],
    )


def test_a_module_that_is_up_to_date_needs_no_permission(flashgen, project):
    flashgen("build", "specs")
    (project / "generated").chmod(0o555)
    try:
        assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    finally:
        (project / "generated").chmod(0o755)


def test_damaged_tuning_results_stop_the_build(flashgen, project):
    (project / "generated" / "tuning").mkdir(parents=True)
    (project / "generated" / "tuning" / "tiny.json").write_text('{"results": [')
    assert flashgen("build", "specs") == (
        2,
        [
            "error: generated/tuning/tiny.json: not a file of tuning results "
            "(JSONDecodeError: Expecting value: line 1 column 14 (char 13)); "
            "restore it from version control, or delete it to choose anew"
        ],
    )
    assert "tiny.py" not in files(project / "generated")

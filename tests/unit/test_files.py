import errno
import importlib.util
import os
import subprocess
import sys
import threading

import pytest

from flashgen import files
from flashgen.errors import OutputError
from flashgen.files import lock, write_atomically


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_makes_the_folder_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "er" / "a.py"
    write_atomically(path, "x = 'é'\n")
    assert path.read_bytes() == "x = 'é'\n".encode()
    assert contents(path.parent) == ["a.py"]


def test_a_failed_write_keeps_the_old_file_and_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "a.py"
    write_atomically(path, "old")

    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OutputError) as caught:
        write_atomically(path, "new")
    assert str(caught.value) == (
        f"{path}: cannot be written: No space left on device; "
        "free some space, or choose another folder with --out"
    )
    assert path.read_text() == "old"
    assert contents(tmp_path) == ["a.py"]


def test_a_folder_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "out").write_text("a file")
    path = tmp_path / "out" / "a.py"
    with pytest.raises(OutputError) as caught:
        write_atomically(path, "new")
    assert str(caught.value) == (
        f"{path}: cannot be written: File exists; choose another folder with --out"
    )


def test_of_a_link_its_file_is_replaced(tmp_path):
    (tmp_path / "a.py").write_text("old")
    (tmp_path / "b.py").symlink_to("a.py")
    write_atomically(tmp_path / "b.py", "new")
    assert (tmp_path / "b.py").is_symlink()
    assert (tmp_path / "a.py").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path):
    """As a device is: /dev/stdout stays one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_atomically(pipe, "new")
        assert reader.read() == "new"
    assert pipe.is_fifo() and contents(tmp_path) == ["pipe"]


def test_bytes_are_written_as_they_are(tmp_path):
    write_atomically(tmp_path / "a.png", b"\x89PNG\r\n")
    assert (tmp_path / "a.png").read_bytes() == b"\x89PNG\r\n"


def test_a_file_system_without_locks_says_so(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    path = tmp_path / "a.lock"
    with pytest.raises(OutputError) as caught, lock(path, on_wait=print):
        raise AssertionError("nobody has it")
    assert str(caught.value) == (
        f"{path}: cannot be written: No locks available; choose another folder with --out"
    )


def test_a_temporary_file_left_by_a_killed_process_is_replaced(tmp_path):
    (tmp_path / ".a.py.tmp").write_text("half a fi")
    write_atomically(tmp_path / "a.py", "whole")
    assert contents(tmp_path) == ["a.py"]
    assert (tmp_path / "a.py").read_text() == "whole"


def test_two_writes_of_one_size_in_one_second_are_both_seen_by_python(tmp_path, monkeypatch):
    """Python trusts a .pyc whose source has the size and the modification second it remembers."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "fast.py"

    def value():
        spec = importlib.util.spec_from_file_location("fast", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.X

    for number in range(5):
        write_atomically(path, f"X = {number}\n")
        assert value() == number
    assert list(tmp_path.glob("__pycache__/fast.*.pyc"))


def test_the_lock_keeps_others_waiting(tmp_path):
    path = tmp_path / "locks" / "a.lock"
    order = []
    waiting = threading.Event()

    def second():
        def on_wait():
            order.append("second waits")
            waiting.set()

        with lock(path, on_wait=on_wait):
            order.append("second has it")

    with lock(path, on_wait=lambda: order.append("never")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first leaves")
    thread.join(10)
    assert order == ["second waits", "first leaves", "second has it"]


def test_a_process_forked_from_the_holder_holds_no_lock(tmp_path):
    path, (reading, writing) = tmp_path / "a.lock", os.pipe()
    with lock(path, on_wait=print):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test has ended
            os._exit(0)
    try:
        with path.open("a") as file:
            files.fcntl.flock(file, files.fcntl.LOCK_EX | files.fcntl.LOCK_NB)
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


def test_a_killed_holder_leaves_no_lock(tmp_path):
    path = tmp_path / "a.lock"
    hold = (
        "import sys, time; from pathlib import Path; from flashgen.files import lock\n"
        "with lock(Path(sys.argv[1]), on_wait=print):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    process.stdout.close()
    waited = []
    with lock(path, on_wait=lambda: waited.append(True)):
        assert not waited

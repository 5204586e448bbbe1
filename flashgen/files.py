"""Files that are never half there: an atomic write, and a lock for one writer at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EISDIR, ENOSPC
from pathlib import Path

from flashgen.errors import OutputError

#: What to do about a folder of modules that cannot be written.
ANOTHER_FOLDER = "choose another folder with --out"


def write_atomically(path: Path, content: str | bytes, remedy: str = ANOTHER_FOLDER) -> None:
    """Replaces ``path`` whole: a reader, a crash or a full disk sees the old file or the new.

    The temporary file's name is fixed, so that one left by a killed process is overwritten by the
    next: of what several processes may write at once, the caller holds a lock. Where ``path`` is a
    link its file is replaced; a device or a pipe, which holds nothing, is written to.

    Args:
        path: the file; its folder is made if it is not there.
        content: bytes, or text to write as UTF-8.
        remedy: what the error tells the user to do.

    Raises:
        OutputError: the folder or the file cannot be written; the old file stands.
    """
    data = content.encode() if isinstance(content, str) else content
    with _explained(path, remedy):
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        file_path = path.resolve()
        temporary = file_path.with_name(f".{file_path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _outdate_bytecode(file_path, temporary)
            temporary.replace(file_path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(file_path.parent)


def _outdate_bytecode(old: Path, new: Path) -> None:
    """Gives the new file a later second of modification than the old one.

    Python takes a ``.pyc`` for fresh when the source's size and modification second are the ones it
    remembers. Two builds within a second can give the same of both.
    """
    if old.exists():
        second = max(int(new.stat().st_mtime), int(old.stat().st_mtime) + 1)
        os.utime(new, (second, second))


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, on_wait: Callable[[], None], remedy: str = ANOTHER_FOLDER) -> Iterator[None]:
    """Holds the lock file ``path``; calls ``on_wait`` once if another process has it first.

    The kernel drops the lock with the process that holds it, so a killed build leaves none behind.
    ``remedy`` is what the error tells the user to do.

    Raises:
        OutputError: the folder cannot be written, or its file system has no locks.
    """
    with _explained(path, remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        with _explained(path, remedy):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open, too


@contextmanager
def _explained(path: Path, remedy: str) -> Iterator[None]:
    """Turns the system's refusal to write ``path`` into a line with a remedy."""
    try:
        yield
    except OSError as error:
        space = "free some space, or " if error.errno in (ENOSPC, EDQUOT) else ""
        raise OutputError(
            f"{path}: cannot be written: {error.strerror}; {space}{remedy}"
        ) from error

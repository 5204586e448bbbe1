"""Processes that are killed in the middle of a write."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def status_of(child: int, deadline: float) -> int:
    """What `os.waitpid` says of a forked process, which a lock held then may stop for ever."""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the forked process did not end")
        time.sleep(0.002)
    return ended[1]


def run_and_die_at(step: int, work: Callable[[], Any]) -> int:
    """Forks a process that is killed before or after a call that changes the disk, at the nth such.

    Returns:
        What `os.waitpid` says: the signal that killed it, or 0 where it came to its end before.
    """
    child = os.fork()
    if child:
        return status_of(child, time.monotonic() + 120)
    points = itertools.count(1)
    read_or_write = Path.open

    def die_if_it_is_time() -> None:
        if next(points) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if call is read_or_write and "r" in (*arguments[1:], *options.values(), "r")[0]:
                return call(*arguments, **options)
            die_if_it_is_time()
            result = call(*arguments, **options)
            die_if_it_is_time()
            return result

        return wrapped

    for owner, name in ((os, "fsync"), (os, "utime"), (Path, "replace"), (Path, "open")):
        setattr(owner, name, dying(getattr(owner, name)))
    try:
        work()
        os._exit(0)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    finally:
        os._exit(3)

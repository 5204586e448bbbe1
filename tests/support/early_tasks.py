"""Tasks of `benchmarks.early` for its tests: other processes import them, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def quick(said: str = "") -> str:
    return said


def failing() -> str:
    raise RuntimeError("no such kernel\nhere")


def dying() -> str:
    os._exit(3)


def endless(file: str | None = None) -> str:
    """Appends to a file for ever, itself and by a process that it starts, as an assembler is."""
    if file is not None:
        wrote = "import sys, time\nwhile True: open(sys.argv[1], 'a').write('x'); time.sleep(0.002)"
        subprocess.Popen([sys.executable, "-c", wrote, f"{file}.child"])
    while True:
        if file is not None:
            with Path(file).open("a") as out:
                out.write("x")
        time.sleep(0.002)


def after(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def three_seconds() -> str:
    return after(3.0)


def crowded_once(file: str) -> str:
    """Out of memory at the first call."""
    if not Path(file).exists():
        Path(file).touch()
        return "OutOfMemoryError: CUDA out of memory."
    return ""

"""Shared memory by the content of kernels, as Triton's compiler said it before.

`tests/data/allotted/<Triton's version>.txt` holds a line a figure: the digest of a kernel with its
call, configuration and target, and bytes. It is committed, so that a clean clone need not compile
what was compiled before, once for each Triton that there is a file of. With ``--fresh`` everything
is compiled, and the figures are held to it; with ``--update-figures`` those that are missing are
added. What is of no kernel any more costs a line: delete the file to begin anew.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.compiling.allotment import compiled_bytes
from support.compiling.kernel import Kernel

FOLDER = Path(__file__).resolve().parents[2] / "data" / "allotted"

#: What the options are in the environment, which all processes of a test run share.
VARIABLES = {"--fresh": "FLASHGEN_FRESH", "--update-figures": "FLASHGEN_UPDATE_FIGURES"}


def allotted_bytes(kernel: Kernel, target: str, options: Mapping[str, Any]) -> int:
    """The shared memory of a block of a kernel, from the figures or else from the compiler.

    Raises:
        AssertionError: the compiler says something else than a figure.
    """
    digest = kernel.digest(target, options)
    known = _figures().get(digest)
    if known is not None and not os.environ.get(VARIABLES["--fresh"]):
        return known
    needed = compiled_bytes(kernel.source(), target, options)
    assert known in (None, needed), f"{_file().name}: {digest} is {known}, compiled {needed}"
    if known is None and os.environ.get(VARIABLES["--update-figures"]):
        _figures()[digest] = needed
        FOLDER.mkdir(exist_ok=True)
        with _file().open("a") as file:
            file.write(f"{digest} {needed}\n")
    return needed


def in_order() -> None:
    """Sorts the figures, which processes added in any order."""
    if _file().exists():
        lines = sorted(set(_file().read_text().splitlines()))
        _file().write_text("".join(f"{line}\n" for line in lines))


def _file() -> Path:
    """The figures of the Triton that is here."""
    import triton

    return FOLDER / f"{triton.__version__}.txt"


@functools.cache
def _figures() -> dict[str, int]:
    """Bytes by digest."""
    lines = _file().read_text().splitlines() if _file().exists() else []
    return {digest: int(size) for digest, size in map(str.split, lines)}

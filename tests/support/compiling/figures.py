"""What Triton's compiler said of kernels before, by their content.

`tests/data/allotted/<Triton's version>.txt` holds a line a kernel: the digest of it with its call,
configuration and target, and bytes of shared memory. `tests/data/reported/<version>.txt` holds what
machine code shows, a line a figure: digest, name, value. Both are committed, so that a clean clone
need not compile what was compiled before, once for each Triton that there is a file of. With
``--fresh`` everything is compiled, and the figures are held to it; with ``--update-figures`` those
that are missing are added. What is of no kernel any more costs a line: delete the file to begin
anew.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.compiling.allotment import compiled_bytes
from support.compiling.kernel import Kernel

DATA = Path(__file__).resolve().parents[2] / "data"

ALLOTTED, REPORTED = "allotted", "reported"

#: What the options are in the environment, which all processes of a test run share.
VARIABLES = {"--fresh": "FLASHGEN_FRESH", "--update-figures": "FLASHGEN_UPDATE_FIGURES"}


def allotted_bytes(kernel: Kernel, target: str, options: Mapping[str, Any]) -> int:
    """The shared memory of a block of a kernel, from the figures or else from the compiler.

    Raises:
        AssertionError: the compiler says something else than a figure.
    """
    digest = kernel.digest(target, options)
    needed: int = known_or(
        ALLOTTED, digest, lambda: compiled_bytes(kernel.source(), target, options)
    )
    return needed


def known_or(folder: str, key: str, compiled: Callable[[], Any]) -> Any:
    """A figure: as it is known, or else as the compiler says it, in values of JSON.

    Args:
        folder: of the files that have it.
        key: what it is known by.
        compiled: asks the compiler.

    Raises:
        AssertionError: the compiler says something else than what is known.
    """
    known, is_fresh = _figures(folder), os.environ.get(VARIABLES["--fresh"])
    if key in known and not is_fresh:
        return known[key]
    found = compiled()
    if key in known:
        assert known[key] == found, f"{_file(folder)}: {key} is {known[key]}, compiled {found}"
    elif os.environ.get(VARIABLES["--update-figures"]):
        known[key] = found
        _file(folder).parent.mkdir(exist_ok=True)
        with _file(folder).open("a") as file:
            file.write(f"{key} {json.dumps(found)}\n")
    return found


def in_order() -> None:
    """Sorts the figures, which processes added in any order."""
    for file in filter(Path.exists, map(_file, (ALLOTTED, REPORTED))):
        lines = sorted(set(file.read_text().splitlines()))
        file.write_text("".join(f"{line}\n" for line in lines))


def _file(folder: str) -> Path:
    """The figures of the Triton that is here."""
    import triton

    return DATA / folder / f"{triton.__version__}.txt"


@functools.cache
def _figures(folder: str) -> dict[str, Any]:
    """What is known, by key: a digest, or a digest and a name."""
    lines = _file(folder).read_text().splitlines() if _file(folder).exists() else []
    words = 2 if folder == REPORTED else 1
    divided = (line.split(" ", words) for line in lines)
    return {" ".join(key): json.loads(value) for *key, value in divided}

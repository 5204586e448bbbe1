"""Compiles the kernels of shipped modules with the Triton that is here, and keeps what it says.

    PYTHONPATH=tests python -m support.compiling.record [MODULE ...]

Every figure goes into docs/versions.json as soon as it is there; kernels whose figures it has are
not compiled again. `python -m docs.make_versions` makes the table of docs/versions.md of them.
"""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import triton

from flashgen.config import HOPPER
from support.compiling.shipped import Shipped, shipped_kernels
from support.variants import shipped_specs

FILE = Path(__file__).resolve().parents[3] / "docs" / "versions.json"


def recorded(kernel: str, shipped: Shipped, figures: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a kernel, unless it has changed since.

    Args:
        kernel: its function's name.
        shipped: the kernel.
        figures: those of its module and of one Triton.
    """
    known: dict[str, Any] | None = figures.get(kernel)
    return known if known and known["digest"] == digest(shipped) else None


def digest(shipped: Shipped) -> str:
    """Of all that figures follow from, but for the Triton."""
    return shipped.kernel.digest(HOPPER, shipped.options)


def main(names: list[str]) -> None:
    """Compiles what has no figures yet, of these modules or of all."""
    for name in names or list(shipped_specs()):
        for kernel, shipped in shipped_kernels(name).items():
            of_module = json.loads(FILE.read_text()).get(triton.__version__, {}).get(name, {})
            if recorded(kernel, shipped, of_module):
                continue
            compiled = shipped.compiled()
            figures = {
                "digest": digest(shipped),
                "predicted": shipped.predicted,
                "shared": compiled.shared,
                "registers": compiled.registers,
                "spilled": compiled.spilled,
            }
            _keep(name, kernel, figures)
            print(triton.__version__, name, kernel, figures, flush=True)


def _keep(name: str, kernel: str, figures: dict[str, Any]) -> None:
    """Puts figures into the file, which other Tritons write to at the same time."""
    with FILE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        document = json.load(file)
        document.setdefault(triton.__version__, {}).setdefault(name, {})[kernel] = figures
        file.seek(0)
        file.truncate()
        file.write(written(document))


def written(document: dict[str, Any]) -> str:
    """The document as text, a kernel a line."""
    lines = []
    for version in sorted(document):
        modules = [
            f'  "{name}": {{\n'
            + ",\n".join(f'   "{k}": {json.dumps(v)}' for k, v in sorted(kernels.items()))
            + "\n  }"
            for name, kernels in sorted(document[version].items())
        ]
        lines.append(f' "{version}": {{\n' + ",\n".join(modules) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])

"""The generated modules of an output folder: list them, or remove them."""

from __future__ import annotations

from importlib.util import cache_from_source
from pathlib import Path

from flashgen.errors import OutputError
from flashgen.place import Place
from flashgen.publish import is_generated, read_seal
from flashgen.tuning.store import load_results


def list_modules(out: Path) -> list[tuple[str, str, str]]:
    """For each generated module its name, its state, and the GPUs it was measured on."""
    rows = []
    for module in _generated(out):
        seal = read_seal(module)
        results = load_results(Place(out, module.stem).tuning)
        kernels = set(seal.kernels.values()) if seal else set()
        gpus = {result.gpu for result in results if result.kernel in kernels}
        state = "whole" if seal else "damaged or edited"
        rows.append((module.stem, state, ", ".join(sorted(gpus)) or "none"))
    return rows


def remove_modules(out: Path) -> list[Path]:
    """Removes the generated modules and their bytecode.

    Tuning results, and whatever flashgen did not write, stay.

    Raises:
        OutputError: the folder cannot be written.
    """
    modules = _generated(out)
    for module in modules:
        try:
            module.unlink(missing_ok=True)
            Path(cache_from_source(str(module))).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(
                f"{module}: cannot be removed: {error.strerror}; allow that"
            ) from error
    return modules


def _generated(out: Path) -> list[Path]:
    return sorted(path for path in out.glob("*.py") if is_generated(path))

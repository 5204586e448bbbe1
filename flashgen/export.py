"""export: published modules -> a package that others load without flashgen.

Two forms: a folder in the format of Hugging Face's `kernels`, and a wheel. Both hold the modules as
they are, with their seals.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from flashgen.errors import OutputError
from flashgen.files import write_atomically
from flashgen.publish import Place, is_generated, read_bytes, read_seal

#: The one build of a kernel in Python, for every GPU and every torch.
VARIANT = Path("build", "torch-universal")
#: Names of packages that would hide what modules import, or flashgen's own.
_TAKEN = ("torch", "triton", "flashgen")
#: Of flashgen's templates, whose text modules hold.
LICENSE = "apache-2.0"
_METADATA = "metadata.json"
_INIT = "__init__.py"


def export_hub(
    names: Sequence[str],
    out: Path,
    folder: Path,
    name: str,
    version: str,
    license_id: str = LICENSE,
) -> Path:
    """Writes a kernel that `kernels.get_local_kernel(folder)` loads, and the Hub takes as it is.

    Args:
        names: names of modules.
        out: the folder that they are in.
        folder: the kernel's folder. An earlier export in it is replaced.
        name: the kernel's name.
        version: of the kernel: a whole number.
        license_id: an identifier of SPDX.

    Returns:
        The folder of the one build.

    Raises:
        OutputError: a module is missing or damaged, the name or version is none, or the folder
            holds something else.
    """
    if not version.isdecimal():
        raise OutputError(f"--version={version}: kernels count versions; write a whole number")
    package = _package(name)
    files = _files(names, out)
    build = folder / VARIANT
    _check_replaceable(build)
    text = "".join(content for _, content in sorted(files.items()))
    described = {
        "name": name,
        "id": f"_{package}_{sha256(text.encode()).hexdigest()[:16]}",
        "version": int(version),
        "license": license_id,
        "python-depends": [],
        "backend": {"type": "cuda"},  # the format has no other word for a universal build
    }
    shutil.rmtree(build, ignore_errors=True)
    for file, content in {**files, _METADATA: json.dumps(described, indent=2) + "\n"}.items():
        write_atomically(build / file, content, "choose another folder with --hub")
    return build


def export_wheel(
    names: Sequence[str],
    out: Path,
    folder: Path,
    name: str,
    version: str,
    license_id: str = LICENSE,
) -> Path:
    """Writes a wheel, which depends on torch and triton; the same modules give the same bytes.

    Args:
        names: names of modules.
        out: the folder that they are in.
        folder: the wheel's folder.
        name: the distribution's name; the package is called so too, with underscores.
        version: of the distribution, as in PEP 440.
        license_id: an identifier of SPDX.

    Returns:
        The wheel.

    Raises:
        OutputError: a module is missing or damaged, the name or version is none, or hatchling,
            which builds the wheel, is missing.
    """
    if find_spec("hatchling") is None:
        raise OutputError("--wheel: needs hatchling; run pip install 'flashgen[export]'")
    package = _package(name)
    files = _files(names, out)
    with tempfile.TemporaryDirectory() as scratch:
        project, built = Path(scratch, "project"), Path(scratch, "built")
        (project / package).mkdir(parents=True)
        for file, content in files.items():
            (project / package / file).write_text(content)
        (project / "pyproject.toml").write_text(_project(name, package, version, license_id))
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            raise OutputError(f"--wheel: hatchling builds none: {reason}")
        [wheel] = built.iterdir()
        made = folder / wheel.name
        write_atomically(made, wheel.read_bytes(), "choose another folder with --wheel")
    return made


def _package(name: str) -> str:
    """The package of a name.

    Raises:
        OutputError: no package can be called so.
    """
    package = name.replace("-", "_")
    importable = package.isidentifier() and package.isascii() and not iskeyword(package)
    if not importable or package in _TAKEN:
        raise OutputError(
            f"--name={name}: no name for a package of its own; "
            "write letters, digits and dashes, as in my-attention"
        )
    return package


def _files(names: Sequence[str], out: Path) -> Mapping[str, str]:
    """The files of a package of these modules, by name."""
    listed = sorted(set(names))
    modules = {f"{name}.py": _text(name, out) for name in listed}
    imports = "".join(f"from . import {name}\n" for name in listed)
    public = "".join(f'    "{name}",\n' for name in listed)
    init = f'"""Attention kernels generated by flashgen."""\n\n{imports}\n__all__ = [\n{public}]\n'
    return {_INIT: init, **modules}


def _text(name: str, out: Path) -> str:
    """A module's text.

    Raises:
        OutputError: there is no such module, or it is not as flashgen wrote it.
    """
    if not name.isidentifier():
        raise OutputError(f"{name}: not a module's name; write it without folder and ending")
    module = Place(out, name).module
    if not (content := read_bytes(module)):
        raise OutputError(f"{module}: missing; build it, or name its folder with --out")
    if read_seal(module) is None:
        raise OutputError(f"{module}: damaged or edited by hand; build it again")
    return content.decode()


def _check_replaceable(build: Path) -> None:
    """Raises OutputError where a folder holds what no export wrote."""
    for path in build.iterdir() if build.is_dir() else ():
        exported = path.name in (_METADATA, _INIT, "__pycache__")
        if not exported and (path.is_dir() or not is_generated(path)):
            raise OutputError(
                f"{path}: not exported by flashgen, so not replaced; "
                "move it away, or choose another folder with --hub"
            )


def _project(name: str, package: str, version: str, license_id: str) -> str:
    """A pyproject.toml."""
    needed = "".join(f'    "{requirement}",\n' for requirement in _requirements())
    return f"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = {json.dumps(version)}
description = "Attention kernels generated by flashgen."
license = {json.dumps(license_id)}
requires-python = "{metadata.metadata("flashgen")["Requires-Python"]}"
dependencies = [
{needed}]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


def _requirements() -> Iterator[str]:
    """What modules need, of flashgen's own requirements: torch and triton."""
    for requirement in metadata.requires("flashgen") or ():
        if requirement.startswith(("torch", "triton")):
            yield requirement

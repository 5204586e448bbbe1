"""stamp: whether a build has anything to do, decided before anything is imported or traced.

A stamp belongs to one request, such as ``flashgen build specs --target sm_90``, and says that with
these inputs and these modules it had nothing left to do. The inputs are the text of the spec files
and of their helpers, flashgen's own sources and templates, Python, the installed packages, and the
GPU; `flashgen.inputs` says of which spec files the text tells everything. The modules count with
their tuning results, byte by byte. Where anything differs, or nothing is known, the build goes its
whole way, which leaves an unchanged module alone as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from flashgen.errors import OutputError, SpecFileError
from flashgen.files import lock, write_atomically
from flashgen.inputs import Source, UnknownInputError, find_top, source, spec_files, spec_inputs
from flashgen.paths import PACKAGE, template_dir
from flashgen.place import Place
from flashgen.tuning.device import Gpu, detect_gpu

#: When this process began, about: what is written later may not be what it runs.
_STARTED = time.time_ns()

#: Packages that have a part in a module's text, or in what a spec's functions return.
_PACKAGES = ("sympy", "jinja2", "torch", "triton")


@dataclass(frozen=True)
class Request:
    """What a build is asked for: all of its options but those that make it build anyway.

    Attributes:
        paths: spec files, and folders of them.
        out: the folder of the modules.
        targets: the targets in place of the specs' own.
        forms: the forms besides the specs' own.
        tune: whether kernels are measured that were never measured on this machine's GPU.
        kernels: the keys of the kernels that may be measured.
        package: what the folder is imported as, where that is not its name.
    """

    paths: tuple[Path, ...]
    out: Path
    targets: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    tune: bool = True
    kernels: tuple[str, ...] = ()
    package: str | None = None

    @property
    def stamp(self) -> Path:
        """The file of its stamp."""
        paths = [str(path.absolute()) for path in (*self.paths, self.out)]
        package = self.package or self.out.resolve().name
        asked = (paths, package, self.targets, self.forms, self.tune, self.kernels)
        return self.out / ".flashgen" / f"{_digest(asked)[:32]}.stamp"


@dataclass(frozen=True)
class Seen:
    """The inputs of a build at one moment.

    Attributes:
        digest: of all that decides the modules' texts.
        written: what changes whenever one of the files is written.
        settled: whether all files that a process imports once are older than this one, which then
            runs them as they are: all but the spec files and the helpers beside them.
    """

    digest: str
    written: str
    settled: bool


def up_to_date(request: Request) -> list[str] | None:
    """The names of a request's variants, if it has nothing to do; None if that is not known."""
    try:
        stamp = json.loads(request.stamp.read_bytes())
        names, inputs, modules = stamp["variants"], stamp["inputs"], stamp["modules"]
        gpu = detect_gpu() if request.tune else None
        same = inputs == _look(request, gpu).digest and modules == _modules(request.out, names)
    except (OSError, ValueError, LookupError, TypeError, UnknownInputError, OutputError):
        return None
    return [str(name) for name in names] if same else None


def why_not(request: Request) -> str:
    """Why no stamp is kept for a request, with the line of the spec; empty if one is."""
    try:
        _look(request, None)
    except UnknownInputError as error:
        return str(error).removeprefix(f"{Path.cwd()}{os.sep}")
    return ""


def look(request: Request, gpu: Gpu | None) -> Seen | None:
    """The inputs of a request as they are now; None if the specs' text does not tell them."""
    try:
        return _look(request, gpu)
    except UnknownInputError:
        return None


def _look(request: Request, gpu: Gpu | None) -> Seen:
    try:
        files = [file for path in request.paths for file in spec_files(path)]
        own = [source(path, path.read_bytes()) for path in _own_files()]
        machine = (_python(), _installed(), [_package(name) for name in _PACKAGES])
    except (OSError, SpecFileError) as error:
        raise UnknownInputError(str(error)) from error
    of_specs = {file: spec_inputs(file) for file in files}
    every = [*own, *(each for sources in of_specs.values() for each in sources)]
    contents = [each.meaning for each in every]
    once = [*own, *(each for file in files for each in of_specs[file] if not _is_by(file, each))]
    return Seen(
        digest=_digest((contents, machine, gpu and astuple(gpu))),
        written=_digest([astuple(each) for each in every]),
        settled=all(each.modified < _STARTED for each in once),
    )


def _is_by(file: Path, other: Source) -> bool:
    """Whether a source is a spec file or lies beside it: `flashgen.loader` runs it each time."""
    folder = file.resolve().parent
    return other.path == str(file.absolute()) or Path(other.path).is_relative_to(folder)


def keep(
    request: Request, before: Seen, gpu: Gpu | None, names: Sequence[str], done: Callable[[], bool]
) -> None:
    """Writes a request's stamp, if nothing but the build changed anything in the meantime.

    Args:
        request: what was asked for.
        before: its inputs, as they were before the build read them.
        gpu: this machine's GPU.
        names: of all its variants.
        done: whether all modules are, now, what their specs ask for.
    """
    with suppress(OSError, OutputError):  # a folder that cannot be written has no stamps
        # Between the two looks at the modules their seals are read: another build may write them.
        modules = _modules(request.out, names)
        if not done() or modules != _modules(request.out, names):
            return
        if not before.settled or look(request, gpu) != before:
            return
        stamp = {"variants": list(names), "inputs": before.digest, "modules": modules}
        text = json.dumps(stamp) + "\n"
        if request.stamp.is_file() and request.stamp.read_text() == text:
            return
        with lock(request.stamp.with_suffix(".lock"), on_wait=lambda: None):
            write_atomically(request.stamp, text)


def _modules(out: Path, names: Sequence[str]) -> str:
    """A digest of the modules of these names, their tuning results, and their package."""
    places = [Place(out, name) for name in names]
    held = [
        (place.name, file is not None and file.is_file() and sha256(file.read_bytes()).hexdigest())
        for place in places
        for file in (place.module, place.tuning, place.package_file)
    ]
    return _digest(held)


def _own_files() -> list[Path]:
    """What flashgen is made of: sources, data and templates."""
    found = {path for folder in (PACKAGE, template_dir()) for path in folder.rglob("*.*")}
    return sorted(path for path in found if path.parent.name != "__pycache__" and path.is_file())


def _python() -> tuple[Any, ...]:
    """The interpreter, and its options, such as the one that leaves assertions out."""
    return (sys.version, sys.platform, tuple(sys.flags))


def _package(name: str) -> tuple[Any, ...]:
    """Where a package lies, and when it was installed."""
    spec = find_top(name, sys.path)
    if spec is None or spec.origin is None:
        return (name,)
    found = os.stat(spec.origin)
    return (name, spec.origin, found.st_size, found.st_mtime_ns)


def _installed() -> list[str]:
    """The names of the installed distributions, with their versions."""
    kinds = (".dist-info", ".egg-info")
    names = []
    for folder in sys.path:
        with suppress(OSError):
            names += [name for name in os.listdir(folder or ".") if name.endswith(kinds)]
    return sorted(names)


def _digest(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()

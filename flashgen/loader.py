"""load: spec files -> the variants they declare.

A spec file is ordinary Python. It declares one variant, ``spec = AttentionSpec(...)``, with the
name of the file, or a family, ``specs = [AttentionSpec(..., name="..."), ...]``. In a folder, files
whose names start with an underscore are helpers that spec files may import.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from flashgen.errors import FlashgenError, SpecFileError, SpecInterruptedError, shown
from flashgen.inputs import spec_files
from flashgen.spec import AttentionSpec

#: Python's message for an operator, as of masks, between functions.
_JOINED_FUNCTIONS = re.compile(r"(unsupported|bad) operand type.* [&|^~-]: .*'function'")

HOW_TO_DECLARE = "write spec = AttentionSpec(...), or specs = [AttentionSpec(..., name='...'), ...]"


#: After how many seconds a spec file that still runs is named.
SLOW = 10.0


@dataclass(frozen=True)
class Variant:
    """A spec with its name and the file that declares it, as the user wrote the path, if any."""

    name: str
    spec: AttentionSpec
    file: str | None


def load(paths: Iterable[Path]) -> list[Variant]:
    """Every variant that the files, and the spec files directly in the folders, declare.

    Raises:
        SpecFileError: all mistakes in the files, a line each.
    """
    files: list[Path] = []
    variants: list[Variant] = []
    mistakes: list[str] = []
    for path in paths:
        with _noting(mistakes):
            files.extend(spec_files(path))
    for file in {file.resolve(): file for file in files}.values():
        with _noting(mistakes):
            variants.extend(_declared(file, _run(file)))
    mistakes.extend(_shared_names(variants))
    if mistakes:
        raise SpecFileError("\n".join(mistakes))
    return variants


@contextmanager
def _noting(mistakes: list[str]) -> Iterator[None]:
    """Collects a mistake, so that the next file is still read."""
    try:
        yield
    except SpecFileError as error:
        mistakes.append(str(error))


def _run(file: Path) -> ModuleType:
    """Executes a spec file as a module of its own; writes no bytecode beside it."""
    module = ModuleType(f"flashgen_spec_{file.stem}")
    module.__file__ = str(file.resolve())
    if file.exists() and not file.is_file():  # reading a pipe would wait for a writer
        raise SpecFileError(f"{file}: not a regular file; move it away, or name spec files alone")
    try:
        source = file.read_bytes()
    except OSError as error:
        raise SpecFileError(f"{file}: cannot be read: {error.strerror}; fix that") from error
    try:
        code = compile(source, str(file), "exec", dont_inherit=True)
        # A spec that changes the current folder would change the meaning of the other paths.
        with chdir("."), _importable(module, file.resolve().parent), _told_if_slow(file):
            exec(code, module.__dict__)
    except SyntaxError as error:
        where = Path(error.filename or file)
        raise SpecFileError(f"{where}:{error.lineno}: syntax error: {error.msg}; fix it") from error
    except (Exception, SystemExit) as error:
        raise SpecFileError(_blame(file, error)) from error
    except KeyboardInterrupt as error:
        raise SpecInterruptedError(_blame(file, error)) from error
    return module


@contextmanager
def _told_if_slow(file: Path) -> Iterator[None]:
    """Says on stderr which file runs where it takes long: it may never end."""
    told = f"{file}: has run for {SLOW:.0f} s; Ctrl-C stops it, and shows the line\n"
    timer = threading.Timer(SLOW, sys.stderr.write, [told])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _importable(module: ModuleType, folder: Path) -> Iterator[None]:
    """Makes the module known while it runs, and its folder's helpers importable from it.

    Afterwards it removes both: another folder may have helpers of the same names.
    """
    known = set(sys.modules)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(folder))
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_bytecode
        with suppress(ValueError):  # the file may have changed it
            sys.path.remove(str(folder))
        new = {name for name in set(sys.modules) - known if name.partition(".")[0] not in known}
        for name in [name for name in new if _lies_in(folder, name.partition(".")[0])]:
            del sys.modules[name]


def _lies_in(folder: Path, name: str) -> bool:
    """Whether an imported module, or package, is one of a folder's own."""
    module = sys.modules.get(name)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(Path(place).parent == folder for place in places if place)


def _blame(file: Path, error: BaseException) -> str:
    """The user's line that raised, with Python's own message and, where known, the remedy."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    where = f"{file}:{lines[-1]}" if lines else str(file)
    message = " ".join(str(error).split())
    if isinstance(error, FlashgenError):
        return message if message.startswith(f"{where}: ") else f"{where}: {message}"
    remedy = "a spec file must run by itself"
    if isinstance(error, KeyboardInterrupt):
        return f"{where}: interrupted while it ran; a spec file must come to an end"
    if isinstance(error, TypeError) and "AttentionSpec" in message:
        remedy = f"its fields are {', '.join(f.name for f in fields(AttentionSpec))}"
    if isinstance(error, TypeError) and _JOINED_FUNCTIONS.match(message):
        remedy = (
            "write full() & a & b, (full() & a) | b or ~(full() & a) of functions that are masks"
        )
    return f"{where}: {type(error).__name__}: {message}; {remedy}"


def _declared(file: Path, module: ModuleType) -> list[Variant]:
    """The file's variants, named."""
    names = vars(module)
    if "spec" in names and "specs" in names:
        raise SpecFileError(f"{file}: declares both spec and specs; keep one of them")
    if "spec" in names:
        return [_variant(file, "spec", names["spec"], default_name=file.stem)]
    if "specs" not in names:
        helper = f"or name a helper _{file.name}"
        raise SpecFileError(f"{file}: no spec in it; {HOW_TO_DECLARE}; {helper}")
    family = names["specs"]
    if not isinstance(family, list | tuple) or not family:
        raise SpecFileError(f"{file}: specs={shown(family)}: not a list of specs; {HOW_TO_DECLARE}")
    return [_variant(file, f"specs[{index}]", member) for index, member in enumerate(family)]


def _variant(file: Path, field: str, spec: Any, default_name: str | None = None) -> Variant:
    if not isinstance(spec, AttentionSpec):
        raise SpecFileError(
            f"{file}: {field}={shown(spec)}: not an AttentionSpec; {HOW_TO_DECLARE}"
        )
    name = default_name if spec.name is None else spec.name
    if name is None:
        raise SpecFileError(
            f"{file}: {field}: name=None: a member of a family has no name; "
            f"add name='{file.stem}_...'"
        )
    if not isinstance(name, str):
        raise SpecFileError(f"{file}: {field}: name={shown(name)}: not a string; write name='...'")
    return Variant(name, spec, str(file))


def _shared_names(variants: list[Variant]) -> Iterator[str]:
    """A line for each variant whose name an earlier variant has."""
    first: dict[str, Variant] = {}
    for variant in variants:
        other = first.setdefault(variant.name, variant)
        if other is not variant:
            yield (
                f"{variant.file}: name={variant.name!r}: two specs of one name, the other in "
                f"{other.file}; give one of them another name"
            )

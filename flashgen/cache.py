"""The cache of `flashgen.compile`: a folder of its user's own, since what lies there is executed.

A module's name ends with the digest of all that its text depends on, so that no file is ever
replaced by another text: flashgen's versions, and processes that load one while another is built,
do not meet. Measured results are kept by the digest of the spec, for every version.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import ClassVar

from flashgen.errors import OutputError
from flashgen.files import lock
from flashgen.place import Place
from flashgen.publish import build_digest, is_generated, read_seal
from flashgen.spec import AttentionSpec
from flashgen.tuning.store import load_results

#: The variable that names the folder.
VARIABLE = "FLASHGEN_CACHE_DIR"

REMEDY = f"set {VARIABLE} to another folder"

#: Specs share so many locks: few files, and seldom a wait for another spec's build.
LOCKS = 64

_MODULES, _TUNING, _LOCKS = "modules", "tuning", "locks"


@dataclass(frozen=True)
class CachedPlace(Place):
    """Where the files of a spec lie in the cache.

    Attributes:
        spec: the spec.
    """

    spec: AttentionSpec

    remedy: ClassVar[str] = REMEDY

    @property
    def module(self) -> Path:
        """The module of this flashgen, with the results that are there now."""
        digest = build_digest(self.spec, self)
        return self.out / _MODULES / f"{self.name}_{digest[:32]}.py"

    @property
    def package_file(self) -> None:
        """None: modules are loaded by their paths."""

    @property
    def package(self) -> None:
        """None: `flashgen.compile` returns the module."""

    @property
    def tuning(self) -> Path:
        """Its measured results, of every version of flashgen."""
        return self.out / _TUNING / f"{self.name}_{self.spec.digest[:32]}.json"

    @property
    def lock(self) -> Path:
        """The lock that whoever builds this spec holds."""
        return _lock(self.out, self._number)

    @property
    def turn(self) -> Path:
        """The lock that whoever derives and builds this spec holds, before it asks for the other.

        So of several processes one derives, and the others find its module. A cache that is cleared
        does not wait for it.
        """
        return _lock(self.out, self._number).with_suffix(".turn.lock")

    @property
    def _number(self) -> int:
        return int(self.spec.digest[:8], 16) % LOCKS


def cache_folder() -> Path:
    """The cache of this user: ``FLASHGEN_CACHE_DIR``, else ``flashgen`` in the folder of caches."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(caches).expanduser() / "flashgen").absolute()


def private_cache() -> Path:
    """The cache, made if it is missing.

    Raises:
        OutputError: it cannot be made, or somebody else owns it or may look into it.
    """
    folder = cache_folder()
    for part in (folder, *(folder / name for name in (_MODULES, _TUNING, _LOCKS))):
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir(mode=0o700, exist_ok=True)
            found = part.stat()
        except OSError as error:
            raise OutputError(f"{part}: cannot be made: {error.strerror}; {REMEDY}") from error
        _check_private(part, found)
    return folder


def _check_private(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise OutputError(
            f"{folder}: belongs to user {found.st_uid}, and this process, of user {os.geteuid()}, "
            f"would execute what lies there; {REMEDY}"
        )
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        raise OutputError(
            f"{folder}: is open to other users (mode {mode | 0o700:o}), and what lies there is "
            f"executed; run chmod 700 {folder}, or {REMEDY}"
        )


@dataclass(frozen=True)
class Entry:
    """A module in the cache.

    Attributes:
        path: its file.
        name: the variant's name.
        size: bytes.
        state: ``"whole"``, or ``"damaged or edited"``.
        gpus: the GPUs on which its kernels were measured.
    """

    path: Path
    name: str
    size: int
    state: str
    gpus: tuple[str, ...]


def cached_modules(folder: Path) -> list[Entry]:
    """The modules in a cache, by name."""
    return [_entry(folder, path) for path in sorted((folder / _MODULES).glob("*.py"))]


def _entry(folder: Path, path: Path) -> Entry:
    name = path.stem.rpartition("_")[0]
    seal = read_seal(path, REMEDY) if is_generated(path) else None
    gpus: set[str] = set()
    if seal is not None:
        results = load_results(folder / _TUNING / f"{name}_{seal.spec[:32]}.json")
        gpus = {result.gpu for result in results if result.kernel in seal.kernels.values()}
    state = "whole" if seal else "damaged or edited"
    return Entry(path, name, path.stat().st_size, state, tuple(sorted(gpus)))


def clear_cache(folder: Path, *, measured: bool = False) -> int:
    """Removes the modules of a cache, once no process builds any; the number of modules.

    Args:
        folder: the cache.
        measured: whether measured results are removed, too.

    Raises:
        OutputError: something cannot be removed.
    """
    if not folder.is_dir():
        return 0
    count = len(list((folder / _MODULES).glob("*.py")))
    with _every_lock(folder):
        for path in _files(folder / _MODULES):
            _remove(path)
            _remove(Path(cache_from_source(str(path))))
        for path in _files(folder / _TUNING) if measured else ():
            _remove(path)
    return count


def _files(folder: Path) -> list[Path]:
    """The files in a folder, those that a killed process left among them."""
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


@contextmanager
def _every_lock(folder: Path) -> Iterator[None]:
    """Holds all locks of a cache; whoever builds holds one, and asks for no second of these."""
    with ExitStack() as held:
        for number in range(LOCKS):
            held.enter_context(lock(_lock(folder, number), lambda: None, REMEDY))
        yield


def _lock(folder: Path, number: int) -> Path:
    return folder / _LOCKS / f"{number:02}.lock"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be removed: {error.strerror}; allow that") from error

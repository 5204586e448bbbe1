"""compile: what ``flashgen build`` does, in the process: a spec in, its module out."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flashgen.cache import CachedPlace, private_cache
from flashgen.errors import FlashgenError, TuneError
from flashgen.files import lock
from flashgen.publish import build_digest, is_of_build
from flashgen.spec import AttentionSpec
from flashgen.tuning.device import detect_gpu

if TYPE_CHECKING:
    from flashgen.build import Progress

#: The name of a spec that has none.
NAME = "attention"

#: How often a module is built again that another process removes before it is loaded.
TRIES = 3

#: The modules of this process, and what guards them. Their names have the digest of their text, so
#: that one of another cache is the same, under the name by which pickle finds it.
_loaded: dict[str, ModuleType] = {}
_loading = threading.RLock()


def compiled(spec: AttentionSpec, *, tune: bool = False, tune_seconds: float = 60.0) -> ModuleType:
    """The module of a spec, from the cache or built into it; see `flashgen.compile`."""
    if _is_traced():
        raise RuntimeError(
            "flashgen.compile was called in code that torch.compile traces; call it before, and "
            "use the module's attention in there"
        )
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec: got {type(spec).__name__}; pass an AttentionSpec")
    return cached(spec, tune=tune, tune_seconds=tune_seconds)


def cached(spec: AttentionSpec, *, tune: bool = False, tune_seconds: float = 60.0) -> ModuleType:
    """The same for a spec that is one, also where torch.compile asks for a constant."""
    name = NAME if spec.name is None else spec.name
    if tune:
        _check_gpu(spec)
    place = CachedPlace(private_cache(), name, spec)
    with _loading:
        for _ in range(TRIES):
            if tune or not _is_built(place):
                with lock(place.turn, lambda: None, place.remedy):
                    if tune or not _is_built(place):  # else by whoever had the turn before
                        _build(place, tune, tune_seconds)
            path = place.module
            if path.stem in _loaded:
                return _loaded[path.stem]
            try:
                _loaded[path.stem] = _load(path)
            except FileNotFoundError:  # another process cleared the cache
                continue
            return _loaded[path.stem]
    raise FlashgenError(f"{place.module}: removed while it was loaded; call again")


def _is_built(place: CachedPlace) -> bool:
    """Whether a module is there, without what builds: to import that takes longer."""
    return is_of_build(place.module, build_digest(place.spec, place), place.remedy)


def _build(place: CachedPlace, tune: bool, tune_seconds: float) -> None:
    """Brings the module of a place up to date."""
    from flashgen.build import Options, build_variants
    from flashgen.loader import Variant

    variant = Variant(place.name, place.spec, None)
    with _progress(tune) as progress:
        options = Options(tune=tune, tune_seconds=tune_seconds)
        for _ in build_variants([variant], options, progress, lambda _: place):
            pass


def _is_traced() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _check_gpu(spec: AttentionSpec) -> None:
    gpu = detect_gpu()
    if gpu is None:
        raise TuneError("tune=True: there is no GPU to measure on; leave it out")
    if gpu.target not in spec.targets:
        raise TuneError(
            f"tune=True: {gpu.name} is of {gpu.target}, and the spec's targets are "
            f"{', '.join(spec.targets)}; leave it out, or add the target"
        )


def _progress(tune: bool) -> AbstractContextManager[Progress]:
    """The bars of ``flashgen build``, on stderr, if kernels are measured."""
    if not tune:
        from flashgen.build import Progress

        return nullcontext(Progress())
    from flashgen.console import ProgressBar, make_console

    return ProgressBar(make_console(stderr=True), verbose=False)


def _load(path: Path) -> ModuleType:
    """Executes a module of the cache. It stays known, as torch.compile imports what it traces."""
    name = f"flashgen_cached_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

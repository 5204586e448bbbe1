"""compiled_templates: where Jinja keeps the code of templates, as Python keeps that of modules.

Compiling all templates takes half of the time of a first build. Their code lies in `__pycache__`
beside them, and counts as long as the template, the filters that Jinja may have applied to its
constants, Jinja and Python are the same. Where nothing can be written, templates are compiled anew.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from flashgen.paths import PACKAGE

#: What filters are made of: changes of these files change what constants of templates become.
_FILTERS = ("codegen/*.py", "symbolic/printer/*.py", "place.py")


class CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Code of templates in a folder, for templates whose constants are filtered as now."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        files = sorted(path for pattern in _FILTERS for path in PACKAGE.glob(pattern))
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        self._filters = sha256((text + jinja2.__version__).encode()).hexdigest()

    def get_source_checksum(self, source: str) -> str:
        """Of a template, and of what may be applied to its constants."""
        return super().get_source_checksum(self._filters + source)

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fills in a template's code, if it is there."""
        with suppress(OSError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keeps a template's code, if that is possible."""
        with suppress(OSError):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)


def compiled_templates(folder: Path) -> CompiledTemplates | None:
    """The code of a folder's templates; None where Python keeps no code either."""
    if sys.dont_write_bytecode:
        return None
    beside = importlib.util.cache_from_source(str(folder / "templates.py"))
    return CompiledTemplates(Path(beside).parent)

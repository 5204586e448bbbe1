"""Place: the paths of a variant's files in an output folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import Path
from typing import ClassVar

from flashgen.files import ANOTHER_FOLDER


def is_package_name(name: str) -> bool:
    """Whether Python can import a package by this name."""
    return all(part.isidentifier() and not iskeyword(part) for part in name.split("."))


@dataclass(frozen=True)
class Place:
    """Where a variant's files lie in an output folder.

    Attributes:
        out: the folder.
        name: the variant's.
        named: what the folder is imported as, where that is not its name: ``"mine.kernels"``.
    """

    out: Path
    name: str
    named: str | None = field(default=None, kw_only=True)

    #: What an error about these files tells the user to do.
    remedy: ClassVar[str] = ANOTHER_FOLDER

    @property
    def module(self) -> Path:
        """The published module."""
        return self.out / f"{self.name}.py"

    @property
    def package_file(self) -> Path | None:
        """What makes the folder a package, so that no other ``generated`` comes before it.

        None: modules of the folder are not imported by their names.
        """
        return self.out / "__init__.py"

    @property
    def tuning(self) -> Path:
        """Its measured results."""
        return self.out / "tuning" / f"{self.name}.json"

    @property
    def lock(self) -> Path:
        """The lock that whoever writes the other two holds."""
        return self.out / ".flashgen" / f"{self.name}.lock"

    @property
    def package_lock(self) -> Path:
        """The lock of the package file, which all variants write; none has such a name."""
        return self.out / ".flashgen" / "__init__.lock"

    @property
    def package(self) -> str | None:
        """What the module is imported from; None: `flashgen.compile` returns it."""
        return self.named or self.out.resolve().name

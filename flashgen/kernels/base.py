"""Space: the configurations of a kernel for one target."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.config import KernelConfig


@dataclass(frozen=True)
class Space:
    """What to choose from for one target.

    Attributes:
        candidates: configurations worth trying; none where nothing fits.
        rejected: the others that were looked at, each with the reason in words.
    """

    candidates: tuple[KernelConfig, ...]
    rejected: tuple[tuple[KernelConfig, str], ...]

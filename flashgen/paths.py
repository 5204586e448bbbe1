"""Where flashgen's own files are, installed or in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def template_dir() -> Path:
    """The folder of Jinja templates: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "_templates"
    return installed if installed.is_dir() else PACKAGE.parent / "templates"

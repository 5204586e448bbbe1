"""Where flashgen's own files are, installed or in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent

#: The license of the templates, whose text modules hold: an identifier of SPDX.
LICENSE = "apache-2.0"


def template_dir() -> Path:
    """The folder of Jinja templates: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "_templates"
    return installed if installed.is_dir() else PACKAGE.parent / "templates"

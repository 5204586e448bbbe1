"""environment: the Jinja templates. Rendering is pure: no clock, no device, no output folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import jinja2

from flashgen.codegen.folding import fold, indented, wrap
from flashgen.codegen.unpacking import unpacking
from flashgen.paths import template_dir
from flashgen.plan.text import mentioned


@functools.cache
def environment(
    *, gluon: Callable[[str], str] | None = None, folders: tuple[Path, ...] = ()
) -> jinja2.Environment:
    """The templates; those of Gluon break lines by the width that they have as Gluon's.

    Args:
        gluon: of a kernel in Gluon, what makes Triton source Gluon's.
        folders: where templates lie besides flashgen's own folder.
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template_dir(), *folders]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Python that is rendered
    )
    templates.filters["fold"] = (lambda line: fold(gluon(line))) if gluon else fold
    templates.filters["indented"] = indented
    templates.filters["wrap"] = wrap
    templates.filters["gluon"] = gluon
    templates.filters["unpacking"] = unpacking
    templates.filters["dedent"] = lambda text: re.sub(r"^ {4}", "", text, flags=re.MULTILINE)
    templates.filters["prefix"] = lambda text, prefix: prefix + text
    templates.tests["read_in"] = lambda name, text: bool(mentioned([name], [text]))
    return templates

"""render: the Jinja templates. Rendering is pure: no clock, no device, no output folder."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jinja2

from flashgen.codegen.beside import beside
from flashgen.codegen.compiled import compiled_templates
from flashgen.codegen.folding import fold, indented, wrap
from flashgen.codegen.unpacking import Fields, unpacking
from flashgen.paths import template_dir
from flashgen.place import is_package_name
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.printer.dialects import TRITON, Triton


def render(template: str, dialect: Triton = TRITON, **given: Any) -> str:
    """The text of one of flashgen's own templates, with no empty lines around it.

    Args:
        template: its name.
        dialect: that of the kernel.
        given: what it reads.
    """
    return environment(dialect).get_template(template).render(**given).strip("\n") + "\n"


@functools.cache
def environment(dialect: Triton = TRITON, folders: tuple[Path, ...] = ()) -> jinja2.Environment:
    """The templates, which print code in a dialect.

    Args:
        dialect: that of the kernel.
        folders: where templates lie besides flashgen's own folder.
    """

    def printed(value: Any) -> Any:
        """Code as text; anything else as it is."""
        return value.text(dialect) if isinstance(value, Code) else value

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template_dir(), *folders]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Python that is rendered
        finalize=printed,
        bytecode_cache=compiled_templates(template_dir()),
    )
    templates.globals |= {"tl": dialect.language, "jit": dialect.jit, "suffix": dialect.suffix}
    templates.filters["beside"] = beside
    templates.filters["fold"] = fold
    templates.filters["indented"] = indented
    templates.filters["wrap"] = wrap
    templates.filters["unpacking"] = unpacking
    templates.filters["fields"] = Fields
    templates.filters["dedent"] = lambda text: re.sub(r"^ {4}", "", text, flags=re.MULTILINE)
    templates.filters["prefix"] = lambda text, prefix: prefix + text
    templates.filters["plain"] = plain_source
    templates.filters["printed"] = printed
    templates.tests["package_name"] = is_package_name
    templates.tests["read_in"] = _is_read_in
    return templates


def _is_read_in(name: str, text: str) -> bool:
    """Whether a text has a name as a word; to look for its letters first takes a fraction."""
    return name in text and re.search(rf"\b{name}\b", text) is not None

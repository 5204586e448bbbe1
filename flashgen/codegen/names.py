"""Names that the templates use themselves: a parameter has another one inside of the module."""

from __future__ import annotations

import builtins
import functools
import json
import re
from pathlib import Path

from flashgen.config import FORMS

#: What modules bind, what those with dropout or another form bind besides, and, fixed, what they
#: bind at their top or as arguments. `pytest tests/golden` holds it to what is rendered;
#: ``--update-golden`` writes it.
FILE = Path(__file__).with_name("taken_names.json")

#: What the kernel calls the parts of a tensor: its pointer, sizes and strides, and its tiles.
_PARTS = re.compile(r"_(ptr|size_\d|stride_\d)$|^tiles?_of_")


def is_taken(
    name: str, *, dropout: bool = False, forms: tuple[str, ...] = (), products: bool = False
) -> bool:
    """Whether a parameter of this name would clash with a variable of the generated module.

    Args:
        name: the parameter's.
        dropout: whether the module has dropout.
        forms: the module's forms.
        products: whether the module is of linear attention over all pairs.
    """
    kinds = ["dropout"] * dropout + ["products"] * products
    besides = tuple(kinds + [form for form in forms if form in FORMS[1:]])
    bare = re.sub(r"_\d+$", "", name)
    return bool({name, bare} & _taken(besides)) or bool(_PARTS.search(name))


def is_fixed(name: str, *, dropout: bool = False, forms: tuple[str, ...] = ()) -> bool:
    """Whether no argument can be called so: the function that takes it uses the name itself.

    Args:
        name: the parameter's.
        dropout: whether the module has dropout.
        forms: the module's forms.
    """
    fixed = name in json.loads(FILE.read_text())["fixed"] or hasattr(builtins, name)
    return (fixed or name.startswith("_")) and is_taken(name, dropout=dropout, forms=forms)


@functools.cache
def _taken(besides: tuple[str, ...]) -> frozenset[str]:
    found = json.loads(FILE.read_text())
    further = (found.get(name, ()) for name in besides)
    return frozenset(dir(builtins)).union(found["always"], *further)

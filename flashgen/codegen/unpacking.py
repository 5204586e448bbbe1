"""unpacking: the lines that take apart the tuples which a function's body reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flashgen.codegen.folding import fold


def unpacking(body: str, **tuples: Iterable[str]) -> str:
    """The body after a line for each tuple that it reads something of: ``_, q_len = call``.

    Args:
        body: statements of a function.
        tuples: for each variable that holds one, the names of its elements; one that is itself an
            element of another comes after it.
    """
    indent = body[: len(body) - len(body.lstrip())].split("\n")[-1]
    for variable, elements in reversed(tuples.items()):
        code = re.sub(r"#.*", "", body)  # in which `name=` is a keyword
        read = {name for name in elements if re.search(rf"(?<!\.)\b{name}\b(?!=[^=])", code)}
        names = [name if name in read else "_" for name in elements]
        if set(names) <= {"_"}:
            continue
        if len(names) == 1:
            body = f"{indent}{names[0]} = {variable}[0]\n{body}"
        else:
            body = fold(f"{indent}{', '.join(names)} = {variable}") + body
    return body

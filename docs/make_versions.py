"""Makes the table of docs/versions.md from docs/versions.json.

    python -m docs.make_versions    writes it

What Tritons' compilers say of the kernels, `support.compiling.record` puts into the JSON.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE, RECORD = FOLDER / "versions.md", FOLDER / "versions.json"

BEGIN, END = "<!-- table: docs.make_versions -->\n", "<!-- end of the table -->\n"


def table(record: dict[str, Any]) -> str:
    """Every kernel of every module: shared memory, and registers and spills by Triton."""
    versions = list(record)
    lines = [
        f"| module | kernel | shared memory | {' | '.join(versions)} |",
        f"| --- | --- | ---: |{' ---: |' * len(versions)}",
    ]
    for module, kernels in record[versions[0]].items():
        for kernel in kernels:
            figures = [record[version][module][kernel] for version in versions]
            cells = " | ".join(f"{x['registers']}, {x['spilled']}" for x in figures)
            lines.append(f"| {module} | `{kernel}` | {shared(figures, versions)} | {cells} |")
    return "\n".join(lines) + "\n"


def shared(figures: list[dict[str, Any]], versions: list[str]) -> str:
    """Bytes that each compiler allots; the prediction beside one that it is not equal to."""
    sizes = [f"{x['shared']:,}" for x in figures]
    others = [
        f"{size} in {version}"
        for size, version in zip(sizes, versions, strict=True)
        if size != sizes[-1]
    ]
    unequal = [
        f"predicted {x['predicted']:,} for {version}"
        for x, version in zip(figures, versions, strict=True)
        if x["predicted"] != x["shared"]
    ]
    return "; ".join([sizes[-1], *others, *unequal])


def page() -> str:
    """The page with the table of the record."""
    text = PAGE.read_text()
    made = BEGIN + "\n" + table(json.loads(RECORD.read_text())) + "\n" + END
    return re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: made, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())

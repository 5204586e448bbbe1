"""What commands share: their options, completion of words, and output as JSON alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from flashgen.budget.targets import TARGETS
from flashgen.config import FORMS

#: What names stdout in place of a file.
STDOUT = Path("-")


def starting(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a word that a shell is about to take for one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def modules(context: typer.Context, incomplete: str) -> list[str]:
    """Completes a word to the modules of the folder that ``--out`` names."""
    found = Path(context.params.get("out") or "generated").glob(f"{incomplete}*.py")
    return sorted(path.stem for path in found if not path.stem.startswith("_"))


Out = Annotated[Path, typer.Option("--out", help="Folder of the generated modules.")]
Specs = Annotated[list[Path], typer.Argument(help="Spec files, or folders of them.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help=f"GPU target instead of the spec's: {', '.join(TARGETS)}. Repeatable.",
        autocompletion=starting(TARGETS),
    ),
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help=f"Form to add to the spec's: {', '.join(FORMS[1:])}. Repeatable.",
        autocompletion=starting(FORMS[1:]),
    ),
]

PackageName = Annotated[
    str | None,
    typer.Option(
        "--package", help="What the folder is imported as, as in mine.kernels; by default its name."
    ),
]


def for_json_alone(json: Path | None) -> AbstractContextManager[Any]:
    """Where stdout is for JSON, what specs print goes to stderr."""
    return redirect_stdout(sys.stderr) if json == STDOUT else nullcontext()


def write_json(path: Path, text: str) -> None:
    """Writes the data that a command was asked for, to stdout or to a file."""
    if path == STDOUT:
        typer.echo(text, nl=False)
    else:
        from flashgen.files import write_atomically

        write_atomically(path, text, "choose another place with --json")

"""Common parts of the benchmarks' commands: arguments, the check for a GPU, the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.figures import Document
from benchmarks.record import layout
from flashgen.files import write_atomically


def make_parser(
    benchmark: str, description: str | None, *, keeps: bool = False, with_fa4: bool = False
) -> argparse.ArgumentParser:
    """A parser that knows ``--json``; the description keeps its lines.

    Args:
        benchmark: its module's name, ``"forward"``.
        description: the command's description, for its help.
        keeps: whether results have to be written, not only shown.
        with_fa4: whether it knows ``--fa4``.
    """
    parser = argparse.ArgumentParser(f"python -m benchmarks.{benchmark}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    said = "file for the results" if keeps else "where the figures are written too"
    parser.add_argument("--json", type=Path, required=keeps, help=said)
    if with_fa4:
        parser.add_argument("--fa4", action="store_true", help="FlashAttention 4 too, if installed")
    return parser


def sees_gpu(benchmark: str) -> bool:
    """Whether torch has a CUDA GPU to measure; prints a message if it has none."""
    if not torch.cuda.is_available():
        print(f"benchmarks.{benchmark} measures a CUDA GPU; torch sees none", file=sys.stderr)
        return False
    return True


def write_results(document: Document, path: Path) -> None:
    """Writes a whole file of results, in the form of `layout`.

    Raises:
        OutputError: the file cannot be written.
    """
    write_atomically(path, layout(document), "choose another place with --json")


def tell(document: Document, table: Callable[[Document], str], path: Path | None) -> None:
    """Writes the results, if a file is given, and prints them as a table."""
    if path:
        write_results(document, path)
    print(table(document))

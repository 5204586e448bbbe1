"""The lines of functions, as `inspect` finds them."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FunctionType

import pytest

from support.source_lines import lines_of
from support.variants import import_file, shipped_module


@pytest.mark.parametrize("name", ["causal_d64", "documents_d128"])
def test_they_are_those_that_inspect_finds(name: str) -> None:
    module = shipped_module(name)
    functions = [getattr(value, "fn", value) for value in vars(module).values()]
    here = [one for one in functions if isinstance(one, FunctionType)]
    here = [one for one in here if one.__code__.co_filename == module.__file__]
    assert len(here) > 40
    for function in here:
        assert lines_of(function) == inspect.getsourcelines(function)


def test_other_functions_are_left_to_inspect() -> None:
    number = 3

    def closed() -> int:
        return number

    assert lines_of(closed) is None
    assert lines_of(lambda: 3) is None  # type: ignore[arg-type]


def test_files_may_be_gone_or_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "module_of_two.py"
    path.write_text("x = 1\n\n\ndef one():\n    return 1\n")
    one = import_file(path).one
    assert lines_of(one) == (["def one():\n", "    return 1\n"], 4)
    path.write_text("def two(\n    x,\n):\n    # A comment.\n\n    return 2 * x\n\n\n# Another.\n")
    two = import_file(path).two
    assert lines_of(two) == inspect.getsourcelines(two)
    path.unlink()
    assert lines_of(two) is None

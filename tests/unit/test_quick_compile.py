"""Code of rendered modules, compiled function by function."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType

import pytest

from support.quick_compile import compiled
from support.variants import GENERATED


def _functions(codes: Iterable[CodeType]) -> Iterator[tuple[str, str, int, set[int | None]]]:
    """(name, file, first line, lines) of each, in the order of the source."""
    for code in codes:
        for x in code.co_consts:
            if isinstance(x, CodeType):
                lines = {line for _, _, line in x.co_lines()}
                yield x.co_qualname, x.co_filename, x.co_firstlineno, lines
                yield from _functions([x])


def test_functions_have_the_lines_that_they_have_in_the_whole_module() -> None:
    """Also where the same functions were compiled before, further up in another file.

    A code that is not moved, or moved without its inner functions, has others.
    """
    source = (GENERATED / "causal_d64.py").read_text()
    for moved, path in ((source, "here.py"), ("# One line more.\n" + source, "there.py")):
        whole = list(_functions([compile(moved, path, "exec")]))
        codes = compiled(moved, path)
        assert len(codes) > 100
        assert list(_functions(codes)) == whole


def test_a_text_with_empty_lines_stays_whole() -> None:
    scope: dict[str, object] = {}
    for code in compiled('x = """a\n\n\nb"""\n\n\ny = 1\n', "here.py"):
        exec(code, scope)
    assert (scope["x"], scope["y"]) == ("a\n\n\nb", 1)


def test_an_error_is_that_of_the_whole_module() -> None:
    with pytest.raises(SyntaxError) as error:
        compiled("x = 1\n\n\ny = (\n", "here.py")
    assert (error.value.filename, error.value.lineno) == ("here.py", 4)


@pytest.mark.parametrize("folder", ["modules", "others"])
def test_imports_of_the_cache_compile_no_whole_module(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go Python's way, which keeps bytecode beside them."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "flashgen" / folder / "made.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 2\n\n\ndef f():\n    return x\n")
    spec = spec_from_file_location("made", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.f() == 2 and module.f.__code__.co_filename == str(path)
    assert module.f.__code__.co_firstlineno == 4
    assert (path.parent / "__pycache__").exists() == (folder == "others")

"""Templates are compiled once, and again when they, or what filters their constants, change."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import pytest

from flashgen.codegen import compiled
from flashgen.codegen.compiled import CompiledTemplates, compiled_templates


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jinja").write_text('{{ "some" | loud }} {{ x }}')
    return tmp_path


def _rendered(folder: Path, cache: jinja2.BytecodeCache | None, loud: str = "!") -> str:
    loader = jinja2.FileSystemLoader(folder)
    templates = jinja2.Environment(loader=loader, bytecode_cache=cache)
    templates.filters["loud"] = lambda text: text + loud
    return templates.get_template("a.jinja").render(x=1)


def test_another_process_parses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder / "kept"
    assert _rendered(folder, CompiledTemplates(cache)) == "some! 1"
    monkeypatch.delattr(jinja2.Environment, "_parse")
    assert _rendered(folder, CompiledTemplates(cache)) == "some! 1"


def test_a_new_text_counts(folder: Path) -> None:
    cache = folder / "kept"
    _rendered(folder, CompiledTemplates(cache))
    (folder / "a.jinja").write_text("other {{ x }}")
    assert _rendered(folder, CompiledTemplates(cache)) == "other 1"


def test_so_does_a_new_filter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja applies it to constants once and for all."""
    package = folder / "package"
    (package / "codegen").mkdir(parents=True)
    monkeypatch.setattr(compiled, "PACKAGE", package)
    for loud in ("!", "?"):
        (package / "codegen" / "filters.py").write_text(f"LOUD = {loud!r}\n")
        assert _rendered(folder, CompiledTemplates(folder / "kept"), loud) == f"some{loud} 1"


def test_the_files_of_filters_are_found() -> None:
    for pattern in compiled._FILTERS:
        assert list(compiled.PACKAGE.glob(pattern)), pattern


def test_where_nothing_can_be_written_templates_are_compiled(folder: Path) -> None:
    (folder / "kept").write_text("no folder")
    for _ in range(2):
        assert _rendered(folder, CompiledTemplates(folder / "kept")) == "some! 1"


def test_what_is_broken_is_compiled_anew(folder: Path) -> None:
    cache = folder / "kept"
    _rendered(folder, CompiledTemplates(cache))
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert _rendered(folder, CompiledTemplates(cache)) == "some! 1"


def test_it_goes_where_python_puts_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    found = compiled_templates(folder)
    assert found is not None and Path(found.directory) == folder / "__pycache__"
    monkeypatch.setattr("sys.pycache_prefix", os.fspath(folder / "elsewhere"))
    found = compiled_templates(folder)
    assert found is not None and folder / "elsewhere" in Path(found.directory).parents
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert compiled_templates(folder) is None

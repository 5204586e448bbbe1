"""Functions as templates render them: fields taken apart, lines folded, empty ones dropped."""

from __future__ import annotations

from flashgen.codegen.functions import laid_out

HELD = {"call": ("q_len", "kv_len"), "buffers": ("tiles", "slots"), "tiles": ("k_tiles",)}


def test_fields_that_are_read_come_behind_the_docstring() -> None:
    text = 'def f(call, N):\n    """Of q_len.\n\n    More.\n    """\n    g(kv_len)\n'
    body = "    kv_len = call.kv_len\n    g(kv_len)\n"
    assert laid_out(text, HELD) == text.replace("    g(kv_len)\n", body)


def test_a_field_of_a_field() -> None:
    assert laid_out("def f(buffers):\n    g(k_tiles)\n", HELD) == (
        "def f(buffers):\n    tiles = buffers.tiles\n    k_tiles = tiles.k_tiles\n    g(k_tiles)\n"
    )


def test_parameters_are_no_fields() -> None:
    text = "def f(call, q_len):\n    g(q_len)\n"
    assert laid_out(text, HELD) == text


def test_functions_without_aggregates_stay() -> None:
    text = "X = 1\n\n\n@jit\ndef f(x):\n    g(x, q_len)\n\n\ndef call(y):\n    q_len = y\n"
    assert laid_out(text, HELD) == text


def test_empty_lines_of_bodies_go_and_those_between_functions_are_two() -> None:
    text = "def f():\n    a()\n    \n\n    b()\n\n\n\n\n\ndef g():\n    \n    a()\n"
    assert laid_out(text, {}) == "def f():\n    a()\n    b()\n\n\ndef g():\n    a()\n"


def test_signatures_and_statements_are_folded() -> None:
    names = ", ".join(f"parameter_{i}" for i in range(9))
    text = laid_out(f"def f({names}):\n    return g({names})\n", {})
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("def f(\n")

"""Tuples taken apart for what a function's body reads of them."""

from __future__ import annotations

from flashgen.codegen.unpacking import Fields, unpacking

CALL = ("q_len", "kv_len", "scale")


def test_names_that_are_not_read_are_underscores() -> None:
    body = "    end = kv_len - 1\n"
    assert unpacking(body, call=CALL) == f"    _, kv_len, _ = call\n{body}"


def test_nothing_read_is_no_line() -> None:
    body = "    x = 1  # of kv_len\n    f(scale=x)\n    x.q_len()\n"
    assert unpacking(body, call=CALL) == body


def test_one_element() -> None:
    assert unpacking("    f(row)\n", rows=["row"]) == "    row = rows[0]\n    f(row)\n"


def test_an_element_that_is_a_tuple_itself_is_read_for_its_own() -> None:
    text = unpacking("    load(k_full)\n", buffers=["tiles", "full"], full=["q_full", "k_full"])
    assert text == "    _, full = buffers\n    _, k_full = full\n    load(k_full)\n"


def test_long_lines_are_broken() -> None:
    names = [f"a_name_of_some_length_{i}" for i in range(5)]
    first = unpacking(f"    f({', '.join(names)})\n", call=names).splitlines()[0]
    assert first == "    ("


def test_an_aggregate_is_read_field_by_field() -> None:
    text = unpacking("    f(q_len, PACKED)\n", call=Fields(("PACKED", "q_len", "kv_len")))
    assert text == (
        "    PACKED: gl.constexpr = call.PACKED\n    q_len = call.q_len\n    f(q_len, PACKED)\n"
    )

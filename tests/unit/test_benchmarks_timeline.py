"""Marks in Gluon forward kernels, and what is made of the clocks that they note."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from benchmarks import timeline
from benchmarks.marks import (
    MOST_TILES,
    NEVER,
    Interval,
    intervals,
    marked,
    memory_for,
    passages,
    statements_of,
)
from support.variants import GENERATED, gluon_specs

GLUON = [*gluon_specs()]
CPU = torch.device("cpu")


def text_of(name: str) -> str:
    return (GENERATED / f"{name}.py").read_text()


@cache
def marked_text(name: str) -> str:
    return marked(text_of(name), 1 << 40, 7)


@cache
def statements(name: str) -> list[str]:
    return statements_of(text_of(name))


@pytest.mark.parametrize("name", GLUON)
def test_marks_stand_behind_their_statements(name: str) -> None:
    text = text_of(name)
    found = statements(name)
    lines = marked_text(name).splitlines()
    compile("\n".join(lines), name, "exec")
    calls = [i for i, line in enumerate(lines) if line.strip().startswith("_mark(")]
    assert [re.findall(r"_mark\((\d+)", lines[i])[0] for i in calls] == [
        *map(str, range(len(found)))
    ]
    definition = next(i for i, line in enumerate(lines) if line.startswith("MARKS: "))
    end = next(i for i in range(definition, len(lines)) if "gl.store(address, now" in lines[i])
    left = [
        line for i, line in enumerate(lines) if i not in calls and not definition <= i <= end + 2
    ]
    assert left == text.splitlines()
    indents = [len(lines[i]) - len(lines[i].lstrip()) for i in calls]
    for statement, i, indent in zip(found, calls, indents, strict=True):
        number, first = statement.split(": ", 1)
        start = next(j for j in range(i, 0, -1) if lines[j].strip() == first)
        assert (
            lines[start].startswith(" " * indent + first)
            and text.splitlines()[int(number) - 1].strip() == first
        )


@pytest.mark.parametrize("name", GLUON)
def test_every_role_has_marks(name: str) -> None:
    calls = "\n".join(statements(name))
    for awaited in (
        "work_full",
        "q_full",
        "work_empty",
        "_load_qk(",
        "_load_v(",
    ):
        assert awaited in calls
    pairs = {"kv_full", "_load_kv("}
    apart = {"wait(k_full", "wait(v_full"}
    assert any(all(x in calls for x in of_keys) for of_keys in (pairs, apart))
    text = marked_text(name)
    roles = re.findall(r"_mark\(\d+, kv_count, (\w+)\)", text)
    assert {"NUMBER", "CONSUMERS"} == {*roles}


def test_a_module_without_a_gluon_kernel_has_none() -> None:
    assert statements_of(text_of("causal_fp32_d64")) == []


def test_the_room_for_marks() -> None:
    memory = memory_for(33, CPU)
    assert memory.shape == (4, MOST_TILES, 33)
    assert memory.dtype == torch.int32 and (memory == NEVER).all()


@pytest.mark.parametrize("start", [5, -4, 2**31 - 35, -(2**31) + 40])
def test_intervals_of_a_clock_that_turns(start: int) -> None:
    """The producer passes 1 and 0; a consumer 2, 3, and for the next tile of keys 2, 3 again."""
    memory = torch.full((4, 8, 4), NEVER, dtype=torch.int32)

    def note(role: int, tile: int, statement: int, cycle: int) -> None:
        clock = (start + cycle + (1 << 31)) % (1 << 32) - (1 << 31)
        memory[role, tile, statement] = clock

    note(3, 0, 1, 0)
    note(3, 0, 0, 100)
    for tile, cycle in ((0, 10), (1, 60)):
        note(0, tile, 2, cycle)
        note(0, tile, 3, cycle + 20)
    assert passages(memory) == [[(2, 10), (3, 30), (2, 60), (3, 80)], [], [], [(1, 0), (0, 100)]]
    assert intervals(passages(memory)) == [
        Interval(0, 2, 3, times=2, cycles=40),
        Interval(0, 3, 2, times=1, cycles=30),
        Interval(3, 1, 0, times=1, cycles=100),
    ]


def test_nothing_was_passed() -> None:
    assert passages(torch.full((4, 8, 4), NEVER, dtype=torch.int32)) == [[], [], [], []]


ENVIRONMENT = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}


def test_the_table() -> None:
    found = {
        "cell": "window_d128 S=16384",
        "program": 7,
        "call_ms": {"shipped": 0.25, "marked": 0.3},
        "cycles": 1000,
        "statements": ["10: first()", "12: second()"],
        "intervals": [
            {"role": 0, "begin": 0, "end": 1, "times": 4, "cycles": 500},
            {"role": 0, "begin": 1, "end": 0, "times": 1, "cycles": 1},
        ],
    }
    shown = timeline.timeline_table({"environment": ENVIRONMENT, "timeline": found})
    assert "1,000 cycles" in shown and "0.2500 ms, with marks 0.3000" in shown
    assert "| 0 | `10: first()` | `12: second()` | 4 | 125 | 50.0% |" in shown
    assert "`12: second()` | `10: first()`" not in shown  # a thousandth of the time


@pytest.mark.parametrize("arguments", [["window"], ["window_d128", "--length", "17"]])
def test_a_cell_that_there_is_not(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        timeline.main(arguments)
    assert "no cell has" in capsys.readouterr().err

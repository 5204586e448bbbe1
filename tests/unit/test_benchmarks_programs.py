"""Notes of when programs begin and end, and what is made of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import programs
from benchmarks.programs import memory_for, noted, programs_table, summary
from support.variants import GENERATED, gluon_specs


@pytest.mark.parametrize("name", [*gluon_specs()])
def test_notes_stand_where_consumers_begin_and_end(name: str) -> None:
    text = (GENERATED / f"{name}.py").read_text()
    lines = noted(text, 1 << 40).splitlines()
    compile("\n".join(lines), name, "exec")
    calls = [i for i, line in enumerate(lines) if line.strip().startswith("_note(")]
    assert [lines[i].strip() for i in calls] == [f"_note({n}, NUMBER)" for n in range(3)]
    begin, first, end = calls
    assert lines[begin].startswith("    _note") and lines[end].startswith("    _note")
    assert lines[first - 1].strip() == "if q_count == 0:"
    assert lines[begin + 1].startswith("    q_count = 0")
    waits = [i for i, line in enumerate(lines) if "= warpgroup_mma_wait(" in line and i > begin]
    assert first + 1 == waits[0]
    assert lines[end + 1 : end + 3] == ["", ""] and lines[end - 1].startswith("    ")
    definition = next(i for i, line in enumerate(lines) if line.startswith("NOTES: "))
    after = next(i for i in range(definition, len(lines)) if "gl.store(ptr + 1" in lines[i]) + 3
    added = {*calls, first - 1, *range(definition, after)}
    left = [x for i, x in enumerate(lines) if i not in added]
    assert left == text.splitlines()


def test_a_module_without_a_gluon_kernel() -> None:
    with pytest.raises(ValueError, match="no Gluon forward kernel"):
        noted((GENERATED / "causal_fp32_d64.py").read_text(), 1 << 40)


@pytest.mark.parametrize("start", [17, 2**31 - 3000, -5000])
def test_two_programs_of_two_consumers(start: int) -> None:
    """Of three that there is room for; the timer passes the end of its 32 bits."""
    memory = memory_for(3, torch.device("cpu"))
    #            begin, first scores, end in ns; a cycle takes half of one
    moments = {
        (0, 0): (0, 4000, 20000),
        (0, 1): (100, 5000, 22000),
        (1, 0): (300, 3000, 16000),
        (1, 1): (200, 3500, 11000),
    }
    for (program, consumer), at in moments.items():
        for moment, ns in enumerate(at):
            numbers = ((start + ns), 2 * ns - 12345)
            clocks = [(x + (1 << 31)) % (1 << 32) - (1 << 31) for x in numbers]
            memory[program, consumer, moment] = torch.tensor(clocks, dtype=torch.int32)
    found = summary(memory)
    assert found["programs"] == 2
    assert found["us"]["begin"] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert found["us"]["first scores"] == pytest.approx([3.0, 3.0, 3.5, 4.0])
    assert found["us"]["end"] == pytest.approx([16.0, 16.0, 19.0, 22.0])
    assert found["mhz"] == pytest.approx(2000)
    assert found["idle"] == pytest.approx(1 - 19 / 22)


def test_the_table() -> None:
    found = {
        "cell": "window_d128 S=16384",
        "call_ms": {"shipped": 0.25, "noted": 0.26},
        "programs": 132,
        "us": {"begin": [0.0, 0.1, 0.1, 0.3], "end": [213.7, 223.0, 223.3, 235.4]},
        "mhz": 1465.2,
        "idle": 0.0514,
    }
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    shown = programs_table({"environment": environment, "programs": found})
    assert "132 programs of window_d128 S=16384" in shown and "with notes 0.2600" in shown
    assert "| end | 213.7 | 223.0 | 223.3 | 235.4 |" in shown
    assert "Idle at the end: 5.1%. The clock: 1,465 MHz." in shown


def test_a_cell_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        programs.main(["window"])
    assert "no cell has" in capsys.readouterr().err

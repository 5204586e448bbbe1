"""Compiling in the background: what waits, what is measured, who is stopped, and that all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import early as early_module
from benchmarks import turns as turns_module
from benchmarks.early import Early, Outcome, Task
from benchmarks.figures import OWN
from benchmarks.turns import Plan, Turn, turns, with_room
from support import early_tasks
from support.hurried import Hurried

#: Seconds in which a process begins, also on a machine that does much else.
SOON = 30.0


def task(key: str, function: Callable[..., Any] = early_tasks.quick, *given: Any) -> Task:
    return Task(key, function, given)


def until(early: Early, *keys: str) -> None:
    """Waits for tasks to end."""
    ends = time.perf_counter() + SOON
    while any(early.outcome(key) is None for key in keys):
        assert time.perf_counter() < ends, f"{keys} did not end"
        early.poll(0.1)


def grows(file: Path, seconds: float) -> bool:
    before = file.stat().st_size if file.exists() else 0
    time.sleep(seconds)
    return file.exists() and file.stat().st_size > before


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids(early: Early) -> list[int]:
    return [worker.process.pid for worker in early._workers]


def measured(plans: list[Plan[str]], early: Early, seconds: float = 0.0) -> list[Turn[str]]:
    found = []
    for turn in turns(plans, early):
        found.append(turn)
        time.sleep(seconds)
    return found


def test_outcomes_of_tasks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = [
        task("quick"),
        task("told", early_tasks.quick, "an error"),
        task("failing", early_tasks.failing),
        task("dying", early_tasks.dying),
        task("crowded", early_tasks.crowded_once, str(tmp_path / "been")),
    ]
    with Early(given, 2, 100.0) as early:
        until(early, *(x.key for x in given))  # type: ignore[arg-type]
        early.poll()
        assert early.is_over and not pids(early)  # idle processes hold memory of the GPU
    assert early.outcome("quick") == early.outcome("crowded") == Outcome()
    assert early.outcome("told") == Outcome("an error")
    assert early.outcome("failing") == Outcome("RuntimeError: no such kernel")
    assert early.outcome("dying") == Outcome("its process died while compiling", died=True)
    assert "failing: RuntimeError: no such kernel" in capfd.readouterr().err


def test_nothing_runs_while_measuring_and_all_end(tmp_path: Path) -> None:
    """Not the process, nor what it started."""
    own, child = tmp_path / "x", tmp_path / "x.child"
    with Early([task("endless", early_tasks.endless, str(own))], 1, 100.0) as early:
        ends = time.perf_counter() + SOON
        while not (own.exists() and child.exists()) and time.perf_counter() < ends:
            early.poll(0.05)
        (pid,) = pids(early)
        for _ in range(3):
            assert grows(own, 0.3) and grows(child, 0.3)
            with early.paused():
                assert not grows(own, 0.3) and not grows(child, 0.1)
        assert early.unfinished == ["endless"]
    assert not alive(pid) and not grows(child, 0.2)


def test_all_end_after_an_error_within_a_pause(tmp_path: Path) -> None:
    found: list[int] = []

    def fails() -> None:
        with Early([task("stuck", early_tasks.endless)], 1, 100.0) as early:
            early.poll(0.1)
            found.extend(pids(early))
            with early.paused():
                raise ValueError("wrong results")

    with pytest.raises(ValueError, match="wrong results"):
        fails()
    assert found and not any(map(alive, found))


def test_a_stuck_task_is_killed_and_the_next_gets_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of pauses is not the task's."""
    monkeypatch.setattr(early_module, "ALLOWED_SECONDS", 3.0)
    given = [task("stuck", early_tasks.endless), task("next")]
    with Early(given, 1, 100.0) as early:
        early.poll(0.1)
        with early.paused():
            time.sleep(3.1)
        early.poll()
        assert early.outcome("stuck") is None
        until(early, "stuck", "next")
    assert early.outcome("stuck") == Outcome("not compiled within 3 s", late=True)
    assert early.outcome("next") == Outcome()


def test_a_pause_that_stalls_kills_and_tasks_begin_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(early_module, "STALLED", 0.2)
    with Early([task("one", early_tasks.after, 0.5)], 1, 100.0) as early:
        early.poll(0.1)
        (pid,) = pids(early)
        with early.paused():
            time.sleep(0.6)
            assert not alive(pid)
        until(early, "one")
        assert early.outcome("one") == Outcome()


def test_a_stuck_peer_keeps_nobody_from_being_measured() -> None:
    """Of two peers one is stuck: cells wait for it a while, those that do not need it do not."""
    given = [task("own"), task("flex"), task("fa4", early_tasks.endless), task("other own")]
    plans = [
        Plan("first", ["own"], {"Flex": ["flex"], "FA4": ["fa4"]}),
        Plan("second", ["other own"], {"Flex": ["flex"]}),
    ]
    with Hurried(given, 2, 9.0) as early:
        found = measured(plans, early)
        assert early.passed < 9.0 + 1.0
    assert [turn.cell for turn in found] == ["second", "first"]
    assert not found[0].without and [*found[1].without] == ["FA4"]
    assert found[1].without["FA4"].startswith("not in time: not compiled after ")
    assert not any(turn.again for turn in found)


def test_a_late_peer_is_measured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PATIENCE", 0.0)
    given = [task("own"), task("fla 0"), task("fla 1", early_tasks.after, 2.0)]
    plans = [Plan(name, ["own"], {"fla": ["fla 0", "fla 1"]}) for name in "ab"]
    with Early(given, 3, 60.0) as early:
        found = measured(plans, early)
        assert early.passed < 30.0  # what has nothing to wait for ends
    assert [(turn.cell, turn.again, [*turn.without]) for turn in found] == [
        ("a", False, ["fla"]),
        ("b", False, ["fla"]),
        ("a", True, []),
        ("b", True, []),
    ]


def test_who_failed_is_left_out_with_the_reason() -> None:
    given = [task("own", early_tasks.failing), task("fla 0", early_tasks.failing)]
    given += [task("fla 1", early_tasks.endless), task("dead", early_tasks.dying)]
    plans = [Plan("a", ["own"], {"fla": ["fla 0", "fla 1"]}), Plan("b", ["dead"])]
    with Early(given, 4, 60.0) as early:
        found = []
        for turn in turns(plans, early):
            found.append(turn)
            if len(found) == 2:
                break
        assert early.passed < 27.0  # nobody waits for the rest of a peer that failed
    reasons = {turn.cell: turn.without for turn in found}
    # What fails for flashgen fails again, and is told then; what kills a process is not tried.
    assert reasons["a"] == {"fla": "RuntimeError: no such kernel"}
    assert reasons["b"] == {OWN: "its process died while compiling"}


def test_no_cell_begins_that_would_not_end() -> None:
    with Early([], 0, 2.0) as early:
        found = measured([Plan(name, []) for name in "abcd"], early, 0.8)
        assert early.passed < 2.0
    assert [turn.cell for turn in found] == ["a", "b"]


def test_without_processes_all_is_compiled_while_measuring() -> None:
    given = [task("own", early_tasks.failing), task("peer", early_tasks.endless)]
    with Early(given, 0, 100.0) as early:
        found = measured([Plan("a", ["own"], {"peer": ["peer"]})], early)
    assert found == [Turn(0, "a", {})]


def test_the_most_important_begin_first() -> None:
    given = [task(str(number)) for number in range(4)]
    with Early(given, 1, 100.0) as early:
        found = measured([Plan(str(number), [str(number)]) for number in range(4)], early)
    assert [turn.cell for turn in found] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_cell_without_memory_is_measured_again_once_processes_are_gone(raises: bool) -> None:
    with Early([task("one", early_tasks.after, 1.0)], 1, 100.0) as early:
        early.poll(0.1)
        (pid,) = pids(early)

        def measured() -> dict[str, Any]:
            if alive(pid) and raises:
                raise RuntimeError("CUDA out of memory")
            return {"unavailable": {OWN: "CUDA Out of memory"} if alive(pid) else {}}

        with early.paused():
            assert with_room(early, measured) == {"unavailable": {}}
        until(early, "one")
        assert early.outcome("one") == Outcome()
        early.poll()
        with pytest.raises(RuntimeError, match="out of memory"):
            with_room(early, refusing)


def refusing() -> dict[str, Any]:
    raise RuntimeError("CUDA out of memory")


def test_a_cell_of_a_long_kind_keeps_no_short_ones_from_being_measured() -> None:
    """Kernels of the first time are slow, with a peer: such a cell is measured alone in the end."""
    of = {"a": "1", "b": "1", "c": "2", "d": "2", "e": "3", "f": "2"}
    plans = [Plan(name, ["own"], {"fla": [key]}) for name, key in of.items()]
    with Early([], 0, 4.2) as early:
        early._outcomes = {key: Outcome() for key in ("own", *of.values())}
        found = []
        for turn in turns(plans, early):
            found.append((turn.cell, [*turn.without]))
            time.sleep(1.5 if turn.cell in "ac" else 0.05)
        assert early.passed < 4.2
    # With all that is left e is slow, f is not; alone e is quick, too.
    assert found == [("a", []), ("b", []), ("c", []), ("d", []), ("f", []), ("e", ["fla"])]


#: Prints the process, which runs or stands still, and waits to be killed.
KILLED = """
import sys, time
from contextlib import nullcontext
from benchmarks.early import Early, Task
from support import early_tasks
from support.hurried import Hurried
if __name__ == "__main__":
    with Early([Task("stuck", early_tasks.endless)], 1, 100.0) as early:
        early.poll(2.0)
        with early.paused() if sys.argv[1] == "paused" else nullcontext():
            print(early._workers[0].process.pid, flush=True)
            time.sleep(100)
"""


@pytest.mark.parametrize("state", ["paused", "running"])
def test_processes_die_with_a_run_that_is_killed(state: str, tmp_path: Path) -> None:
    root, script = Path(__file__).parents[2], tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    with subprocess.Popen(
        [sys.executable, str(script), state], env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert alive(pid)
        run.send_signal(signal.SIGKILL)
    ends = time.perf_counter() + 5.0
    while alive(pid) and time.perf_counter() < ends:
        time.sleep(0.05)
    left = alive(pid)
    if left:  # nothing of a failed test stays
        os.kill(pid, signal.SIGKILL)
    assert not left

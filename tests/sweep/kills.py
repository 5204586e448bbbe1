"""The table of kills: which mutants the full set of calls finds, and which call of the fast set.

`tests/sweep/test_kills.py --update-kills` writes it anew, mutant by mutant.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from support.mutants import Mutant
from support.trials import FULL, Trial, fast
from sweep.run import check_trial

TABLE = Path(__file__).with_name("kills.json")

Row = dict[str, Any]


def read() -> dict[str, Row]:
    """mutant -> {"fast": a trial, "full": {part: a trial}}: the first of each that finds it.

    It is null where none does. Of Gluon kernels, parts after one that finds it are not tried.
    """
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write(name: str, row: Row) -> None:
    """Replaces one mutant's row; several processes may."""
    with TABLE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read()
        rows[name] = rows.get(name, {}) | row
        text = json.dumps(dict(sorted(rows.items())), indent=1)
        TABLE.write_text(text + "\n")


def first_kill(module: ModuleType, trials: Iterable[Trial]) -> Trial | None:
    """The first of the trials that the module's kernel fails; None if it survives all."""
    for trial in trials:
        try:
            check_trial(trial, module)
        except AssertionError:
            return trial
    return None


def fast_trials(mutant: Mutant) -> list[Trial]:
    """Those of the fast set that run the mutant's kernel, the quickest first."""

    def work(trial: Trial) -> int:
        case = trial.case
        return case.batch * case.q_heads * case.q_len * case.kv_len

    return sorted((t for t in fast(mutant.kernel) if t.spec == mutant.spec), key=work)


def row_of(mutant: Mutant, *, full: bool = True) -> Row:
    """The table's row of a mutant.

    Args:
        mutant: which one.
        full: whether the full set is tried too, which takes as long as its parts that find nothing.
    """
    module = mutant.module()
    found: Row = {"fast": _id(first_kill(module, fast_trials(mutant)))}
    if full:
        found["full"] = {}
        # Gluon on the CPU takes long: the first part that finds it is enough.
        enough = mutant.kernel.endswith("hopper")
        for part, trials in FULL[mutant.kernel].items():
            found["full"][part] = _id(first_kill(module, trials(mutant.kernel, mutant.spec)))
            if enough and found["full"][part]:
                break
    return found


def _id(trial: Trial | None) -> str | None:
    return None if trial is None else str(trial)

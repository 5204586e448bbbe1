"""The fast set of calls finds every mutant that the full set finds."""

from __future__ import annotations

import pytest

from support.mutants import all_mutants
from sweep.kills import fast_trials, first_kill, read, row_of, write

MUTANTS = all_mutants()
KILLS = read()


def test_every_mutant_is_in_the_table(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-kills") is None:
        assert set(KILLS) == set(MUTANTS), "run this file with --update-kills"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fast_set_finds_it(name: str, request: pytest.FixtureRequest) -> None:
    """By the call that the table says, which is enough."""
    mutant = MUTANTS[name]
    if (sets := request.config.getoption("--update-kills")) is not None:
        if sets == "fast" or name not in KILLS:
            write(name, row_of(mutant, full=sets == "full"))
        return
    row = KILLS[name]
    if row["fast"] is None:
        assert not any(row["full"].values()), "the full set finds it, the fast set does not"
        return
    [trial] = [trial for trial in fast_trials(mutant) if str(trial) == row["fast"]]
    assert first_kill(mutant.module(), [trial]) == trial

"""Kernels that are wrong on purpose: what the sweeps have to find, whichever calls they try.

`mutant` is what one is; `portable` has slips in the kernels of Triton and in what launches them,
`order` takes what keeps the roles of Gluon kernels apart. `tests/sweep/kills.json` says which calls
of the full set find each; the fast set must find them all.
"""

from support.mutants.mutant import Mutant

__all__ = ["Mutant", "all_mutants"]


def all_mutants() -> dict[str, Mutant]:
    """All of them by name."""
    from support.mutants import order, portable

    mutants = [*portable.MUTANTS, *order.MUTANTS]
    named = {str(mutant): mutant for mutant in mutants}
    assert len(named) == len(mutants), "two mutants of one name"
    return named

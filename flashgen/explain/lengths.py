"""explain_lengths: the accounts of variants over a range of sequence lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.explain.account import Account
from flashgen.explain.call import Asked, longest
from flashgen.explain.variant import Prepared, account_of, prepare, valid_variants

#: A few seconds a variant in total.
LENGTHS = tuple(2**n for n in range(10, 18))


@dataclass(frozen=True)
class Series:
    """One variant at several lengths, which are its numbers of keys.

    Attributes:
        asked: the call that was asked for.
        accounts: it and the other calls, the shortest first.
    """

    asked: Account
    accounts: tuple[Account, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each account."""
        return tuple(account.call.kv_len for account in self.accounts)


def explain_lengths(
    paths: Iterable[Path],
    target: str | None,
    asked: Asked,
    out: Path,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Series]:
    """The accounts of every variant that the spec files declare, at these lengths and as asked for.

    Queries and keys are as many, unless the call that is asked for has another number of each: then
    keys alone change. A variant whose constants are for no more ends with the most that they are
    for. Everything else is as `flashgen.explain.variant.explain` has it.

    Raises:
        FlashgenError: what is wrong with the specs, or with what is asked.
    """
    prepared = [prepare(variant, target, out) for variant in valid_variants(paths, target)]
    first = [account_of(one, asked) for one in prepared]  # what is wrong shows at once
    wanted = {account.call.kv_len for account in first}.union(lengths)
    for one in prepared:
        wanted |= _possible(one, asked, lengths)
    return [
        _series(one, account, asked, _possible(one, asked, wanted))
        for one, account in zip(prepared, first, strict=True)
    ]


def _possible(one: Prepared, asked: Asked, lengths: Iterable[int]) -> set[int]:
    """The lengths that a variant takes, and its longest in place of others."""
    most = longest(one.plan, asked)
    return {length if most is None else min(length, most) for length in lengths}


def _series(one: Prepared, first: Account, asked: Asked, lengths: set[int]) -> Series:
    queries, keys = first.call.q_len, first.call.kv_len
    accounts = {keys: first}
    for length in lengths - {keys}:
        q_len = length if queries == keys else queries
        accounts[length] = account_of(one, replace(asked, q_len=q_len, kv_len=length))
    return Series(first, tuple(accounts[length] for length in sorted(accounts)))

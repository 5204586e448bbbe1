"""explain_lengths: the accounts of variants over a range of sequence lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.explain.account import Account
from flashgen.explain.call import Asked, longest
from flashgen.explain.variant import Prepared, account_of, prepare, valid_variants

#: The usual lengths: they take a few seconds for each variant in total.
LENGTHS = tuple(2**n for n in range(10, 18))


@dataclass(frozen=True)
class Series:
    """One variant at several lengths, which are its numbers of keys.

    Attributes:
        asked: the call that was asked for.
        accounts: accounts of this call and the other ones, the shortest first.
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

    There are as many queries as keys, unless their numbers differ in the call that is asked for:
    then only the keys change. A variant whose constants limit the length ends with the longest that
    they allow. Everything else is as in `flashgen.explain.variant.explain`.

    Raises:
        FlashgenError: the specs or the call are wrong.
    """
    prepared = [prepare(variant, target, out) for variant in valid_variants(paths, target)]
    first = [account_of(one, asked) for one in prepared]  # mistakes show at once
    wanted = {account.call.kv_len for account in first}.union(lengths)
    for one in prepared:
        wanted |= _possible(one, asked, lengths)
    return [
        _series(one, account, asked, _possible(one, asked, wanted))
        for one, account in zip(prepared, first, strict=True)
    ]


def _possible(one: Prepared, asked: Asked, lengths: Iterable[int]) -> set[int]:
    """The lengths that a variant takes; its longest replaces longer ones.

    Where keys are made of all, their number is always the same.
    """
    if one.plan.spec.linformer:
        return set()
    most = longest(one.plan, asked)
    return {length if most is None else min(length, most) for length in lengths}


def _series(one: Prepared, first: Account, asked: Asked, lengths: set[int]) -> Series:
    queries, keys = first.call.q_len, first.call.kv_len
    accounts = {keys: first}
    for length in lengths - {keys}:
        q_len = length if queries == keys else queries
        accounts[length] = account_of(one, replace(asked, q_len=q_len, kv_len=length))
    return Series(first, tuple(accounts[length] for length in sorted(accounts)))

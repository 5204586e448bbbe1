"""The call that is explained: shapes and values of parameters, given or usual ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.budget.traffic import Workload
from flashgen.config import LONGEST
from flashgen.declared import Param
from flashgen.dropout import DropoutP, Seed
from flashgen.errors import FlashgenError
from flashgen.explain.account import Call
from flashgen.kernels.workload import TOKENS, usual_heads, usual_lengths
from flashgen.params import Float, Int, Tensor
from flashgen.plan import KernelPlan
from flashgen.plan.typical import (
    DOCUMENT,
    SHARE,
    TypicalRangeTable,
    TypicalRowTable,
    TypicalTensor,
    ids_of,
    typical_number,
)
from flashgen.symbolic import RowTable
from flashgen.symbols import evaluate


@dataclass(frozen=True)
class Asked:
    """The call by the command line; None is the usual value.

    Attributes:
        q_len, kv_len: queries and keys; usually, there are as many keys as queries.
        batch: batch entries; usually, as many as fill a training step.
        heads, kv_heads: query heads and key heads; usually, there are as many.
        params: values of number parameters by name, as text.
    """

    q_len: int | None = None
    kv_len: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    params: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ScatteredTensor:
    """Stands in for a tensor of conditions, a share of `SHARE` of them true, scattered.

    An element follows from its indices alone, by multiplication with large odd numbers.
    """

    def __getitem__(self, index: tuple[int, ...]) -> int:
        word = 0
        for i in index:
            word = (word * 0x9E3779B1 + i * 0x85EBCA6B + 0xC2B2AE35) & 0xFFFFFFFF
            word ^= word >> 15
        return int(word < SHARE * 2**32)


@dataclass(frozen=True)
class RowTableWithin:
    """A row table of typical ids that ends where its tensor does."""

    table: TypicalRowTable
    size: int

    def __getitem__(self, index: tuple[int, ...]) -> int:
        return min(self.table[index], self.size)


def named_values(written: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """``left=512`` -> ``("left", "512")`` for each text.

    Raises:
        FlashgenError: a text without a name, or without a value.
    """
    pairs = []
    for text in written:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise FlashgenError(f"--param={text}: not NAME=VALUE; write --param left=512")
        pairs.append((name.strip(), value.strip()))
    return tuple(pairs)


def workload(plan: KernelPlan, asked: Asked) -> Workload:
    """The shapes, and values for all parameters of mask and score.

    Raises:
        FlashgenError: the variant has no such call.
    """
    sizes = {"q-len": asked.q_len, "kv-len": asked.kv_len, "batch": asked.batch}
    sizes |= {"heads": asked.heads, "kv-heads": asked.kv_heads}
    for option, size in sizes.items():
        if size is not None and size < 1:
            raise FlashgenError(f"--{option}={size}: not a size; write a whole number from 1 on")
    q_len = asked.q_len or usual_lengths(plan)[-1]
    made = plan.spec.linformer
    if made and asked.kv_len not in (None, made):
        raise FlashgenError(
            f"--kv-len={asked.kv_len}: queries of {plan.name} see {made} keys, which matrices make "
            "of all; leave it out"
        )
    kv_len = made or asked.kv_len or q_len
    for option, length in (("q-len", q_len), ("kv-len", kv_len)):
        if length > LONGEST:
            raise FlashgenError(
                f"--{option}={length}: too long for an account; write at most {LONGEST}"
            )
    heads = asked.heads or usual_heads(plan)
    kv_heads = asked.kv_heads or heads
    batch = asked.batch or max(1, TOKENS // q_len)
    numbers = _numbers(plan, asked)
    _check(plan, numbers, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads)
    values: dict[str, Any] = dict(numbers)
    ids = ids_of(plan.predicate.expr)
    values |= {p.name: _example(p, p.name in ids) for p in plan.params if isinstance(p, Tensor)}
    values |= {constant.name: constant.elements for constant in plan.spec.constants}
    known = {
        **numbers,
        "batch": batch,
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
    }
    values |= {table.name: _row_table(table, known) for table in plan.row_tables}
    # The elements are scattered, or nothing is known of them.
    ranges = plan.range_tables
    values |= {table.name: TypicalRangeTable(kv_len, whole=False) for table in ranges}
    return Workload(batch, heads, kv_heads, q_len, kv_len, tuple(values.items()))


def longest(plan: KernelPlan, asked: Asked) -> int | None:
    """The most queries and keys that the variant's constants allow; None without a limit.

    Raises:
        FlashgenError: a value is given for a number that the variant does not have.
    """
    numbers = _numbers(plan, asked)
    limits = (limit for constant in plan.spec.constants for limit in constant.limits)
    return min(
        (evaluate(size.sym, numbers) for name, size in limits if name != "num_q_heads"),
        default=None,
    )


def described(plan: KernelPlan, work: Workload) -> Call:
    """The shapes and numbers of a call, for people."""
    values = dict(work.params)
    params = tuple(
        (plan.keyword(p.name), _said(p, values[p.name])) for p in plan.params if p.name in values
    )
    return Call(work.batch, work.num_q_heads, work.num_kv_heads, work.q_len, work.kv_len, params)


def _said(param: Param, value: Any) -> str:
    if not isinstance(param, Tensor):
        return str(value)
    if param.sorted or (isinstance(value, TypicalTensor) and value.ids):
        return f"ids of documents of {DOCUMENT} tokens"
    if param.dtype == "bool":
        return f"{SHARE:.0%} of its elements hold, scattered"
    return f"{value[(0,) * len(param.dims)]} everywhere"


def _numbers(plan: KernelPlan, asked: Asked) -> dict[str, int | float]:
    """The value of each parameter that is a number."""
    declared = {plan.keyword(p.name): p for p in plan.params if not isinstance(p, Tensor | Seed)}
    values = {param.name: typical_number(param) for param in declared.values()}
    for name, text in asked.params:
        option = f"--param={name}={text}"
        if name not in declared:
            known = f"write one of {', '.join(declared)}" if declared else "leave it out"
            raise FlashgenError(f"{option}: {plan.name} has no number of this name; {known}")
        values[declared[name].name] = _number(declared[name], option, text)
    return values


def _number(param: Param, option: str, text: str) -> int | float:
    whole = isinstance(param, Int)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise FlashgenError(f"{option}: not {kind}; write one") from None
    if isinstance(param, Int) and not param.min <= value <= 2**30:
        raise FlashgenError(f"{option}: out of range; write a number from {param.min} to 2**30")
    if isinstance(param, Float) and not abs(value) < math.inf:
        raise FlashgenError(f"{option}: not a finite number; write one")
    if isinstance(param, Float) and param.above is not None and not value > param.above:
        raise FlashgenError(f"{option}: not above {param.above:g}; write a number that is")
    if isinstance(param, DropoutP) and not 0 <= value < 1:
        raise FlashgenError(f"{option}: not a probability; write one from 0 to before 1")
    return value


def _check(plan: KernelPlan, numbers: Mapping[str, int | float], **sizes: int) -> None:
    """Refuses calls that the generated ``attention`` would refuse."""
    q_len, kv_len, heads, kv_heads = sizes.values()
    if plan.equal_lengths and q_len != kv_len:
        raise FlashgenError(
            f"--kv-len={kv_len}: the call has {q_len} queries, and in {plan.name} "
            f"{plan.refuses_lengths}, or leave --kv-len out"
        )
    if heads % kv_heads:
        raise FlashgenError(
            f"--kv-heads={kv_heads}: {heads} query heads cannot share them evenly; "
            f"write a divisor of {heads}"
        )
    given = {"num_q_heads": heads, "q_len": q_len, "kv_len": kv_len}
    options = {"num_q_heads": "--heads", "q_len": "--q-len", "kv_len": "--kv-len"}
    for constant in plan.spec.constants:
        for name, limit in constant.limits:
            most = evaluate(limit.sym, numbers)
            if given[name] > most or (name == "num_q_heads" and given[name] != most):
                raise FlashgenError(
                    f"{options[name]}={given[name]}: constant {constant.name!r} of {plan.name} is "
                    f"for {most}; write {options[name]}={most}"
                )


def _example(tensor: Tensor, ids: bool) -> TypicalTensor | ScatteredTensor:
    return ScatteredTensor() if tensor.dtype == "bool" else TypicalTensor(tensor, ids)


def _row_table(
    table: RowTable, sizes: Mapping[str, int | float]
) -> RowTableWithin | TypicalRowTable:
    typical = TypicalRowTable(table.side)
    return typical if table.most is None else RowTableWithin(typical, evaluate(table.most, sizes))

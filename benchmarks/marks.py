"""Marks in the Gluon forward kernel: when a role passes a statement, by its SM's clock.

A marked kernel records, for one of its programs, when it has passed each statement that waits or
takes long. A mark is identified by its statement and the number of tiles of keys that its role has
processed.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

#: The functions with marks, and the role of each, as source.
ROLES: Mapping[str, str] = {"_consumer": "NUMBER", "_step": "NUMBER", "_producer": "CONSUMERS"}

#: The beginnings of calls with a mark behind them; in a step, which is short, only waits for
#: products have marks.
CALLS = ("mbarrier.wait", "tma.store_wait", "_ping_pong_wait", "_first_weights", "_finish", "_work")
CALLS += (
    "_hand_over",
    "_load_qk",
    "_load_v",
    "_load_kv",
    "_take_overflow",
    "warpgroup_mma_wait",
    "_store_out",
)
CALLS_OF_A_STEP = ("warpgroup_mma_wait",)

#: The most tiles of keys of a role, and the value of a mark that was not passed. A mark whose clock
#: has this value by chance is lost.
MOST_TILES = 1 << 14
NEVER = -(1 << 31)

#: A program has at most three consumers, and one producer.
MOST_ROLES = 4

_MARK = '''\
MARKS: gl.constexpr = gl.constexpr({address})


@gluon.jit
def _mark(STATEMENT: gl.constexpr, kv_count, ROLE: gl.constexpr):
    """Notes when a role of one program is here."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    count = gl.full([1], kv_count, gl.int32, LANES)
    now = gl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1
    )
    number = (ROLE * {tiles} + count) * {statements} + STATEMENT
    address = (MARKS + 4 * number.to(gl.int64)).to(gl.pointer_type(gl.int32))
    gl.store(address, now, mask=(count < {tiles}) & (gl.program_id(0) == {program}))


'''


@dataclass(frozen=True)
class Interval:
    """The time between two marks that a role passed one after the other.

    Attributes:
        role: its number; the producer's is the last.
        begin: the statement behind which it begins, by its number.
        end: the statement behind which it ends, by its number.
        times: how often it occurred.
        cycles: cycles in total.
    """

    role: int
    begin: int
    end: int
    times: int
    cycles: int


def statements_of(text: str) -> list[str]:
    """The first lines of a module's statements that have a mark behind them."""
    lines = text.splitlines()
    return [
        f"{statement.lineno}: {lines[statement.lineno - 1].strip()}"
        for _, statement in _marked_statements(text)
    ]


def marked(text: str, address: int, program: int) -> str:
    """A module with marks.

    Args:
        text: its source, which has a Gluon forward kernel.
        address: where `memory_for` lies.
        program: which one writes its marks.
    """
    lines = text.splitlines()
    found = list(_marked_statements(text))
    for number, (function, statement) in reversed([*enumerate(found)]):
        mark = f"_mark({number}, kv_count, {ROLES[function]})"
        assert statement.end_lineno is not None
        lines.insert(statement.end_lineno, " " * statement.col_offset + mark)
    before = _functions(text)[0].decorator_list[0].lineno - 1
    mark = _MARK.format(address=address, program=program, statements=len(found), tiles=MOST_TILES)
    return "\n".join([*lines[:before], *mark.splitlines(), *lines[before:], ""])


def memory_for(statements: int, device: torch.device) -> torch.Tensor:
    """A buffer for a program's marks, (role, tile of keys, statement), none passed."""
    shape = (MOST_ROLES, MOST_TILES, statements)
    return torch.full(shape, NEVER, dtype=torch.int32, device=device)


def intervals(passed: Sequence[Sequence[tuple[int, int]]]) -> list[Interval]:
    """The intervals between successive `passages` of each role, the longest first."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for role, of_role in enumerate(passed):
        for (begin, before), (end, after) in itertools.pairwise(of_role):
            found.setdefault((role, begin, end), []).append(after - before)
    rows = [Interval(*key, len(cycles), sum(cycles)) for key, cycles in found.items()]
    return sorted(rows, key=lambda row: (row.role, -row.cycles))


def passages(marks: torch.Tensor) -> list[list[tuple[int, int]]]:
    """(statement, cycle) of each role in order, with cycles since the program's first mark.

    The clock has 32 bits and may wrap around.
    """
    noted = marks != NEVER
    passed: list[list[tuple[int, int]]] = [[] for _ in marks]
    if not noted.any():
        return passed
    clocks = marks[noted]
    # 32 bits wrap like the clock. A program takes less than half of its range.
    since = clocks - clocks[0]
    cycles = (since - since.min()).tolist()
    for (role, _, statement), cycle in zip(noted.nonzero().tolist(), cycles, strict=True):
        passed[role].append((statement, cycle))
    return [sorted(of_role, key=lambda mark: mark[1]) for of_role in passed]


def _functions(text: str) -> list[ast.FunctionDef]:
    """The functions of `ROLES`, in the order of the source."""
    body = ast.parse(text).body
    return [f for f in body if isinstance(f, ast.FunctionDef) and f.name in ROLES]


def _marked_statements(text: str) -> Iterator[tuple[str, ast.stmt]]:
    """(function, statement) in the order of the source."""
    for function in _functions(text):
        calls = CALLS_OF_A_STEP if function.name == "_step" else CALLS
        # Where kv_count is no parameter, there are no marks before it is set.
        after = next((s.lineno for s in function.body if _assigns(s, "kv_count")), 0)
        for statement in _simple_statements(function.body):
            if statement.lineno > after and _calls(statement, calls):
                yield function.name, statement


def _simple_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        inner = [*getattr(statement, "body", ()), *getattr(statement, "orelse", ())]
        if inner:
            yield from _simple_statements(inner)
        else:
            yield statement


def _assigns(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name


def _calls(statement: ast.stmt, names: tuple[str, ...]) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(names)

"""Variants that nobody thought of: masks, scores and normalisers drawn and combined at random.

The same number gives the same variant. What flashgen refuses, such as two parameters of one name,
is drawn again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

from flashgen import AttentionSpec, Int, Mask, Tensor, kv_len, minimum, q_len, softmax
from flashgen.errors import FlashgenError
from flashgen.plan import KernelPlan, lower
from flashgen.plan.backward import backward_plan
from support.cases import Case
from support.variety import MASK_SPECS, SCORE_SPECS
from support.vocabulary import MASKS, NORMALISERS, SCORES

Values = Callable[[Case], dict[str, Any]]

HEAD_DIMS = (64, 128, 80, 72, 96, 16, 40, 112, 256, (192, 128), (64, 128), (128, 64))

#: Of which a table is too short for the lengths here, or what is shown is nothing.
LEFT_OUT = ("distances_twice", "nothing")

_left = Int("left", 3)
_kinds = Tensor("kinds", ("batch", "kv_len"), "int32")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant.

    Attributes:
        number: what it was drawn by.
        words: what it is made of.
        spec: the variant itself.
        values: of parameters that cannot be just any.
    """

    number: int
    words: str
    spec: AttentionSpec
    values: tuple[Values, ...]

    @functools.cached_property
    def plan(self) -> KernelPlan:
        """What flashgen derives of it."""
        return lower(self.spec, f"combined_{self.number}")

    def cases(self, lengths: tuple[int, ...], count: int) -> list[Case]:
        """Calls of some of these lengths."""
        random = Random(f"cases {self.number}")
        return [self._case(random, lengths) for _ in range(count)]

    def _case(self, random: Random, lengths: tuple[int, ...]) -> Case:
        of_queries, of_keys = random.choice(lengths), random.choice(lengths)
        case = Case(
            of_queries,
            of_queries if self.spec.equal_lengths else of_keys,
            random.choice((1, 2)),
            4,
            random.choice((1, 2, 4)),
            random.choice(("contiguous", "transposed", "padded")),
        )
        given = {name: value for values in self.values for name, value in values(case).items()}
        names = {param.name for param in self.spec.params}
        return dataclasses.replace(case, params={n: given[n] for n in names & given.keys()})


def combined(number: int) -> Variant:
    """The variant of a number."""
    for attempt in itertools.count():
        variant = _drawn(number, Random(f"{number} {attempt}"))
        try:
            backward_plan(variant.plan)
        except FlashgenError:
            continue
        return variant
    raise AssertionError("endless")


def _drawn(number: int, random: Random) -> Variant:
    words, mask, *values = _mask(random)
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        other, further, more = _mask(random)
        both = random.random() < 2 / 3
        mask = mask & further if both else mask | further
        words = f"({words} {'&' if both else '|'} {other})"
        values.append(more)
    score, normaliser = None, softmax()
    if random.random() < 1 / 2:
        name = random.choice([n for n in (*SCORES, *SCORE_SPECS) if n not in LEFT_OUT])
        score = SCORES[name].score if name in SCORES else SCORE_SPECS[name].score
        values += [SCORES[name].values] if name in SCORES else []
        words += f", {name}"
    if random.random() < 1 / 3:
        name = random.choice(list(NORMALISERS))
        normaliser = NORMALISERS[name].normaliser
        words += f", {name}"
    spec = AttentionSpec(
        random.choice(HEAD_DIMS),
        random.choice(("float16", "bfloat16")),
        mask=mask,
        score=score,
        normaliser=normaliser,
        deterministic=random.random() < 1 / 4,
        dropout=random.random() < 1 / 5,
    )
    return Variant(number, words, spec, tuple(values))


def _mask(random: Random) -> tuple[str, Mask, Values]:
    """A mask of the vocabulary, an odd one, or a comparison with numbers drawn; or its opposite."""
    values: Values = lambda case: {}  # noqa: E731
    kind = random.random()
    if kind < 0.55:
        name = random.choice(list(MASKS))
        mask, values = MASKS[name].mask, MASKS[name].values
    elif kind < 0.85:
        name = random.choice([name for name in MASK_SPECS if name not in LEFT_OUT])
        mask = MASK_SPECS[name].mask
    else:
        name, mask = _comparison(random)
    if random.random() < 1 / 6:
        return f"~{name}", ~mask, values
    return name, mask, values


def _comparison(random: Random) -> tuple[str, Mask]:
    a, b = random.randint(-9, 9), random.randint(-9, 9)
    some, size, many = random.randint(0, 9), random.randint(2, 9), random.randint(0, 99)
    terms: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
        f"{a} * q + {b} * kv - {many}": lambda b_, h, q, kv: a * q + b * kv - many,
        f"(q + {some}) // {size} - kv // {size}": lambda b_, h, q, kv: (
            (q + some) // size - kv // size
        ),
        f"q - kv - left * {some}": lambda b_, h, q, kv: q - kv - _left * some,
        f"kinds[b, kv] - {some}": lambda b_, h, q, kv: _kinds[b_, kv] - some,
        f"(q - kv) % {size} - {some}": lambda b_, h, q, kv: (q - kv) % size - some,
        f"kv - kv_len + q_len - {a}": lambda b_, h, q, kv: kv - kv_len + q_len - a,
        f"min(q, {many}) - kv": lambda b_, h, q, kv: minimum(q, many) - kv,
        "abs(q - kv) - left - h": lambda b_, h, q, kv: abs(q - kv) - _left - h,
        "q + kv - q_len": lambda b_, h, q, kv: q + kv - q_len,
    }
    name = random.choice(list(terms))
    term = terms[name]
    relations: dict[str, Callable[[Any], Any]] = {
        "<=": lambda x: x <= 0,
        "<": lambda x: x < 0,
        ">=": lambda x: x >= 0,
        ">": lambda x: x > 0,
        "==": lambda x: x == 0,
        "!=": lambda x: x != 0,
    }
    relation = random.choice(list(relations))
    holds = relations[relation]
    return f"{name} {relation} 0", Mask(lambda b, h, q, kv: holds(term(b, h, q, kv)), "drawn")

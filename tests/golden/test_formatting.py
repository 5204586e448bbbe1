"""Every module comes out linted and formatted, though flashgen runs neither tool on it."""

from __future__ import annotations

import dis
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from flashgen import (
    AttentionSpec,
    Constant,
    Float,
    Int,
    Mask,
    Score,
    Tensor,
    block_sparse,
    causal,
    softmax,
)
from flashgen.plan import lower
from support.turns import share
from support.variants import ROOT, any_hopper, any_hopper_backward, rendered
from support.vocabulary import VOCABULARY

# Of names that are short, that fit some lines and not others, and that fit hardly any.
LENGTHS = (14, 22, 31, 44, 60)


def vocabulary() -> dict[str, AttentionSpec]:
    return {name: entry.spec("bfloat16") for name, entry in VOCABULARY.items()}


def vocabulary_of_two_kernels() -> dict[str, AttentionSpec]:
    """With gradients of kernels over keys and over queries, of wide heads and of narrow ones."""
    ways = ((128, True), (256, False), (64, True), ((192, 128), False))
    specs = {}
    for number, (name, entry) in enumerate(VOCABULARY.items()):
        head_dim, deterministic = ways[number % len(ways)]
        specs[name] = entry.spec("bfloat16", head_dim, deterministic=deterministic)
    return specs


def long_names() -> dict[str, AttentionSpec]:
    """Parameters of each kind, and variants, with names of so many characters."""
    specs = {}
    for length in LENGTHS:
        index, width, cap, slopes, biases, ids, blocks = (
            f"{name}_".ljust(length, "x")
            for name in ("index", "width", "cap", "slopes", "biases", "ids", "blocks")
        )
        described = "what a reader of the call has to know of it, " * 4
        first, second = Int(index, doc=described), Int(width, 5, min=1)
        factor, bias = Float(cap, 2.0), Tensor(slopes, ("num_q_heads",), "bfloat16", doc=described)
        table = Tensor(biases, ("num_q_heads", None), "float32")
        known = [
            Constant(f"{name}_".ljust(length, "x"), values, dims=dims, doc=described)
            for name, values, dims in (
                ("one", [0.1 * i for i in range(40)], None),
                ("two", [[i % 3 == j % 5 for j in range(300)] for i in range(9)], (None, "q_len")),
                (
                    "four",
                    [[[[-(10**i)] * 30] * 2] * 2 for i in range(9)],
                    ("num_q_heads", *[None] * 3),
                ),
            )
        ]
        entries = Tensor(ids, ("batch", None), "int32")
        shown = Tensor(blocks, ("batch", "num_q_heads", None, None), "bool")
        of_length = {
            "ints": AttentionSpec(96, mask=_near(first, second) & causal(align="bottom_right")),
            "blocks": AttentionSpec(64, mask=block_sparse(shown, 8)),
            "sink": AttentionSpec(64, mask=_same(entries), normaliser=softmax(sink=bias)),
            "bias": AttentionSpec(64, score=_biased(bias, table, first, factor)),
            "known": AttentionSpec(64, mask=_known(*known) & block_sparse([[1, 0]], second)),
        }
        specs |= {f"{name}_{'y' * length}"[:length]: spec for name, spec in of_length.items()}
    return specs


def with_cache() -> dict[str, AttentionSpec]:
    """In one segment and in two."""
    specs = {}
    for number, (name, spec) in enumerate({**vocabulary(), **long_names()}.items()):
        if not spec.equal_lengths:
            head_dim = (spec.head_dim, 80)[number % 2]
            specs[name] = replace(spec, head_dim=head_dim, forms=("dense", "cache"))
    return specs


def with_dropout() -> dict[str, AttentionSpec]:
    return {
        name: replace(spec, dropout=True) for name, spec in {**vocabulary(), **long_names()}.items()
    }


def _near(first: Int, second: Int) -> Mask:
    return Mask(
        lambda b, h, q, kv: (kv < first + q) | (kv // second == q // second) | (q % second == 0),
        "near",
    )


def _same(ids: Tensor) -> Mask:
    return Mask(lambda b, h, q, kv: ids[b, q] == ids[b, kv], "same")


def _known(one: Constant, two: Constant, four: Constant) -> Mask:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (one[kv % 40] > 0.5) | two[q % 9, kv % 300] | (four[h, 0, 1, q % 30] < kv)

    return Mask(mask_mod, "known")


def _biased(slopes: Tensor, table: Tensor, first: Int, factor: Float) -> Score:
    return Score(
        lambda s, b, h, q, kv: factor * s + slopes[h] * (q - kv) + table[h, q - kv + first],
        "biased",
    )


def never_called(module: CodeType) -> set[str]:
    """Functions of a module's own that nothing in it mentions."""
    private = {name for name in _defined(module) if re.match(r"_\w", name)}
    read = {x.argval for x in dis.get_instructions(module) if x.opname == "LOAD_NAME"}
    inner = [x for x in module.co_consts if isinstance(x, CodeType)]
    for code in inner:  # grows during the iteration
        read.update(code.co_names)
        inner += [x for x in code.co_consts if isinstance(x, CodeType)]
    return private - read


def defined_twice(module: CodeType) -> set[str]:
    """Functions and classes of a module that a second definition replaces: two kernels' own."""
    return {name for name, times in Counter(_defined(module)).items() if times > 1 and name != "_"}


def _defined(module: CodeType) -> list[str]:
    names = (x.co_name for x in module.co_consts if isinstance(x, CodeType))
    return [name for name in names if name.isidentifier()]


@pytest.mark.parametrize(
    ("check", "source", "found"),
    [
        (never_called, "def _f(): return _g()\ndef _g(): pass\n", {"_f"}),
        (never_called, "def _f(): pass\ndef _g(x=_f): pass\nclass C:\n def m(s): _g()\n", set()),
        (defined_twice, "def f(): pass\nclass f: pass\ndef _(): pass\ndef _(): pass\n", {"f"}),
    ],
)
def test_what_a_module_defines(
    check: Callable[[CodeType], set[str]], source: str, found: set[str]
) -> None:
    assert check(compile(source, "module", "exec")) == found


@pytest.mark.parametrize(
    ("turn", "specs"),
    enumerate([vocabulary, vocabulary_of_two_kernels, long_names, with_dropout, with_cache]),
    ids=["vocabulary", "vocabulary_of_two_kernels", "long_names", "with_dropout", "with_cache"],
)
def test_modules_are_linted_and_formatted(
    turn: int, specs: Callable[[], dict[str, AttentionSpec]], tmp_path: Path
) -> None:
    """But for the shipped ones, which stand in generated/ and are linted with everything else."""
    for name, spec in share(list(specs().items()), turn, every=7):
        plan = lower(spec, name)
        module = rendered(plan, any_hopper(plan), any_hopper_backward(plan))
        code = compile(module, name, "exec")
        assert never_called(code) == defined_twice(code) == set(), name
        (tmp_path / f"{name}.py").write_text(module)
    for command in (["format", "--diff"], ["check", "--output-format=concise"]):
        options = ["--no-cache", f"--config={ROOT / 'pyproject.toml'}", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

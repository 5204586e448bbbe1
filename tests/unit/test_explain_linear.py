"""The account of linear attention: its numbers by hand, its lengths, its text and JSON."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashgen import (
    AttentionSpec,
    Int,
    Mask,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    favor,
    full,
    identity,
    linear,
)
from flashgen.cli import main
from flashgen.errors import FlashgenError
from flashgen.explain.call import Asked
from flashgen.explain.document import from_json, linear_from_json, to_json
from flashgen.explain.linear import LinearAccount, explain_linear
from flashgen.explain.linear_terminal import print_linear
from flashgen.explain.packed import Packing
from flashgen.loader import Variant
from support.variants import ROOT, shipped_module

ELU = AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one()))
PLAIN = AttentionSpec(64, mask=causal(), normaliser=linear(identity(), normalise=False))
FULL = AttentionSpec((64, 32), mask=full(), normaliser=linear(elu_plus_one()))
FAVOR = AttentionSpec(128, mask=causal(), normaliser=linear(favor(256)))


def account(spec: AttentionSpec, **asked: Any) -> LinearAccount:
    asked = {"q_len": 4096, "batch": 8, "heads": 16} | asked
    [found] = explain_linear([Variant("tiny", spec, "tiny.py")], "sm_90", Asked(**asked))
    return found


def test_steps_of_elu() -> None:
    found = account(ELU)
    rows, features, states, output = 8 * 16 * 4096, *found.steps
    assert found.segments == 1 and (states.flops, states.read, states.written) == (0, 0, 0)
    assert (features.read, features.written, features.flops) == (rows * 256, rows * 256, 0)
    assert features.exponentials == 2 * 64 * rows
    # Into the state and out of it, and with a chunk of 64 keys.
    assert output.flops == rows * (4 * 64 * 64 + 2 * 64 * (64 + 64))
    assert (output.read, output.written) == (rows * 3 * 128, rows * 128)
    assert found.state == 4 * 64 * 65 and found.backward_flops == 3 * output.flops


def test_steps_without_features_beforehand() -> None:
    assert [step.name for step in account(PLAIN).steps] == ["states", "output"]
    assert account(PLAIN).state == 4 * 64 * 64


def test_steps_of_all_keys() -> None:
    found = account(FULL, kv_len=1024, kv_heads=4)
    _, states, output = found.steps
    keys, rows = 8 * 4 * 1024, 8 * 16 * 4096
    assert states.flops == 2 * 64 * 32 * keys and states.read == keys * 2 * (64 + 32)
    assert output.flops == 2 * 64 * 32 * rows
    assert found.softmax.flops == 2 * rows * 1024 * (64 + 32)


def test_steps_of_random_features() -> None:
    found = account(FAVOR)
    features, _, output = found.steps
    rows = 8 * 16 * 4096
    # Those of keys twice: the largest one of a head comes first.
    assert features.flops == 3 * 2 * 256 * 128 * rows
    assert features.read == 3 * rows * 256 and features.written == 2 * rows * 512
    # In float32 the matrix is too large for a program to make all features of a query.
    [features, *_] = account(replace(FAVOR, dtype="float32")).steps
    assert features.flops == 4 * 2 * 256 * 128 * rows and features.read == 4 * rows * 512
    assert found.tiles == 2
    assert output.flops == rows * (4 * 256 * 128 + 2 * 64 * (256 + 2 * 128))
    # Partial sums of the first tile; v once for each.
    assert output.read == rows * (2 * 512 + 2 * 256 + 4 * 128)
    assert output.written == rows * (256 + 4 * 128)


def test_steps_of_decays_of_features() -> None:
    tensor = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 64))
    spec = replace(PLAIN, normaliser=linear(identity(), decay=tensor, normalise=False))
    found, plain = account(spec, kv_heads=4), account(PLAIN, kv_heads=4)
    decays, _, output = found.steps
    rows, keys = 8 * 16 * 4096, 8 * 4 * 4096
    # A number for each feature of a key, and q and k; features again, and weights of 64 keys.
    assert decays.read == 4 * 64 * keys + 2 * 64 * (rows + keys)
    assert decays.written == 2 * 64 * (rows + keys) + 2 * 64 * rows + 4 * 64 * keys // 64
    assert decays.flops == 3 * 2 * 64 * 64 * rows and decays.exponentials == 2 * 64 * rows
    assert output.flops == plain.steps[-1].flops - 2 * 64 * 64 * rows
    assert output.read == plain.steps[-1].read + 2 * 64 * rows


def test_steps_of_decays() -> None:
    tensor = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
    spec = replace(FAVOR, normaliser=linear(favor(256), decay=tensor))
    found, plain = account(spec, kv_heads=8), account(FAVOR, kv_heads=8)
    keys, queries = 8 * 8 * 4096, 8 * 16 * 4096
    assert [x.name for x in found.steps] == ["decays", *(x.name for x in plain.steps)]
    decays, *_, output = found.steps
    assert (decays.read, decays.written, decays.flops) == (4 * keys, 4 * keys, 0)
    # Once for each of two tiles; from L2 once for each query.
    assert output.read - plain.steps[-1].read == 2 * 4 * keys
    assert output.l2 - plain.steps[-1].l2 == 2 * 4 * queries
    of_heads = account(replace(FAVOR, normaliser=linear(favor(256), decay=lambda h: -h)))
    assert of_heads.steps[0].read == 0


def test_runs_have_fewer_pairs() -> None:
    documents = account(replace(ELU, mask=document() & causal()))
    plain, rows = account(ELU), 8 * 16
    assert (documents.run, documents.of_ids, plain.run) == (1000, True, None)
    pairs = 4 * 1000 * 1001 // 2 + 96 * 97 // 2
    assert documents.softmax.flops == 2 * rows * pairs * 128
    assert documents.pair_flops == plain.softmax.flops
    runs, decays, *rest = documents.steps
    assert (runs.name, runs.read, runs.written) == ("runs", 8 * 4096 * 4, 8 * 4096)
    assert decays.read == 8 * 4096 and [x.name for x in rest] == [x.name for x in plain.steps]
    size = Int("size", 512, min=1)
    chunks = account(replace(ELU, mask=chunked(size) & causal()))
    assert (chunks.run, chunks.of_ids, chunks.steps[0].read) == (512, False, 0)
    assert account(replace(ELU, mask=chunked(64) & causal())).crossover is None


def test_segments_read_one_state_that_a_scan_made() -> None:
    found = account(PLAIN, q_len=65536, batch=1, heads=4)
    states, output = found.steps
    count, size = 4 * found.segments, 4 * 64 * 64
    assert found.segments > 1
    made = (found.segments - 1) * 4 * size
    keys = (found.segments - 1) * 4 * 65536 // found.segments
    assert states.l2 == pytest.approx(keys * 2 * (64 + 64) + made + 2 * count * size, rel=1e-6)
    rows = 4 * 65536
    assert output.l2 == rows * 2 * (3 * 64 + 64) + made


@pytest.mark.parametrize("q_len", [64, 2048, 32768])
@pytest.mark.parametrize("heads", [1, 16, 64, 200])
@pytest.mark.parametrize(("head_dim", "held"), [(128, 1), (64, 2)])
def test_segments_are_those_of_a_module(q_len: int, heads: int, head_dim: int, held: int) -> None:
    module = shipped_module("linear_elu_d128")
    spec = replace(ELU, head_dim=head_dim)
    assert (
        account(spec, q_len=q_len, batch=1, heads=heads).segments
        == module._cut(q_len // 64, heads, 132, held)[0]
    )


@pytest.mark.parametrize(
    ("heads", "chunks", "held", "best"),
    [
        (64, 512, 1, 2),
        (64, 512, 2, 4),
        (16, 2048, 1, 8),
        (16, 2048, 2, 16),
        (128, 32, 2, 1),
    ],
)
def test_segments_are_the_fastest_ones_of_an_h200(
    heads: int, chunks: int, held: int, best: int
) -> None:
    """Where up to eight numbers were measured, of 132 SMs."""
    assert shipped_module("linear_elu_d128")._cut(chunks, heads, 132, held)[0] == best


@pytest.mark.parametrize("spec", [ELU, FAVOR])
def test_softmax_takes_longer_from_the_crossover_on(spec: AttentionSpec) -> None:
    found = account(spec, q_len=32768, batch=1)
    assert found.crossover is not None and found.crossover % 64 == 0
    for length, pays in ((found.crossover - 64, False), (found.crossover, True)):
        there = account(spec, q_len=length, batch=32768 // length)
        assert (there.roofline < there.softmax.roofline) == pays


def test_the_text() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_linear(console, account(FAVOR, batch=1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for said in (
        "Weights: linear(favor(features=256))",
        "linear in length: a state holds the sums over earlier keys",
        "256 features of a vector; the state of a head takes 132 kB",
        "a program holds one of 2 tiles of a state",
        "segments of a sequence, each with a state of its own",
        "Kernels of the backward pass: chunks of 32 rows, 8 warps, 3 stages, by model",
        "It takes longer from a length of ",
    ):
        assert said in text, said


def test_the_text_of_runs() -> None:
    said = []
    for mask in (document() & causal(), chunked(64) & causal()):
        console = Console(file=io.StringIO(), width=200)
        print_linear(console, account(replace(ELU, mask=mask)))
        said.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert (
        "a state for each run of 1,000 positions, reset where it ends; all pairs of a sequence in "
        "which an id returns: 274.9 GFLOP, if all do"
    ) in said[0]
    assert "a state for each run of 64 positions, reset where it ends\n" in said[1]


def test_json_and_back() -> None:
    found = [account(ELU), account(FAVOR), account(replace(ELU, mask=document() & causal()))]
    text = to_json(found, "linear")
    assert linear_from_json(text) == found
    with pytest.raises(ValueError, match="accounts of the form 'linear', not of 'dense'"):
        from_json(text)


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code  # type: ignore[return-value]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, file = str(ROOT / "specs" / "linear_elu_d128.py"), tmp_path / "account.json"
    assert status_of("explain", spec, "--q-len", "2048", "--json", str(file)) == 0
    assert "linear_elu_d128 on sm_90 (H200)" in capsys.readouterr().out
    [found] = linear_from_json(file.read_text())
    assert found.call.q_len == 2048
    for arguments, answer in (
        (["--svg", "x.svg"], "--svg=x.svg: linear attention has no tiles of scores to show; leave"),
        (["--form", "cache"], "linear attention visits no tiles of scores; `flashgen explain` has "
         "another account of it, without a page or a cache"),
        (["--form", "varlen", "--kv-lengths", "7"], "--kv-lengths: 1 sequences, --lengths has 8"),
        ([str(ROOT / "specs" / "causal_d128.py")], "linear attention has an account of its own; "
         "explain its specs apart from others"),
    ):  # fmt: skip
        assert status_of("explain", spec, *arguments) != 0
        assert answer in capsys.readouterr().err


def test_packed_sequences() -> None:
    """Chunks end with sequences, of which an empty one has a chunk; segments are of all of them."""
    variant, packing = Variant("packed", replace(ELU, head_dim=128), ""), Packing("100,0,64,2x65")
    [found] = explain_linear([variant], "sm_90", Asked(), packing)
    assert found.packed is not None
    assert (found.packed.sequences.count, found.packed.sequences.queries) == (5, 294)
    assert (found.packed.chunks, found.packed.padded) == (2 + 1 + 1 + 2 * 2, 5 * 2)
    assert found.packed.empty_rows == pytest.approx(1 - 294 / (8 * 64))
    assert found.call.q_len == 294 and found.crossover is None
    pairs = sum(n * (n + 1) // 2 for n in (100, 0, 64, 65, 65))
    assert found.softmax.flops == 4 * 128 * found.call.num_q_heads * pairs
    assert linear_from_json(to_json([found], "linear")) == [found]
    console = Console(file=io.StringIO(), width=200)
    print_linear(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5 sequences of 0 to 100 queries, 294 in total, each with a state of its own" in text
    assert "8 chunks of queries, of whose rows 42.6% are empty; padded to the longest" in text
    with pytest.raises(FlashgenError, match=r"^packed: --form=varlen: 'varlen' has no random"):
        list(explain_linear([replace(variant, spec=FAVOR)], "sm_90", Asked(), packing))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (full(), "over all keys, which all queries see"),
        (chunked(64) & causal(), "over earlier keys of a run"),
        (document() & causal(), "of a run; where an id returns, all pairs are computed"),
    ],
)
def test_which_algorithm_and_why(mask: Mask, said: str) -> None:
    found = account(AttentionSpec(64, mask=mask, normaliser=linear(elu_plus_one())))
    assert found.algorithm.endswith(said)

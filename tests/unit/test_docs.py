"""What the documents show is what the code does: each example, excerpt, table, command and link."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flashgen
from docs import make_vocabulary, vocabulary_entries
from docs.tile_pictures import checked_picture
from flashgen.budget.targets import TARGETS
from flashgen.build import Options, Progress, build
from flashgen.cli import app
from flashgen.console import UNWATCHED_WIDTH
from flashgen.errors import FlashgenError
from flashgen.explain.call import Asked
from flashgen.explain.terminal import print_account
from flashgen.explain.variant import explain
from flashgen.loader import load
from flashgen.plan import lower
from flashgen.reference import weigh
from flashgen.validate import validate
from support.variants import shipped_module

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(mark):
    """The code blocks under ``<!-- mark: PATH -->`` with their paths."""
    found = re.findall(rf"<!-- {mark}: (\S+) -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no {mark}"
    return found


def links():
    """Every relative link with the document it stands in."""
    folders = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "examples")
    return [
        (document.relative_to(ROOT).as_posix(), link)
        for folder in folders
        for document in sorted(folder.glob("*.md"))
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    ]


@pytest.mark.parametrize(("path", "source"), blocks("excerpt"))
def test_an_excerpt_is_in_its_file(path, source):
    assert source in (ROOT / path).read_text(), f"README.md: copy the lines of {path} anew"


def test_the_layers_are_those_that_imports_are_held_to():
    source = (ROOT / "tests" / "unit" / "test_imports.py").read_text()
    layers = re.search(r'^LAYERS = """\n(.*?)"""', source, re.MULTILINE | re.DOTALL)
    assert layers is not None
    shown = f"```text\n{textwrap.dedent(layers[1])}```\n"
    assert shown in (ROOT / "docs" / "design.md").read_text()


def test_the_first_spec_is_the_shipped_one():
    shown = re.search(r"```python\n# specs/causal_d128\.py\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert shown[1] in (ROOT / "specs" / "causal_d128.py").read_text()


@pytest.mark.filterwarnings("ignore:prefix_d64")
def test_the_example_builds_and_is_right(tmp_path):
    [(path, source)] = blocks("example")
    spec_file = tmp_path / Path(path).name
    spec_file.write_text(source)
    [built] = build([spec_file], Options(out=tmp_path / "generated", tune=False), Progress())
    assert built.variant == "prefix_d64"
    assert built.chosen and set(built.chosen.portable) == set(TARGETS)
    found = importlib.util.spec_from_file_location(
        "prefix_d64", tmp_path / "generated" / "prefix_d64.py"
    )
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    kernel = (tmp_path / "generated" / "prefix_d64.py").read_text()
    [derived] = re.findall(r"has to visit the keys before `(.*?)`", README)
    assert f"    some_end = {derived}\n" in kernel
    assert "left without a key" not in kernel

    q, k, v = torch.randn(3, 1, 2, 100, 64).half()
    out, lse = module.attention(q, k, v, prefix=77, return_lse=True)
    q_idx, kv_idx = torch.arange(100)[:, None], torch.arange(100)[None, :]
    seen = (q_idx >= kv_idx) | (kv_idx < 77)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=seen
    )
    assert (out - expected).abs().max() < 1e-3
    assert lse.shape == (1, 2, 100)


def test_sequences_packed_by_their_ends_are_documents():
    """The lines shown, one sequence empty, beside each sequence by itself."""
    [shown] = re.findall(r"<!-- varlen -->\n```python\n(.*?)```", README, re.DOTALL)
    ends = [0, 3, 4, 44, 44, 64]
    q, k, v = (torch.randn(ends[-1], 2, 128) for _ in range(3))
    names = {"torch": torch, "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    names |= {"q": q, "k": k, "v": v}
    exec(shown, names)
    packed = shipped_module("documents_d128").reference(
        names["q"], names["k"], names["v"], document_ids=names["ids"]
    )
    assert names["q"].data_ptr() == q.data_ptr(), "a copy"
    for begin, end in itertools.pairwise(ends):
        alone = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        right = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)
        torch.testing.assert_close(packed[0, :, begin:end], right)


def test_the_spec_is_one(tmp_path):
    """It passes `validate`, its bounds follow the documents, and its call is the one shown."""
    [(path, source)] = blocks("spec")
    spec_file = tmp_path / Path(path).name
    spec_file.write_text(source)
    [variant] = load([spec_file])
    assert not list(validate(variant))
    plan = lower(variant.spec, variant.name)
    assert plan.bounds.exact and plan.bounds.tables
    call = ", ".join(f"{param.name}={param.name}" for param in plan.params)
    assert f"out = {variant.name}.attention(q, k, v, {call})\n" in README


def test_the_error_is_the_one_that_its_spec_gets(tmp_path, monkeypatch):
    shown = re.search(r"<!-- error: (.*) -->\n```text\n(.*)\n```", README)
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    Path("specs").mkdir()
    spec_file = Path("specs/causal_d256.py")
    spec_file.write_text(f"from flashgen import *\n\nspec = {shown[1]}\n")
    with pytest.raises(FlashgenError) as caught:
        list(build([spec_file], Options(tune=False), Progress()))
    assert str(caught.value) == shown[2]
    assert not Path("generated").exists()


def test_what_explain_is_shown_to_say():
    [(path, shown)] = blocks("explain")
    [account] = explain([ROOT / path], None, Asked(), ROOT / "generated")
    console = Console(file=io.StringIO(), width=UNWATCHED_WIDTH)
    print_account(console, account)
    said = textwrap.dedent(re.sub(r"^\S.*\n", "", console.file.getvalue(), flags=re.MULTILINE))
    for part in shown.strip().split("\n\n"):
        assert part in said, f"README.md: copy what flashgen explain {path} says anew"


def test_the_targets_table():
    rows = [
        f"| {target.name} | {', '.join(target.gpus)} | {target.max_shared:,} B |"
        for target in TARGETS.values()
    ]
    header = "| target | GPUs | shared memory of a block |\n| --- | --- | ---: |"
    expected = "\n".join(["<!-- targets -->", header, *rows, "<!-- /targets -->"])
    assert expected in README


def test_the_commands_exist():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    shown = set(re.findall(r"^(?:\$ |.*\.venv/bin/)flashgen (\w+)", README, re.MULTILINE))
    assert {"build", "check", "list", "bench"} <= shown
    assert shown <= known


@pytest.mark.parametrize(("document", "link"), links())
def test_links_lead_somewhere(document, link):
    assert ((ROOT / document).parent / link).exists(), f"{document}: {link}"


@pytest.fixture(scope="module")
def made():
    return make_vocabulary.pages()


def test_the_vocabulary_is_what_the_code_does(made):
    """After a change of bounds, printers or templates: python -m docs.make_vocabulary."""
    folder = ROOT / "docs"
    stale = [path for path, text in made.items() if (folder / path).read_text() != text]
    assert not stale, "run python -m docs.make_vocabulary"
    pictures = {f"vocabulary/{path.name}" for path in (folder / "vocabulary").iterdir()}
    assert pictures == made.keys() - {"vocabulary.md"}


def test_the_vocabulary_page_holds_every_name(made):
    public = {
        *flashgen.masks.__all__, *flashgen.scores.__all__,
        "softmax", "softmax_off_by_one", "sigmoid_attention",
    }  # fmt: skip
    helpers = {"as_mask", "as_score", "random_blocks"}
    names = {name for name in public if name.islower()} - helpers
    headings = set(re.findall(r"^### (\w+)$", made["vocabulary.md"], re.MULTILINE))
    assert names <= headings
    shown = re.search(r"<!-- vocabulary -->\n(.*?)<!-- /vocabulary -->", README, re.DOTALL)
    assert names == set(re.findall(r"`(\w+)`", shown[1]))


@pytest.mark.parametrize("wrong", ["end", "full_end"])
def test_a_wrong_bound_shows(wrong):
    mask = flashgen.causal()
    bounds = lower(flashgen.AttentionSpec(64, mask=mask), "x").bounds
    checked_picture(mask, bounds, 64, 64, {})
    [interval] = bounds.intervals
    moved = {"end": interval.end - 8, "full_end": interval.full_end + 8}[wrong]
    changed = replace(bounds, intervals=(replace(interval, **{wrong: moved}),))
    with pytest.raises(ValueError, match="the tile at"):
        checked_picture(mask, changed, 64, 64, {})


EMPTY_ROWS = {"softmax()": -math.inf, "softmax(sink=sinks)": 0.7, "softmax_off_by_one()": 0.0}
EMPTY_ROWS["sigmoid_attention()"] = -math.inf


@pytest.mark.parametrize("entry", vocabulary_entries.NORMALISERS.values())
def test_what_is_said_of_normalisers(entry):
    """Formula and log-sum-exp in numpy's words; a row that sees no key."""
    for shown in entry.shown:
        normaliser = make_vocabulary.declared(shown)
        s = torch.tensor([0.3, -2.0, 1.1], dtype=torch.float64)
        params = {"sinks": torch.tensor([0.7], dtype=torch.float64)}
        scores = torch.stack([s, torch.full_like(s, -math.inf)])[None, None]
        weights, lse = weigh(scores, normaliser, params=params)
        said = shown.said.split(". ")
        names = {
            "exp": torch.exp,
            "log": torch.log,
            "sum": torch.sum,
            "s": s,
            "sink": params["sinks"],
        }
        assert torch.allclose(weights[0, 0, 0], eval(said[0].split(",")[0], names))
        if said[1].startswith("LSE: log("):
            assert torch.allclose(lse[0, 0, 0], eval(said[1].removeprefix("LSE: "), names))
        else:
            assert torch.allclose(lse[0, 0, 0], torch.log(weights[0, 0, 0].sum()))
        assert not weights[0, 0, 1].any()
        assert lse[0, 0, 1] == EMPTY_ROWS[repr(normaliser)]

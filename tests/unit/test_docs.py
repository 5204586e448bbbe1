"""What the documents show is what the code does: each example, excerpt, table, command and link."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import re
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flashgen
from benchmarks import figures
from benchmarks.headline import headline_table
from docs import make_vocabulary, vocabulary_entries
from docs.tile_pictures import checked_picture
from flashgen.budget.targets import TARGETS
from flashgen.build import Options, Progress, build
from flashgen.cli import app, main
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
GUIDE = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "guide").glob("*.md"))}
#: README.md and the guide: what shows a user how to use flashgen.
SHOWN = "\n".join([README, *GUIDE.values()])

#: The most words that README.md may have, as ``wc -w`` counts them.
WORDS = 1500


def documents():
    """Every document, by its path from the root."""
    found = [ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"]
    found += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(found)}


DOCUMENTS = documents()


def blocks(mark):
    """The code blocks under ``<!-- mark: WHAT -->`` of README.md and the guide, with what it says.

    Each once: one that stands in two documents is the same in both.
    """
    found = re.findall(rf"<!-- {mark}: ([^\n]+) -->\n```\w+\n(.*?)```", SHOWN, re.DOTALL)
    assert found, f"neither README.md nor docs/guide has {mark}"
    return list(dict.fromkeys(found))


def prose(text):
    """A document without its code, whose brackets and comments are no links and headings."""
    return re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)


def links():
    """Every relative link with the document it stands in, its file and its anchor."""
    found = []
    for document, text in DOCUMENTS.items():
        for file, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", prose(text)):
            found.append((document, file, anchor))
    return list(dict.fromkeys(found))


def anchors(text):
    """Those that GitHub gives to the headings of a document."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = sum(
            re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found
        )
        found.append(f"{slug}-{count}" if count else slug)
    return found


def test_the_readme_is_short():
    words = len(README.split())
    assert words <= WORDS, f"README.md has {words} words: move some of them to docs/"


def test_what_the_readme_counts():
    """Of what ships, of FlexAttention's rate, and of a BlockMask's memory."""
    numbers = [15, 6, 4]
    assert "Fifteen masks, six score functions and four normalisers ship" in README
    shown = re.search(r"<!-- vocabulary -->\n(.*?)<!-- /vocabulary -->", GUIDE["spec"], re.DOTALL)
    rows = [line for line in shown[1].splitlines() if "`" in line]
    assert [len(re.findall(r"`\w+`", row)) for row in rows] == numbers
    rows = headline_table(figures.newest_results()).splitlines()[2:-2]
    ratios = [float(cell) for row in rows for cell in row.split(" | ")[2::3] if cell != "-"]
    assert f"runs at {min(ratios):.1f} to {max(ratios):.1f} times its rate" in README
    forward = figures.newest_results()["forward"]
    [cost] = [r["block_mask"] for r in forward["cells"] if r["cell"] == "causal_d128 S=16384"]
    assert f"A BlockMask of 16,384 tokens takes {cost['peak_mib'] / 1024:.1f} GiB" in README


@pytest.mark.parametrize("folder", ["docs", "docs/lab"])
def test_an_index_lists_every_page(folder):
    """docs/README.md all but the lab, which has an index of its own."""
    text = DOCUMENTS[f"{folder}/README.md"]
    pages = ROOT / folder
    found = pages.rglob("*.md") if folder == "docs" else pages.glob("*.md")
    expected = {
        path.relative_to(pages).as_posix()
        for path in found
        if folder == "docs/lab" or path.parent.name != "lab" or path.name == "README.md"
    } - {"README.md"}
    assert expected <= {file for file, _ in re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", text)}


def test_the_index_of_the_lab_has_every_series():
    named = {
        number
        for path, text in DOCUMENTS.items()
        if path.startswith("docs/lab/")
        for number in re.findall(r"[Ss]eries (\d+b?)\b", text)
    }
    listed = set(re.findall(r"^- \*\*Series (\w+)\*\*", DOCUMENTS["docs/lab/README.md"], re.M))
    assert named == listed


@pytest.mark.parametrize(("path", "source"), blocks("excerpt"))
def test_an_excerpt_is_in_its_file(path, source):
    assert source in (ROOT / path).read_text(), f"docs/guide: copy the lines of {path} anew"


def test_the_layers_are_those_that_imports_are_held_to():
    source = (ROOT / "tests" / "unit" / "test_imports.py").read_text()
    layers = re.search(r'^LAYERS = """\n(.*?)"""', source, re.MULTILINE | re.DOTALL)
    assert layers is not None
    shown = f"```text\n{textwrap.dedent(layers[1])}```\n"
    assert shown in DOCUMENTS["docs/design.md"]


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
    assert built.chosen and set(built.chosen["portable"].configs) == set(TARGETS)
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
    [shown] = re.findall(r"<!-- varlen -->\n```python\n(.*?)```", GUIDE["spec"], re.DOTALL)
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
    assert f"out = {variant.name}.attention(q, k, v, {call})\n" in GUIDE["spec"]


def test_the_error_is_the_one_that_its_spec_gets(tmp_path, monkeypatch):
    """In README.md its line is broken as a terminal breaks it."""
    [(declared, shown)] = {(spec, " ".join(text.split())) for spec, text in blocks("error")}
    monkeypatch.chdir(tmp_path)
    Path("specs").mkdir()
    spec_file = Path("specs/causal_d256.py")
    spec_file.write_text(f"from flashgen import *\n\nspec = {declared}\n")
    with pytest.raises(FlashgenError) as caught:
        list(build([spec_file], Options(tune=False), Progress()))
    assert str(caught.value) == shown
    assert not Path("generated").exists()


def test_what_explain_is_shown_to_say():
    [(path, shown)] = blocks("explain")
    [account] = explain([ROOT / path], None, Asked(), ROOT / "generated")
    console = Console(file=io.StringIO(), width=UNWATCHED_WIDTH)
    print_account(console, account)
    said = textwrap.dedent(re.sub(r"^\S.*\n", "", console.file.getvalue(), flags=re.MULTILINE))
    for part in shown.strip().split("\n\n"):
        assert part in said, f"docs/guide: copy what flashgen explain {path} says anew"


def test_a_build_ends_as_it_is_shown_to(tmp_path, monkeypatch, capsys):
    [(arguments, shown)] = blocks("build")
    assert f"flashgen build {arguments} " in README and shown in README
    path = Path(arguments.split()[0])
    monkeypatch.chdir(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / path).read_text())
    with pytest.raises(SystemExit) as stop:
        main(["build", *arguments.split(), "--no-tune"])
    assert not stop.value.code
    assert capsys.readouterr().out.endswith(shown)


def test_the_fields_of_a_spec():
    shown = re.search(r"<!-- fields -->\n(.*?)<!-- /fields -->", GUIDE["spec"], re.DOTALL)
    listed = re.findall(r"^\| `(\w+)` \|", shown[1], re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in fields(flashgen.AttentionSpec))


def test_the_targets_table():
    rows = [
        f"| {target.name} | {', '.join(target.gpus)} | {target.max_shared:,} B |"
        for target in TARGETS.values()
    ]
    header = "| target | GPUs | shared memory of a block |\n| --- | --- | ---: |"
    expected = "\n".join(["<!-- targets -->", header, *rows, "<!-- /targets -->"])
    assert expected in DOCUMENTS["docs/targets.md"]


def test_the_commands_exist():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    shown = set(re.findall(r"^(?:\$ |.*\.venv/bin/)flashgen (\w+)", SHOWN, re.MULTILINE))
    assert {"build", "check", "list", "bench"} <= shown
    assert shown <= known


@pytest.mark.parametrize(("document", "file", "anchor"), links())
def test_links_lead_somewhere(document, file, anchor):
    target = ROOT / document if not file else ((ROOT / document).parent / file).resolve()
    assert target.exists(), f"{document}: {file}"
    if anchor:
        name = target.relative_to(ROOT).as_posix()
        assert anchor in anchors(DOCUMENTS[name]), f"{document}: {file}#{anchor}"


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
        "softmax", "softmax_off_by_one", "sigmoid_attention", "linear",
    }  # fmt: skip
    helpers = {"as_mask", "as_score", "random_blocks"}
    names = {name for name in public if name.islower()} - helpers
    headings = set(re.findall(r"^### (\w+)$", made["vocabulary.md"], re.MULTILINE))
    assert names <= headings
    shown = re.search(r"<!-- vocabulary -->\n(.*?)<!-- /vocabulary -->", GUIDE["spec"], re.DOTALL)
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


@pytest.mark.parametrize(
    "entry", [entry for name, entry in vocabulary_entries.NORMALISERS.items() if name != "linear"]
)
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

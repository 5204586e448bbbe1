"""The page of an account: it holds all numbers, needs nothing else, and is well made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flashgen.explain.call import Asked
from flashgen.explain.document import to_json
from flashgen.explain.lengths import Series, explain_lengths
from flashgen.explain.page import page, write_page
from flashgen.explain.words import by_reason, call_text
from support.pages import Element, read_page

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "generated"
LENGTHS = (1024, 4096)

FAMILY = """\
from flashgen import AttentionSpec, Tensor, block_sparse, causal, dilated, document

slopes = Tensor("slopes", ("num_q_heads",))


def nearer(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


specs = [
    AttentionSpec(64, mask=document() & causal(), score=nearer, name="packed"),
    AttentionSpec(64, mask=block_sparse([[1, 0], [1, 1]], 256) & causal(), name="blocks"),
    AttentionSpec(80, "float32", dilated(3) & causal(), name="hull", targets=("sm_80",)),
]
"""


@pytest.fixture(scope="module")
def window() -> Series:
    asked = Asked(heads=8, kv_heads=2)
    [one] = explain_lengths([ROOT / "specs/window_d128.py"], None, asked, GENERATED, LENGTHS)
    return one


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[Series]:
    path = tmp_path_factory.mktemp("specs") / "family.py"
    path.write_text(FAMILY)
    return explain_lengths([path], None, Asked(heads=4), GENERATED, LENGTHS)


def numbers(value: Any) -> Iterator[float]:
    """Every number of a document, but for those of what is rejected."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name != "rejected":
                yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def articles(root: Element) -> dict[str | None, Element]:
    return {one.attributes["data-variant"]: one for one in root.all("article")}


@pytest.mark.parametrize("which", ["window", "family"])
def test_it_holds_every_number_of_the_json(which, request) -> None:
    found = request.getfixturevalue(which)
    series = found if isinstance(found, list) else [found]
    shown = articles(read_page(page(series)))
    assert list(shown) == [one.asked.variant for one in series]
    for one in series:
        for account in one.accounts:
            [document] = json.loads(to_json([account]))["accounts"]
            part = shown[account.variant].at(account.call.kv_len)
            data = {float(str(x.attributes["value"])) for x in part.all("data")}
            # What stands in words is of the call: heads, lengths, dimensions.
            assert call_text(account) in part.text
            words = {float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*", call_text(account))}
            picture = document["mask"]["picture"]
            cells = {picture["block_m"], picture["block_n"]}  # the page has at most 64 each way
            missing = set(numbers(document)) - data - words - cells
            assert not missing, f"{account.variant} at {account.call.kv_len}: {missing}"


def test_it_holds_every_word_of_the_json(window, family) -> None:
    series = [window, *family]
    shown = articles(read_page(page(series)))
    for one in series:
        for account in one.accounts:
            text = shown[account.variant].at(account.call.kv_len).text
            mask = account.mask
            said = [mask.label, *mask.conditions, *mask.listed, *mask.tables]
            said += [note[1:] for note in mask.notes]  # each begins a sentence
            for run in mask.runs:
                said += [run.begin, run.end, run.full_begin, run.full_end, run.condition]
            said += [word for pair in account.call.params for word in pair]
            for kernel in account.kernels:
                said += [kernel.chosen, kernel.waits_for]
                said += [x for b in kernel.buffers for x in (b.name, b.meaning, b.formula)]
                said += [x for reason, configs in by_reason(kernel) for x in (reason, *configs)]
            for work in account.works:
                said += [work.name, work.said, work.tile, work.problem, work.bound]
            said += [x for m in account.measured for x in (m.gpu, m.triton, m.bound)]
            said += [account.without, *account.remarks, account.dtype, account.gpu]
            missing = [words for words in said if " ".join(words.split()) not in text]
            assert not missing
    hull = shown["hull"].text
    assert "on sm_80 (A100)" in hull and "No exact range of keys: " in hull


def test_another_length_has_other_numbers(window) -> None:
    shown = read_page(page([window]))
    short, long = (shown.at(account.call.kv_len) for account in window.accounts[:2])
    assert short.text != long.text
    for part, account in zip((short, long), window.accounts, strict=False):
        share = f"{account.mask.share:.3%}"
        assert f"{share} of the elements are visible" in part.text
        assert len(part.all("svg")) == 1


def test_without_a_script_it_is_the_call_that_was_asked_for(window) -> None:
    parts = [x for x in read_page(page([window])).walk() if "data-at" in x.attributes]
    assert {len(str(x.attributes["data-at"]).split()) for x in parts} == {1, 3}
    for part in parts:
        lengths = str(part.attributes["data-at"]).split()
        assert ("hidden" in part.attributes) == (str(window.asked.call.kv_len) not in lengths)


def test_it_needs_nothing_from_elsewhere(window, family) -> None:
    text = page([window, *family])
    assert not re.search(r"\w:/{2}|@import|url\(|src\s*=|http:|https:", text)
    for element in read_page(text).walk():
        assert element.tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "srcset", "href", "action", "xmlns"} & element.attributes.keys()
        assert not any(name.startswith("on") for name in element.attributes)


def test_it_is_well_made(window, family) -> None:
    text = page([window, *family])
    assert text.startswith("<!doctype html>\n")
    root = read_page(text)
    [html] = root.all("html")
    [title] = [x for x in html.all("head")[0].parts if isinstance(x, Element) and x.tag == "title"]
    assert html.attributes["lang"] == "en" and title.text == "4 variants: explained by flashgen"
    assert [len(root.all(tag)) for tag in ("main", "header", "h1", "body")] == [1, 1, 1, 1]
    ids = [x.attributes["id"] for x in root.walk() if "id" in x.attributes]
    assert len(ids) == len(set(ids))
    for element in root.walk():
        for name in ("for", "list", "aria-labelledby"):
            assert element.attributes.get(name, ids[0]) in ids
        if element.tag in ("input", "select"):
            labels = [x.attributes["for"] for x in root.all("label")]
            assert element.attributes["id"] in labels
        if element.tag == "svg":
            assert element.attributes["role"] == "img" and element.all("title")[0].text
        if element.tag == "table":
            assert element.all("caption")
            assert all("scope" in x.attributes for x in element.all("th"))
        if element.attributes.get("class") == "scroll":  # reached by keys, and named
            assert element.attributes["tabindex"] == "0" and element.attributes["role"] == "region"
    levels = [int(x.tag[1]) for x in root.walk() if re.fullmatch("h[1-6]", x.tag)]
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_a_variant_that_ends_earlier_says_so(family) -> None:
    root = read_page(page(family))
    steps = [x.attributes["data-length"] for x in root.all("option") if "label" in x.attributes]
    assert steps == ["512", "1024", "4096", "16384"]
    blocks = articles(root)["blocks"]
    assert "constants of blocks are for 512 queries" in blocks.at(1024).text
    assert not blocks.at(1024).all("h3") and blocks.at(512).all("h3")


def test_one_variant_needs_no_choice(window, family) -> None:
    assert not read_page(page([window])).all("select")
    [choice] = read_page(page([window, *family])).all("select")
    names = [x.text for x in choice.all("option")]
    assert names == ["window_d128", "packed", "blocks", "hull"]


def test_what_specs_say_is_escaped(window) -> None:
    evil = "<script>alert(1)</script>\"'&"
    asked = window.asked
    mask = replace(asked.mask, label=evil, conditions=(evil,), notes=(evil,))
    call = replace(asked.call, params=((evil, evil),))
    changed = replace(asked, variant=evil, mask=mask, call=call, remarks=(evil,), without=evil)
    root = read_page(page([Series(changed, (changed,))]))
    assert len(root.all("script")) == 1
    [article] = root.all("article")
    assert article.attributes["data-variant"] == evil
    assert article.text.count(evil) >= 8
    assert evil in article.all("title")[0].text


def test_it_is_written_whole(window, tmp_path) -> None:
    path = tmp_path / "new" / "page.html"
    write_page(path, [window])
    assert path.read_text() == page([window])
    assert len(path.read_bytes()) < 400_000

"""The page of `flashgen explain --html` in Chromium: its slider is moved, and its numbers read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser.driver import DOWN, END, HOME, LEFT, RIGHT, Browser, browser
from flashgen.explain.account import Account
from flashgen.explain.call import Asked
from flashgen.explain.lengths import Series, explain_lengths
from flashgen.explain.page import write_page
from flashgen.explain.words import bytes_text, call_text, time_text

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
LENGTHS = (1024, 2048, 8192)

SPECS = """\
from flashgen import AttentionSpec, block_sparse, causal, document, full

specs = [
    AttentionSpec(64, mask=document() & causal(), name="packed", targets=("sm_90",)),
    AttentionSpec(64, mask=block_sparse([[1, 0], [1, 1]], 512), name="blocks"),
    AttentionSpec(80, "float32", full(), name="a_long_name_of_a_variant" * 3, targets=("sm_80",)),
]
"""


@pytest.fixture(scope="module")
def window() -> Series:
    path, asked = ROOT / "specs" / "window_d128.py", Asked(q_len=2048)
    [one] = explain_lengths([path], None, asked, ROOT / "generated", LENGTHS)
    return one


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[Series]:
    path = tmp_path_factory.mktemp("specs") / "family.py"
    path.write_text(SPECS)
    return explain_lengths([path], None, Asked(q_len=1024), Path("nowhere"), LENGTHS)


@pytest.fixture(scope="module")
def pages(window, family, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_page(folder / "window.html", [window])
    write_page(folder / "family.html", family)
    return {name: folder / f"{name}.html" for name in ("window", "family")}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as session:
        yield session


def shown(chromium: Browser) -> str:
    """What can be read, in words that a single space parts."""
    return " ".join(chromium.run("return document.querySelector('main').innerText").split())


def texts(account: Account) -> list[str]:
    """What the page has to say of a call and of no other."""
    said = [call_text(account), f"{account.mask.share:.3%} of the elements are visible"]
    said += [time_text(kernel.seconds) for kernel in account.kernels if kernel.seconds]
    for work in account.works:
        said += [time_text(seconds) for seconds in work.seconds.values()]
        said += [bytes_text(work.dram_read), bytes_text(work.l2_read), f"{work.flops / 1e9:,.1f}"]
    said += [f"{number:,} {kind}" for kind, number in account.mask.tiles.items()]
    return [text.replace(" us", " µs") for text in said]


def data(chromium: Browser) -> set[float]:
    """The exact numbers of what can be seen."""
    script = (
        "return [...document.querySelectorAll('data')]"
        ".filter(x => x.checkVisibility()).map(x => x.value)"
    )
    return {float(value) for value in chromium.run(script)}


def test_the_slider_moves_and_the_numbers_with_it(chromium, pages, window) -> None:
    chromium.look(1200, 900, "light")
    chromium.open(pages["window"])
    by_length = dict(zip(window.lengths, window.accounts, strict=True))
    before = shown(chromium)
    assert call_text(window.asked) in before
    for key, length in ((LEFT, 1024), (RIGHT, 2048), (END, 8192), (LEFT, 2048), (HOME, 1024)):
        chromium.press("#length", key)
        account, found = by_length[length], shown(chromium)
        said = "return document.getElementById('length-said').value"
        assert chromium.run(said) == f"{length:,}"
        values = "return document.getElementById('length').getAttribute('aria-valuetext')"
        assert chromium.run(values) == f"{length:,}"
        missing = [text for text in texts(account) if text not in found]
        assert not missing
        numbers = data(chromium)
        for work in account.works:
            assert {work.flops, work.exponentials, work.dram_read, work.l2_written} <= numbers
            assert set(work.seconds.values()) <= numbers
        others = [call_text(x) for n, x in by_length.items() if n != length]
        assert not any(text in found for text in others)
        drawn = "return [...document.querySelectorAll('svg')].filter(x => x.checkVisibility())"
        [title] = chromium.run(f"{drawn}.map(x => x.querySelector('title').textContent)")
        assert f"{account.mask.tiles['masked']:,} masked" in title
    assert shown(chromium) != before


def test_a_mouse_moves_it_too(chromium, pages, window) -> None:
    chromium.look(1200, 900, "light")
    chromium.open(pages["window"])
    x, y = chromium.run(
        "const box = document.getElementById('length').getBoundingClientRect();"
        "return [box.right - 9, (box.top + box.bottom) / 2]"
    )
    for kind in ("mousePressed", "mouseReleased"):
        chromium.devtools(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
        )
    assert call_text(window.accounts[-1]) in shown(chromium)


def test_a_variant_is_chosen_by_keys(chromium, pages, family) -> None:
    chromium.look(1200, 900, "light")
    chromium.open(pages["family"])
    for index, one in enumerate(family):
        if index:
            chromium.press("#variant", DOWN)
        account, found = one.asked, shown(chromium)
        assert found.startswith(f"{account.variant} on {account.target}")
        assert all(text in found for text in texts(account))
        visible = "return [...document.querySelectorAll('article')].filter(x => !x.hidden).length"
        assert chromium.run(visible) == 1


def test_a_length_that_a_variant_has_not_is_said(chromium, pages) -> None:
    chromium.look(1200, 900, "light")
    chromium.open(pages["family"])
    chromium.press("#variant", DOWN)
    chromium.press("#length", END)
    found = shown(chromium)
    assert found.startswith("blocks on sm_90")
    assert "The constants of blocks are for 1,024 queries and keys at most" in found
    assert "Traffic and arithmetic" not in found
    chromium.press("#length", HOME)
    assert "Traffic and arithmetic" in shown(chromium)


def test_why_candidates_were_turned_down_is_folded(chromium, pages, window) -> None:
    chromium.look(1200, 900, "light")
    chromium.open(pages["window"])
    reason = window.asked.kernels[0].rejected[0].reason
    assert reason not in shown(chromium)
    chromium.press("summary", "\ue007")  # Enter
    assert reason in shown(chromium)


@pytest.mark.parametrize("width", [320, 360, 800])
@pytest.mark.parametrize("name", ["window", "family"])
def test_a_phone_need_not_scroll_sideways(chromium, pages, name, width) -> None:
    chromium.look(width, 740, "light")
    chromium.open(pages[name])
    chromium.run("document.querySelectorAll('details').forEach(x => { x.open = true; })")
    for key in (HOME, END):
        chromium.press("#length", key)
        for _ in range(3 if name == "family" else 1):
            wide = "const all = document.documentElement; return [all.scrollWidth, all.clientWidth]"
            has, room = chromium.run(wide)
            assert has <= room <= width
            if name == "family":
                chromium.press("#variant", DOWN)
        if name == "family":
            chromium.press("#variant", HOME)


#: Of each text the contrast (WCAG 2) to what is behind it, the least first.
CONTRAST = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = channels(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  }
  throw new Error("nothing behind");
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((x) => x.nodeType === 3 && x.data.trim());
  if (!own || !element.checkVisibility() || ["SCRIPT", "title"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const colour = channels(element.closest("svg") ? style.fill : style.color);
  const [a, b] = [light(colour), light(behind(element))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), element.tagName + ": " + element.textContent]);
}
return found.sort((x, y) => x[0] - y[0]);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(chromium, pages, scheme) -> None:
    chromium.look(1200, 900, scheme)
    chromium.open(pages["window"])
    chromium.run("document.querySelectorAll('details').forEach(x => { x.open = true; })")
    found = chromium.run(CONTRAST)
    assert len(found) > 200
    least, what = found[0]
    assert least >= 4.5, what
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
    red = int(ground.split("(")[1].split(",")[0])
    assert (red > 200) == (scheme == "light")


def test_it_asks_for_nothing_and_nothing_goes_wrong(chromium, pages) -> None:
    chromium.look(1200, 900, "light")
    chromium.open(pages["family"])
    asked = chromium.run("return performance.getEntriesByType('resource').map(x => x.name)")
    assert asked == []
    assert chromium.run("return document.compatMode") == "CSS1Compat"

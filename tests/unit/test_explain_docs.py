"""The page that teaches FlashAttention by one spec is what the code says now."""

import re
from pathlib import Path

import pytest

from docs import make_explain
from flashgen.explain.call import Asked
from flashgen.explain.variant import explain

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

OTHERS = """\
from flashgen import AttentionSpec, block_sparse, causal, full, sigmoid_attention

specs = {
    "listed": AttentionSpec(64, "float32", block_sparse([[1, 0], [1, 1]], 512) & causal()),
    "sigmoid": AttentionSpec(64, mask=full(), normaliser=sigmoid_attention(), targets=("sm_80",)),
}
"""


@pytest.fixture(scope="module")
def made():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the page names the spec as it is named from there
        return make_explain.pages(Path(make_explain.SPEC), ROOT / "generated")


def test_the_page_is_what_the_code_says(made):
    """After a change of bounds, budget, models or printers: python -m docs.make_explain."""
    stale = [path for path, text in made.items() if (DOCS / path).read_text() != text]
    assert not stale, "run python -m docs.make_explain"
    pictures = {f"explain/{path.name}" for path in (DOCS / "explain").iterdir()}
    assert pictures == made.keys() - {make_explain.PAGE}


def test_its_figures_are_those_of_explain(made):
    [account] = explain([ROOT / make_explain.SPEC], None, Asked(), ROOT / "generated")
    page = made[make_explain.PAGE]
    for kernel in account.kernels[:1]:
        assert all(f"| {b.name} | {b.bytes:,} | `{b.formula}` |" in page for b in kernel.buffers)
    assert f"{account.mask.share:.3%} of the elements are visible" in page
    assert [w.name for w in account.works] == re.findall(
        r"^\| ([^|]+) \|(?: [\d.,]+ \w+ \|){4} [^|]+ \|$", page, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("name", "says", "says_not"),
    [
        ("listed", "A small kernel lists the tiles to visit", "Gluon"),
        ("sigmoid", "its kernel needs none of that", "alpha = "),
    ],
)
def test_it_can_be_made_of_another_spec(tmp_path, name, says, says_not):
    path = tmp_path / f"{name}.py"
    path.write_text(OTHERS.replace("specs =", "them =") + f'spec = them["{name}"]\n')
    made = make_explain.pages(path, Path("nowhere"), "mine.md")
    page = made.pop("mine.md")
    assert page.startswith(f"# FlashAttention, shown by {name}\n")
    assert says in page and says_not not in page and "Measured:" not in page
    assert made and all(f'src="{picture}"' in page for picture in made)

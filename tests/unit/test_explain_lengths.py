"""Accounts over lengths: which there are, and that each is the one of its call."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.errors import FlashgenError
from flashgen.explain.call import Asked
from flashgen.explain.lengths import LENGTHS, explain_lengths
from flashgen.explain.variant import explain

ROOT = Path(__file__).parents[2]
SPECS, GENERATED = ROOT / "specs", ROOT / "generated"

BOUNDED = """\
from flashgen import AttentionSpec, Int, block_sparse, causal

block = Int("block", 64, min=1)
specs = [
    AttentionSpec(64, mask=block_sparse([[1, 0], [1, 1]], block), name="short"),
    AttentionSpec(64, mask=causal(align="bottom_right"), name="long"),
]
"""


@pytest.fixture
def bounded(tmp_path):
    path = tmp_path / "bounded.py"
    path.write_text(BOUNDED)
    return path


def test_each_account_is_that_of_its_call() -> None:
    path, lengths = SPECS / "window_d128.py", (1024, 4096)
    asked = Asked(heads=8, kv_heads=2, params=(("left", "300"),))
    [series] = explain_lengths([path], None, asked, GENERATED, lengths)
    assert series.lengths == (1024, 4096, 16384)  # the usual one, too
    assert series.asked == series.accounts[-1]
    for account in series.accounts:
        call = Asked(q_len=account.call.q_len, heads=8, kv_heads=2, params=asked.params)
        assert [account] == list(explain([path], None, call, GENERATED))
        assert account.call.q_len == account.call.kv_len
        assert account.measured == series.asked.measured != ()


def test_keys_alone_change_where_there_are_other_numbers_of_them(bounded) -> None:
    asked = Asked(q_len=16, kv_len=128, batch=2)
    series = explain_lengths([bounded], None, asked, GENERATED, (64, 96))[1]
    assert [(a.call.q_len, a.call.kv_len) for a in series.accounts] == [
        (16, 64), (16, 96), (16, 128),
    ]  # fmt: skip


def test_a_variant_ends_where_its_constants_do(bounded) -> None:
    found = explain_lengths([bounded], None, Asked(), GENERATED, (64, 512))
    assert [(series.asked.variant, series.lengths) for series in found] == [
        ("short", (64, 128)),
        ("long", (64, 128, 512, 16384)),
    ]


def test_how_far_constants_reach_may_be_said_by_the_call(tmp_path) -> None:
    path = tmp_path / "one.py"
    path.write_text(BOUNDED.replace("specs =", "all_specs =") + "spec = all_specs[0]\n")
    asked = Asked(q_len=100, params=(("block", "100"),))
    [series] = explain_lengths([path], None, asked, GENERATED, (64, 512))
    assert series.lengths == (64, 100, 200)


def test_what_is_wrong_is_said(bounded) -> None:
    with pytest.raises(FlashgenError, match="block=7: long has no number of this name"):
        explain_lengths([bounded], None, Asked(params=(("block", "7"),), q_len=9), GENERATED, (64,))


def test_the_lengths_that_a_page_shows() -> None:
    assert LENGTHS == (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

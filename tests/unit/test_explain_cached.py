"""What `flashgen explain --form cache` says of a step of decoding."""

import io
import json

import pytest
from rich.console import Console

from flashgen import AttentionSpec, Int, causal, document, sliding_window, tree
from flashgen.cli import main
from flashgen.errors import FlashgenError
from flashgen.explain.cached import Place, explain_variant_cached
from flashgen.explain.cached_terminal import print_cached
from flashgen.explain.call import Asked
from flashgen.explain.document import cached_from_json, from_json, to_json
from flashgen.loader import Variant

CAUSAL = AttentionSpec(128, mask=causal(align="bottom_right"))
WINDOW = AttentionSpec(128, mask=sliding_window(Int("left", 1024), 0, align="bottom_right"))


def account(spec=CAUSAL, place=None, **asked):
    asked = {"heads": 32, "kv_heads": 8, **asked}
    variant = Variant("x", spec, "x.py")
    return explain_variant_cached(variant, None, Asked(**asked), place or Place())


def shown(found, width=200):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_cached(console, found)
    return [line.strip() for line in console.file.getvalue().splitlines()]


def test_bytes_of_keys_are_those_of_the_call():
    found = account(batch=16, kv_len=8192)
    assert found.keys_dram == found.keys_l2 == 16 * 8192 * 8 * (128 + 128) * 2
    # q and out in 16 bits, the LSE in 32; a length and 128 pages of each sequence.
    assert found.others == 16 * 32 * (2 * 128 * 2 + 4) + 16 * 4 * (1 + 128)
    assert found.bound == "memory"
    assert found.roofline == pytest.approx((found.keys_dram + found.others) / 4800e9)


def test_a_window_reads_its_own_keys_and_the_other_pages_can_be_given_back():
    found = account(WINDOW, batch=2, kv_len=100_000)
    assert found.keys_dram == 2 * 1025 * 8 * 256 * 2
    # Keys 98,975 to 99,999, the first of them the last of its page.
    assert (found.pages.held, found.pages.read) == (1563, 1563 - 98_975 // 64)
    lines = shown(found)
    assert "1,546 hold no key that a query sees, and can be given back" in lines
    rows = account(WINDOW, Place(page_size=0), batch=2, kv_len=100_000)
    assert rows.pages is None and not any(line == "Pages" for line in shown(rows))
    # Of rows, whole tiles are read.
    assert rows.keys_dram == 2 * (100_000 - 98_975 // 64 * 64) * 8 * 256 * 2


def test_tiles_of_queries_read_keys_again_from_l2_alone():
    found = account(batch=1, q_len=40, kv_len=4096)
    assert found.splits.tiles_of_queries == 2 and found.config.BLOCK_M == 128
    assert found.keys_dram == 4096 * 8 * 512
    # The first 32 queries see 8 keys less.
    assert found.keys_l2 == (2 * 4096 - 8) * 8 * 512


def test_splits_follow_from_the_programs_that_run_at_once():
    found = account(batch=1, kv_len=131_072, place=Place(sms=132))
    splits = found.splits
    assert splits.programs == 132 * splits.programs_of_an_sm // 8 * 8 == 128
    assert (splits.least, splits.most, splits.merged, splits.busiest) == (16, 16, 8, 1.0)
    # Of 4 rows of each head of keys and part: outputs, maxima and sums.
    assert found.partial == 2 * 4 * 8 * 16 * (4 * 128 + 2 * 4)
    lines = shown(found)
    assert "each is computed by 16 programs; the parts of 8 are merged" in lines
    fewer = account(batch=1, kv_len=131_072, place=Place(num_splits=3))
    assert (fewer.splits.programs, fewer.splits.most) == (24, 3)
    many = account(batch=64, kv_len=4096)
    assert many.splits.most in (1, 2) and many.splits.busiest == 1.0
    assert "128 programs, 8 of them with keys to read" in " ".join(
        shown(account(batch=1, kv_len=20))
    )


def test_tiles_that_calls_decide_are_said():
    found = account(AttentionSpec(128, mask=document(align="bottom_right")), kv_len=4096)
    assert found.decided
    assert (
        "Of these tiles of keys each call visits those that some query sees: a kernel decides "
        "which. What follows counts all of them."
    ) in " ".join(shown(found))
    assert not account(AttentionSpec(128, mask=tree()), q_len=8).decided
    assert account(AttentionSpec(128, mask=tree()), q_len=8).remarks == ("the bytes of ancestors",)


def test_many_queries_may_run_the_gluon_kernel():
    """On Hopper, of a mask that it serves, with pages of keys that are seen from the first on."""

    def says(spec=CAUSAL, place=None, **asked):
        return any("the Gluon kernel" in x for x in account(spec, place, **asked).remarks)

    assert says(q_len=16) and says(q_len=256) and not says(q_len=15)
    # Of one sequence the tiles are too few, unless there are keys to divide.
    refused = "the Gluon kernel, which does not compute this call"
    for asked, runs in (
        ({"batch": 33, "q_len": 16, "kv_len": 1024}, True),
        ({"batch": 34, "q_len": 16, "kv_len": 1024}, False),
        ({"batch": 1, "q_len": 32, "kv_len": 32_768}, True),
        ({"batch": 1, "q_len": 32, "kv_len": 32_704}, False),
        ({"batch": 1, "q_len": 31, "kv_len": 65_536}, False),
    ):
        (remark,) = account(place=Place(sms=132), **asked).remarks
        assert remark.startswith("the Gluon kernel")
        assert remark.startswith(refused) != runs, asked
    assert says(q_len=256, place=Place(num_splits=2))
    assert not says(q_len=256, place=Place(page_size=1))
    assert says(q_len=64, place=Place(page_size=0), spec=WINDOW) and not says(WINDOW, q_len=64)
    assert not says(AttentionSpec(128, mask=tree()), q_len=64)


def test_the_terminal_shows_every_number():
    found = account(batch=16, kv_len=8192)
    lines = shown(found)
    assert lines[0] == "x, cache, on sm_90 (H200)"
    assert lines[1] == ("16 x 32 query heads, 8 key heads, 1 query, 8,192 keys, d=128, bfloat16")
    said = "\n".join(lines)
    for part in (
        "visit the keys from 0 to before", "132 SMs, 1 on each at once",
        "128 tiles of queries: 16 sequences x 8 key heads x 1; each visits 64 tiles of keys",
        "each is computed by one program, and nothing is merged",
        "128 pages of 64 keys for each sequence, of which 128 are read",
        "keys and values                      537 MB  537 MB", "The limit is memory: 112 us",
    ):  # fmt: skip
        assert part in said, part
    assert all(len(line) <= 78 for line in shown(found, width=80))


def test_json_comes_back_as_it_was():
    found = [account(), account(WINDOW, Place(page_size=0))]
    text = to_json(found, "cache")
    assert cached_from_json(text) == found
    with pytest.raises(ValueError, match="of the form 'cache', not of 'dense'"):
        from_json(text)


@pytest.mark.parametrize(
    ("spec", "place", "message"),
    [
        (AttentionSpec(128, mask=causal()), Place(), "x: --form=cache: "),
        (CAUSAL, Place(page_size=8), "--page-size=8: no such pages; write one of 1, 16, 32, "),
        (CAUSAL, Place(num_splits=0), "--num-splits=0: out of range; write a number from 1 to 256"),
        (CAUSAL, Place(sms=0), "--sms=0: out of range; write a number from 1 to 65536"),
    ],
)
def test_what_cannot_be_explained_is_refused(spec, place, message):
    with pytest.raises(FlashgenError) as error:
        account(spec, place)
    assert str(error.value).startswith(message)


SPEC = """\
from flashgen import AttentionSpec, causal

spec = AttentionSpec(64, mask=causal(align="bottom_right"))
"""


@pytest.fixture
def explain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SPEC)

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["explain", "mine.py", *arguments])
        return stop.value.code or 0, capsys.readouterr()

    return run


def test_the_command(explain, tmp_path):
    status, said = explain(
        "--form", "cache", "--kv-len", "4096", "--batch", "4", "--json", "a.json"
    )
    assert status == 0 and said.out.startswith("mine, cache, on sm_90 (H200)\n")
    [found] = cached_from_json((tmp_path / "a.json").read_text())
    assert (found.call.batch, found.call.q_len, found.call.kv_len) == (4, 1, 4096)
    status, said = explain("--form", "cache", "--page-size", "16", "--sms", "66", "--json", "-")
    document = json.loads(said.out)
    assert (document["schema"], document["form"]) == (1, "cache")
    [found] = cached_from_json(said.out)
    assert (found.pages.size, found.splits.sms) == (16, 66)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--form", "x"), "--form=x: nothing to explain; write dense, varlen or cache"),
        (
            ("--form", "cache", "--svg", "a.svg"),
            "--svg=a.svg: explains the form dense; leave it out",
        ),
        (("--page-size", "16"), "--page-size=16: is for --form cache; leave it out"),
        (("--num-splits", "2"), "--num-splits=2: is for --form cache; leave it out"),
    ],
)
def test_options_of_another_form_are_refused(explain, arguments, message):
    status, said = explain(*arguments)
    assert (status, said.err.strip()) == (2, f"error: {message}")

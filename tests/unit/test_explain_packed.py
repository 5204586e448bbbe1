"""What `flashgen explain --form varlen` says of packed sequences."""

import io
import json

import pytest
from rich.console import Console

from flashgen import AttentionSpec, Int, block_sparse, causal, full, sliding_window, softmax
from flashgen.cli import main
from flashgen.errors import FlashgenError
from flashgen.explain.call import Asked
from flashgen.explain.document import from_json, packed_from_json, to_json
from flashgen.explain.packed import Packing, explain_variant_packed, usual_packing
from flashgen.explain.packed_terminal import print_packed
from flashgen.explain.variant import explain_variant
from flashgen.loader import Variant

CAUSAL = AttentionSpec(128, mask=causal())
FULL = AttentionSpec(128, mask=full())
WINDOW = AttentionSpec(128, mask=sliding_window(Int("left", 1024), 0, align="bottom_right"))
SINK = AttentionSpec(64, mask=causal(), normaliser=softmax(sink=1.0))


@pytest.fixture
def account(tmp_path):
    def made(spec=CAUSAL, lengths=None, kv_lengths=None, sms=None, **asked):
        asked = Asked(**{"heads": 16, **asked})
        packing = Packing(lengths, kv_lengths, sms)
        return explain_variant_packed(Variant("x", spec, "x.py"), None, asked, packing, tmp_path)

    return made


def shown(found, width=200):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_packed(console, found)
    return [line.strip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("spec", [CAUSAL, FULL, WINDOW, SINK])
def test_equal_lengths_take_what_a_batch_takes(spec, account, tmp_path):
    found = account(spec, "4x2048")
    variant = Variant("x", spec, "x.py")
    dense = explain_variant(variant, None, Asked(2048, None, 4, 16), tmp_path).works
    own = dense[-1 if found.kernel == "hopper" else -2]
    assert (found.flops, found.exponentials) == (own.flops, own.exponentials)
    assert found.l2 == own.l2_read + own.l2_written
    assert found.dram == own.dram_read + own.dram_written
    assert found.tiles.unmasked + found.tiles.masked == found.tiles.padded


def test_tiles_by_hand(account):
    found = account(FULL, "1000, 2x200,0", heads=3, kv_heads=1)
    block_m, block_n = found.config.BLOCK_M, found.config.BLOCK_N
    tiles = [(-(-n // block_m), -(-n // block_n)) for n in (1000, 200, 200)]
    assert found.tiles.of_queries == sum(m for m, _ in tiles)
    assert found.tiles.unmasked + found.tiles.masked == 3 * sum(m * n for m, n in tiles)
    # Of a head's tiles: the last one of keys is not whole.
    assert found.tiles.masked == 3 * sum(m for m, _ in tiles)
    assert found.tiles.padded == 3 * 4 * tiles[0][0] * tiles[0][1]
    assert found.tiles.empty_rows == pytest.approx(1 - 1400 / (block_m * sum(m for m, _ in tiles)))
    assert (found.sequences.count, found.sequences.shortest, found.sequences.longest) == (
        4,
        0,
        1000,
    )


def test_short_sequences_have_two_consumers(account):
    """As the launcher decides, by the mean."""
    assert account(lengths="2x100,120").config.BLOCK_M == 128
    assert account(lengths="8x2048").config.BLOCK_M == 192


def test_balance_by_hand(account):
    """Of two programs, each of which takes the next tile when it has computed one."""
    equal = account(FULL, "192,768", heads=1, sms=2)
    assert (equal.config.BLOCK_M, equal.config.BLOCK_N) == (192, 64)
    # A tile visits 3 or 12 tiles of keys: 3, 12, 12, 12, 12, of which the first program gets three.
    assert (equal.balance.programs, equal.balance.busiest) == (2, pytest.approx(27 / 25.5))
    # The last sequence's last tile comes first: 12, 9, 6, 3, 3.
    assert account(lengths="192,768", heads=1, sms=2).balance.busiest == pytest.approx(18 / 16.5)
    assert account(lengths="192,768", heads=1, sms=200).balance.programs == 5


def test_keys_of_their_own(account):
    found = account(WINDOW, "16x512", "16x2048", kv_heads=2)
    assert (found.sequences.queries, found.sequences.keys) == (8192, 32768)
    assert found.config == account(WINDOW, "16x512").config
    assert found.tiles.masked < found.tiles.unmasked + found.tiles.masked
    assert "16 sequences of 512 queries: 8,192 queries and 32,768 keys" in shown(found)
    none = account(WINDOW, "300,2", "0,0")
    assert (none.flops, none.tiles.padded >= 0, none.balance.busiest) == (0, True, 1.0)


def test_usual_lengths():
    assert usual_packing() == (8192, 4096, 2048, 1024, 512, 256, 128, 128)


def test_the_terminal_shows_every_number(account):
    lines = shown(account(lengths="4096,16x256,8192"))
    assert lines[:2] == [
        "x, varlen, on sm_90 (H200)", "18 sequences of 256 to 8,192 queries: 16,384 queries",
    ]  # fmt: skip
    said = "\n".join(lines)
    for part in (
        "16 heads, d=128, bfloat16", "visit the keys from 0 to before q_last + 1",
        "Gluon kernel: BLOCK_M=192", "132 programs; the busiest visits ",
        "97 tiles of 192 queries for each head; 12.0% of their rows are empty",
        "padded to the longest, a dense call visits ", "The limit is compute: ",
    ):  # fmt: skip
        assert part in said, part
    assert "Without the Gluon kernel: the sink" in shown(account(SINK))
    found = account(WINDOW, "4096,16x256", "4096,16x512")
    assert all(len(line) <= 78 for line in shown(found, width=80))


def test_json_comes_back_as_it_was(account):
    found = [account(), account(WINDOW, "1,0", "1,7")]
    text = to_json(found, "varlen")
    assert packed_from_json(text) == found
    with pytest.raises(ValueError, match="of the form 'varlen', not of 'dense'"):
        from_json(text)


@pytest.mark.parametrize(
    ("spec", "packing", "message"),
    [
        (AttentionSpec(64, mask=block_sparse(block=16)), {}, "x: --form=varlen: 'varlen' has no "),
        (CAUSAL, {"lengths": "8", "kv_lengths": "9"}, "x: --kv-lengths: causal() is for equal"),
        (CAUSAL, {"lengths": "8,-1"}, "--lengths=8,-1: '-1' is no length; write lengths as in"),
        (CAUSAL, {"lengths": ""}, "--lengths=: '' is no length"),
        (WINDOW, {"lengths": "8,9", "kv_lengths": "x"}, "--kv-lengths=x: 'x' is no length"),
        (WINDOW, {"lengths": "8,9", "kv_lengths": "9"},
         "--kv-lengths: 1 sequences, --lengths has 2"),
        (CAUSAL, {"lengths": "99999x1"}, "--lengths: over 65536 sequences"),
        (CAUSAL, {"lengths": "40000x1024"}, "--lengths: 3,840,000 tiles of queries; explain looks"),
        (CAUSAL, {"sms": 0}, "--sms=0: out of range; write a number from 1 to 65536"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained_is_refused(spec, packing, message, account):
    with pytest.raises(FlashgenError) as error:
        account(spec, **packing)
    assert str(error.value).startswith(message)


@pytest.fixture
def explain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "from flashgen import AttentionSpec, causal\nspec = AttentionSpec(64, mask=causal())\n"
    (tmp_path / "mine.py").write_text(text)

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["explain", "mine.py", "--form", *arguments])
        return stop.value.code or 0, capsys.readouterr()

    return run


def test_the_command(explain, tmp_path):
    status, said = explain("varlen", "--lengths", "300,2x5", "--json", "a.json")
    assert status == 0 and said.out.startswith("mine, varlen, on sm_90 (H200)\n")
    [found] = packed_from_json((tmp_path / "a.json").read_text())
    assert (found.sequences.count, found.sequences.queries) == (3, 310)
    status, said = explain("varlen", "--sms", "66", "--heads", "8", "--json", "-")
    document = json.loads(said.out)
    assert (document["schema"], document["form"]) == (1, "varlen")
    [found] = packed_from_json(said.out)
    assert (found.balance.programs, found.call.num_q_heads) == (66, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("varlen", "--q-len", "8"), "--q-len=8: --form varlen has --lengths; leave it out"),
        (("varlen", "--page-size", "16"), "--page-size=16: is for --form cache; leave it out"),
        (("varlen", "--png", "a.png"), "--png=a.png: explains the form dense; leave it out"),
        (("cache", "--lengths", "8"), "--lengths=8: is for --form varlen; leave it out"),
        (("dense", "--sms", "8"), "--sms=8: is for --form varlen and --form cache; leave it out"),
    ],
)
def test_options_of_another_form_are_refused(explain, arguments, message):
    status, said = explain(*arguments)
    assert (status, said.err.strip()) == (2, f"error: {message}")

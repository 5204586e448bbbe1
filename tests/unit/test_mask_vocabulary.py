"""The masks that ship: what each shows, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import (
    Constant,
    Int,
    Mask,
    Tensor,
    bigbird,
    block_sparse,
    causal,
    chunked,
    dilated,
    document,
    global_tokens,
    natten_2d,
    prefix_lm,
    random_blocks,
    sink_tokens,
    sliding_window,
    strided,
    tree,
)
from flashgen.errors import MaskError
from flashgen.tracing.expr import bound
from support.pictures import picture

LEFT = Int("left", 2)
SIZE = Int("size", 2, min=1)


@pytest.mark.parametrize(
    ("mask", "q", "kv", "expected"),
    [
        (prefix_lm(2), 4, 4, ["xx..", "xx..", "xxx.", "xxxx"]),
        (prefix_lm(SIZE), 4, 4, ["xx..", "xx..", "xxx.", "xxxx"]),
        (prefix_lm(2, align="bottom_right"), 2, 4, ["xxx.", "xxxx"]),
        (prefix_lm(2, align="top_left"), 2, 4, ["xx..", "xx.."]),
        (chunked(2), 5, 5, ["xx...", "xx...", "..xx.", "..xx.", "....x"]),
        (chunked(SIZE) & causal(), 4, 4, ["x...", "xx..", "..x.", "..xx"]),
        (chunked(2, align="bottom_right"), 3, 4, ["xx..", "..xx", "..xx"]),
        (chunked(2, align="bottom_right"), 4, 3, ["...", "xx.", "xx.", "..x"]),
        (chunked(2, align="top_left"), 3, 4, ["xx..", "xx..", "..xx"]),
        (dilated(2), 4, 4, ["x.x.", ".x.x", "x.x.", ".x.x"]),
        (dilated(SIZE, align="bottom_right"), 2, 5, [".x.x.", "x.x.x"]),
        (dilated(3, align="top_left"), 2, 5, ["x..x.", ".x..x"]),
        (dilated(2) & sliding_window(2, 0), 4, 4, ["x...", ".x..", "x.x.", ".x.x"]),
        (
            strided(3),
            8,
            8,
            [
                "x.......",
                "xx......",
                "xxx.....",
                "xxxx....",
                ".xxxx...",
                "..xxxx..",
                "x..xxxx.",
                ".x..xxxx",
            ],
        ),
        (strided(2, align="bottom_right"), 2, 6, ["x.xxx.", ".x.xxx"]),
        (strided(2, heads="alternating"), 4, 4, ["x...", "xx..", "xxx.", ".xxx"]),
        (global_tokens(1), 3, 3, ["xxx", "x..", "x.."]),
        (global_tokens(SIZE, align="bottom_right"), 3, 4, ["xxxx", "xx..", "xx.."]),
        (global_tokens(1, align="top_left"), 2, 4, ["xxxx", "x..."]),
        (sink_tokens(1), 2, 3, ["x..", "x.."]),
        (
            causal() & (sink_tokens(SIZE) | sliding_window(1, 0)),
            5,
            5,
            ["x....", "xx...", "xxx..", "xxxx.", "xx.xx"],
        ),
        # What its docstring warns of: without parentheses the sinks are not causal.
        (sink_tokens(2) | sliding_window(1, 0) & causal(), 3, 3, ["xx.", "xx.", "xxx"]),
        (natten_2d(1, 5, 3), 5, 5, ["xxx..", "xxx..", ".xxx.", "..xxx", "..xxx"]),
        (natten_2d(1, 5, (1, 4)), 5, 5, ["xxxx.", "xxxx.", "xxxx.", ".xxxx", ".xxxx"]),
        (natten_2d(3, 1, 5), 3, 3, ["xxx", "xxx", "xxx"]),
        (
            natten_2d(Int("height", 3), SIZE, (2, 1)),
            6,
            6,
            ["x.x...", ".x.x..", "x.x...", ".x.x..", "..x.x.", "...x.x"],
        ),
    ],
    ids=str,
)
def test_sparse_masks_show_what_they_say(mask: Mask, q: int, kv: int, expected: list[str]) -> None:
    assert picture(mask, q, kv, size=2, height=3) == expected


def test_every_pixel_sees_as_many_neighbours() -> None:
    rows = picture(natten_2d(5, 6, 3), 30, 30)
    assert {row.count("x") for row in rows} == {9}
    seen = [(j // 6, j % 6) for j, cell in enumerate(rows[0]) if cell == "x"]
    assert seen == [(y, x) for y in range(3) for x in range(3)]


def test_heads_take_turns_at_the_two_patterns_of_strided() -> None:
    mask = strided(2, heads="alternating")
    assert picture(mask, 5, 5, h=2)[4] == "..xxx"
    assert picture(mask, 5, 5, h=3)[4] == "x.x.x"


def test_a_width_for_each_sequence_or_head() -> None:
    by_batch = prefix_lm(Tensor("prefix", ("batch",), "int32"))
    prefix = torch.tensor([0, 2])
    assert picture(by_batch, 3, 3, b=0, prefix=prefix) == ["x..", "xx.", "xxx"]
    assert picture(by_batch, 3, 3, b=1, prefix=prefix) == ["xx.", "xx.", "xxx"]
    by_head = sliding_window(Tensor("width", (1, "num_q_heads"), "int32"), 0)
    width = torch.tensor([[0, 1]])
    assert picture(by_head, 2, 2, h=0, width=width) == ["x.", ".x"]
    assert picture(by_head, 2, 2, h=1, width=width) == ["x.", "xx"]


IDS = torch.tensor([[0, 0, 1, 1, 1], [3, 4, 4, 9, 9]], dtype=torch.int32)


def test_documents_keep_to_themselves() -> None:
    mask = document()
    assert [(p.name, p.sorted) for p in mask.params] == [("document_ids", True)]
    assert mask.equal_lengths
    assert picture(mask & causal(), 5, 5, document_ids=IDS) == [
        "x....",
        "xx...",
        "..x..",
        "..xx.",
        "..xxx",
    ]
    assert picture(mask, 5, 5, b=1, document_ids=IDS)[1:4] == [".xx..", ".xx..", "...xx"]
    alike = document(Tensor("ids", ("kv_len",), "int32", sorted=True))
    assert picture(alike, 5, 5, b=1, ids=IDS[0])[3] == "..xxx"


def test_documents_of_a_query_that_is_not_a_key() -> None:
    last, first = document(align="bottom_right"), document(align="top_left")
    assert not last.equal_lengths and not first.equal_lengths
    assert picture(last, 2, 5, document_ids=IDS) == ["..xxx", "..xxx"]
    assert picture(first, 2, 5, document_ids=IDS) == ["xx...", "xx..."]
    few = IDS[:, :3]
    assert picture(last, 5, 3, document_ids=few) == ["...", "...", "xx.", "xx.", "..x"]
    assert picture(first, 5, 3, document_ids=few) == ["xx.", "xx.", "..x", "...", "..."]


def test_documents_of_queries_packed_in_their_own_way() -> None:
    ids = Tensor("ids", ("batch", "q_len"), "int32")
    mask = document(ids, Tensor("kv_ids", ("batch", "kv_len"), "int32", sorted=True))
    assert not mask.equal_lengths
    mine = torch.tensor([[1, 7, 0]])
    assert picture(mask, 3, 5, ids=mine, kv_ids=IDS) == ["..xxx", ".....", "xx..."]


def test_drafted_tokens_see_the_context_and_their_ancestors() -> None:
    # 0 is the root of 1 and 2; 3 descends from 1.
    table = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    expected = ["xxx...", "xxxx..", "xxx.x.", "xxxx.x"]
    assert picture(tree(), 4, 6, ancestors=table[None]) == expected
    assert picture(tree(Tensor("t", ("q_len", "q_len"), "bool")), 4, 6, t=table) == expected
    assert picture(tree(), 4, 4, ancestors=table[None]) == [row[2:] for row in expected]


LAYOUT = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.bool)


def test_a_table_of_blocks() -> None:
    expected = ["xx..x", "xx..x", ".....", "....."]
    shared = block_sparse(Tensor("layout", (None, None), "bool"), 2)
    assert picture(shared, 4, 5, layout=LAYOUT) == expected
    assert picture(block_sparse(block=SIZE), 4, 5, size=2, layout=LAYOUT[None]) == expected
    dims = ("batch", 1, None, None)
    by_batch = block_sparse(Tensor("layout", dims, "bool"), 2)
    layout = torch.stack([LAYOUT, ~LAYOUT])[:, None]
    assert picture(by_batch, 2, 5, b=1, h=3, layout=layout) == ["..xx.", "..xx."]


STATIC = [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    "layout",
    [STATIC, LAYOUT, LAYOUT.numpy(), LAYOUT[None], Constant("layout", STATIC, "int32")],
    ids=["lists", "tensor", "array", "for every head", "constant"],
)
def test_a_layout_that_is_known(layout: Any) -> None:
    mask = block_sparse(layout, 2)
    assert picture(mask, 4, 5) == ["xx..x", "xx..x", ".....", "....."]
    assert picture(mask, 3, 2, h=5) == ["xx", "xx", ".."]
    assert mask.label == "block_sparse(layout, block=2)"
    (table,) = mask.params
    assert isinstance(table, Constant) and table.dtype == "bool"
    assert [(of, int(size.sym)) for of, size in table.limits] == [("q_len", 4), ("kv_len", 6)]


def test_layouts_that_are_known_one_for_each_head() -> None:
    mask = block_sparse(torch.stack([LAYOUT, ~LAYOUT]), SIZE)
    assert picture(mask, 2, 5, h=0, size=2) == ["xx..x", "xx..x"]
    assert picture(mask, 2, 5, h=1, size=2) == ["..xx.", "..xx."]
    table, _ = mask.params
    assert [(of, str(size)) for of, size in table.limits] == [
        ("num_q_heads", "2"),
        ("q_len", "2*size"),
        ("kv_len", "3*size"),
    ]


def test_two_known_layouts_under_names_of_their_own() -> None:
    one, two = Constant("one", [[1, 0], [1, 1]]), Constant("two", [[1, 1], [0, 1]])
    mask = block_sparse(one, 1) & ~block_sparse(two, 1)
    assert picture(mask, 2, 2) == ["..", "x."]
    assert mask.label == "block_sparse(one, block=1) & ~block_sparse(two, block=1)"


def test_bigbird_with_blocks_drawn_when_it_is_built() -> None:
    drawn = random_blocks(2, 24, 4, 1, generator=torch.Generator().manual_seed(0))
    known, passed = bigbird(4, random=drawn), bigbird(4)
    assert known.label == "bigbird(4, 3, 1, random_blocks)"
    for head in range(2):
        expected = picture(passed, 24, 24, h=head, random_blocks=drawn)
        assert picture(known, 24, 24, h=head) == expected
    assert drawn.any() and isinstance(known.params[0], Constant)


def test_a_table_is_as_large_as_the_blocks_are_many() -> None:
    (table,) = block_sparse(block=4).params
    with bound({"q_len": 9, "kv_len": 4, "num_q_heads": 2}):
        assert [int(dim + 0) for dim in table.dims[1:]] == [3, 1]


def test_bigbird_sees_globals_neighbours_and_random_blocks() -> None:
    table = torch.zeros(1, 6, 6, dtype=torch.bool)
    table[0, 2, 5] = table[0, 5, 2] = True
    rows = picture(bigbird(2), 12, 12, random_blocks=table)
    assert rows[::2] == [
        "xxxxxxxxxxxx",
        "xxxxxx......",
        "xxxxxxxx..xx",
        "xx..xxxxxx..",
        "xx....xxxxxx",
        "xx..xx..xxxx",
    ]
    assert rows[1::2] == rows[::2]
    assert picture(bigbird(2, 1, 0), 4, 4, random_blocks=table)[0] == "xx.."


def test_random_blocks_are_drawn_beside_what_is_seen_anyway() -> None:
    def draw() -> torch.Tensor:
        return random_blocks(4, 100, 8, 3, generator=torch.Generator().manual_seed(0))

    table = draw()
    assert table.dtype == torch.bool and table.shape == (4, 13, 13)
    assert torch.equal(table, draw())
    assert not table[:, 0].any() and not table[:, :, 0].any()
    assert not any(table.diagonal(offset, 1, 2).any() for offset in (-1, 0, 1))
    assert (table[:, 1:].sum(-1) == 3).all()
    assert len({tuple(head.flatten().tolist()) for head in table}) == 4
    assert (random_blocks(1, 24, 8, 3).sum(-1) == 0).all()  # three blocks: nothing is left
    assert random_blocks(2, 1, 8).shape == (2, 1, 1)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda: sliding_window(1, 0.5),
            "sliding_window: right=0.5; give a whole number, an Int or a Tensor of dtype 'int32'",
        ),
        (lambda: prefix_lm(True), "prefix_lm: prefix=True; give a whole number"),
        (
            lambda: prefix_lm(Tensor("prefix", ("kv_len",), "int32")),
            "prefix_lm: prefix=Tensor('prefix', (kv_len), 'int32', sorted=False); "
            "its dimensions can be batch, num_q_heads and 1",
        ),
        (lambda: prefix_lm(Tensor("prefix", ("batch",))), "prefix_lm: prefix=Tensor("),
        (
            lambda: chunked(0),
            "chunked: size=0; give a number from 1 up, or an Int declared with min=1",
        ),
        (lambda: chunked(LEFT), "chunked: size=Int('left', 2, min=0); give a number from 1 up"),
        (lambda: dilated(2.0), "dilated: step=2.0; give a number from 1 up"),
        (
            lambda: strided(2, heads="both"),
            "strided: heads='both': unknown; choose 'merged' or 'alternating'",
        ),
        (
            lambda: natten_2d(4, 4, (3, 3, 3)),
            "natten_2d: kernel=(3, 3, 3); give one side, or (rows, columns)",
        ),
        (lambda: bigbird(64, 2), "bigbird: window=2; give an odd number of blocks from 1 up"),
        (
            lambda: document(Tensor("ids", ("batch", "kv_len"))),
            "document: ids=Tensor('ids', (batch, kv_len), 'float32', sorted=False); "
            "declare it with dtype='int32'",
        ),
        (
            lambda: document(Tensor("ids", ("batch", "q_len"), "int32")),
            "its dimensions can be batch, kv_len and 1",
        ),
        (
            lambda: document(
                Tensor("ids", ("batch", "q_len"), "int32"),
                Tensor("kv_ids", ("batch", "kv_len"), "int32"),
                align="top_left",
            ),
            "document: align='top_left' beside kv_ids, which needs none; leave it out",
        ),
        (
            lambda: tree(Tensor("seen", ("batch", "q_len", "kv_len"), "bool")),
            "tree: ancestors=Tensor('seen', (batch, q_len, kv_len), 'bool', sorted=False); "
            "declare it with dtype='bool' and dims ('batch', 'q_len', 'q_len') "
            "or ('q_len', 'q_len')",
        ),
        (
            lambda: block_sparse(Tensor("layout", (4, 4), "int32")),
            "declare it with dtype='bool' and a dimension each for the blocks of queries and of "
            "keys",
        ),
        (lambda: sink_tokens(0), "sink_tokens: n=0; give a number from 1 up, or an Int"),
        (lambda: sink_tokens(-4), "sink_tokens: n=-4; give a number from 1 up, or an Int"),
        (lambda: global_tokens(0), "global_tokens: n=0; give a number from 1 up, or an Int"),
        (lambda: prefix_lm(-1), "prefix_lm: prefix=-1; give a number from 0 up, or an Int"),
        (lambda: natten_2d(8, 8, (3, 0)), "natten_2d: kernel=0; give a number from 1 up"),
        (lambda: natten_2d(0, 8, 3), "natten_2d: height=0; give a number from 1 up, or an Int"),
        (lambda: bigbird(64, global_blocks=-1), "bigbird: global_blocks=-1; give a number from 0"),
        (
            lambda: document(3),
            "document: ids=3; give a declared tensor, as Tensor('ids', ('batch', 'kv_len'), "
            "'int32', sorted=True)",
        ),
        (lambda: document("ids"), "document: ids='ids'; give a declared tensor, as Tensor('ids'"),
        (
            lambda: document(Tensor("ids", ("batch", "q_len"), "int32"), 3),
            "document: kv_ids=3; give a declared tensor",
        ),
        (
            lambda: tree(3),
            "tree: ancestors=3; give a declared tensor, as "
            "Tensor('ancestors', ('batch', 'q_len', 'q_len'), 'bool')",
        ),
        (lambda: block_sparse([]), "block_sparse: values of layout are empty; give an element"),
        (
            lambda: block_sparse([[1, 0], [1]]),
            "block_sparse: values of layout are ragged, with parts of the shapes (2,) and (1,); "
            "give parts of one shape",
        ),
        (
            lambda: block_sparse([[1, 2]]),
            "block_sparse: values of layout hold 2; give True or False, 1 or 0",
        ),
        (lambda: block_sparse(torch.ones(2, 2)), "values of layout hold 1.0; give True or False"),
        (
            lambda: block_sparse(64),
            "block_sparse: layout=64; give a table of bools, and positions a block as block=",
        ),
        (lambda: block_sparse(causal()), "block_sparse: values of layout hold causal(); give"),
        (
            lambda: block_sparse([1, 0]),
            "block_sparse: layout=Constant('layout', (2), 'bool', 6f6fd61d); give bools in rows of "
            "blocks, or a list of such tables, one for each head",
        ),
        (
            lambda: bigbird(16, random=[[[[1]]]]),
            "bigbird: random=Constant('random_blocks', (1, 1, 1, 1), 'bool', ",
        ),
        (lambda: block_sparse(Constant("near", [[3]])), "Constant('near'): values hold 3; give"),
        (
            lambda: block_sparse(Tensor("layout", ("num_kv_heads", 4, 4), "bool")),
            "before the blocks of queries and of keys its dimensions can be batch, num_q_heads "
            "and 1",
        ),
    ],
)
def test_what_a_mask_cannot_be_made_of_is_refused(declare: Callable[[], Any], message: str) -> None:
    with pytest.raises(MaskError) as caught:
        declare()
    assert message in str(caught.value)

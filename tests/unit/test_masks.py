"""Masks: their combinations, labels and identity, and functions that are none."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from flashgen import (
    AttentionSpec,
    Int,
    Mask,
    Tensor,
    bigbird,
    block_sparse,
    causal,
    document,
    full,
    kv_len,
    natten_2d,
    prefix_lm,
    q_len,
    sliding_window,
    strided,
    tree,
)
from flashgen.errors import MaskError
from flashgen.masks import as_mask
from flashgen.symbols import KV_IDX, Q_IDX
from flashgen.tracing.expr import Expr
from support.pictures import picture

LEFT = Int("left", 2)


@pytest.mark.parametrize(
    ("mask", "q", "kv", "expected"),
    [
        (full(), 2, 3, ["xxx", "xxx"]),
        (causal(), 3, 3, ["x..", "xx.", "xxx"]),
        (causal(align="top_left"), 2, 4, ["x...", "xx.."]),
        (causal(align="top_left"), 4, 2, ["x.", "xx", "xx", "xx"]),
        (causal(align="bottom_right"), 2, 4, ["xxx.", "xxxx"]),
        (causal(align="bottom_right"), 4, 2, ["..", "..", "x.", "xx"]),
        (sliding_window(1, 0), 4, 4, ["x...", "xx..", ".xx.", "..xx"]),
        (sliding_window(0, 1), 4, 4, ["xx..", ".xx.", "..xx", "...x"]),
        (sliding_window(1, 0, align="bottom_right"), 2, 4, [".xx.", "..xx"]),
        (sliding_window(1, 0, align="top_left"), 4, 2, ["x.", "xx", ".x", ".."]),
        (sliding_window(-1, 2), 4, 4, [".xx.", "..xx", "...x", "...."]),
        (sliding_window(LEFT, 0), 4, 4, ["x...", "xx..", "xxx.", ".xxx"]),
        (~causal(), 3, 3, [".xx", "..x", "..."]),
        (~full(), 1, 2, [".."]),
        (causal() & ~sliding_window(0, 0), 3, 3, ["...", "x..", "xx."]),
        (sliding_window(0, 0) | ~causal(), 3, 3, ["xxx", ".xx", "..x"]),
        (full() & causal(), 2, 2, ["x.", "xx"]),
    ],
    ids=str,
)
def test_a_mask_shows_what_it_says(mask: Mask, q: int, kv: int, expected: list[str]) -> None:
    assert picture(mask, q, kv, left=2) == expected


def test_a_bare_function_joins_in_from_either_side() -> None:
    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx % 2 == 0

    expected = ["x..", "x..", "x.x"]
    assert picture(causal() & even, 3, 3) == expected
    assert picture(even & causal(), 3, 3) == expected
    assert picture(even | full(), 1, 2) == ["xx"]
    assert as_mask(even).label == "even"
    assert as_mask(lambda b, h, q, kv: q >= kv).label == "mask"


@pytest.mark.parametrize(
    ("mask", "label"),
    [
        (full(), "full()"),
        (causal(), "causal()"),
        (causal(align="bottom_right"), "causal(align='bottom_right')"),
        (sliding_window(LEFT, 0), "sliding_window(left, 0)"),
        (sliding_window(4, 1, align="top_left"), "sliding_window(4, 1, align='top_left')"),
        (~causal(), "~causal()"),
        (~(causal() | full()), "~(causal() | full())"),
        (causal() & (full() | ~causal()), "causal() & (full() | ~causal())"),
        (prefix_lm(Tensor("prefix", ("batch",), "int32")), "prefix_lm(prefix)"),
        (strided(8, heads="alternating"), "strided(8, heads='alternating')"),
        (natten_2d(8, 8, (3, 5)), "natten_2d(8, 8, (3, 5))"),
        (document(align="top_left"), "document(align='top_left')"),
        (tree(), "tree()"),
        (block_sparse(block=64), "block_sparse(block=64)"),
        (bigbird(64), "bigbird(64, 3, 1)"),
    ],
    ids=str,
)
def test_a_label_is_what_a_person_writes(mask: Mask, label: str) -> None:
    assert mask.label == label
    assert repr(mask) == label


def test_only_masks_of_unstated_alignment_need_equal_lengths() -> None:
    stated = causal(align="bottom_right")
    assert causal().equal_lengths and sliding_window(1, 1).equal_lengths
    assert not stated.equal_lengths and not full().equal_lengths
    assert (~causal()).equal_lengths
    assert (stated | causal()).equal_lengths and not (stated & full()).equal_lengths


def test_masks_are_equal_when_they_mean_the_same() -> None:
    mine = Mask(lambda b, h, q, kv: q >= kv, "mine")
    assert mine == causal(align="top_left") and hash(mine) == hash(causal(align="top_left"))
    assert causal() != causal(align="top_left")  # one demands equal lengths
    assert causal() & sliding_window(LEFT, 0) == sliding_window(LEFT, 0) & causal()
    assert sliding_window(LEFT, 0) != sliding_window(Int("left", 3), 0)
    assert sliding_window(LEFT, 0) != sliding_window(Int("left", 2, min=1), 0)
    assert causal() != "causal()"


def test_parameters_come_in_the_order_of_first_use() -> None:
    right = Int("right", 0)
    assert [p.name for p in sliding_window(LEFT, right).params] == ["left", "right"]
    assert [p.name for p in (sliding_window(1, right) & sliding_window(LEFT, 0)).params] == [
        "right",
        "left",
    ]
    assert causal().params == ()


def test_identity_is_the_same_in_every_process() -> None:
    code = (
        "from flashgen import *\n"
        "left = Int('left', 1024)\n"
        "mask = causal() & sliding_window(left, Int('right')) | ~sliding_window(left, 3)\n"
        "print(mask.canonical, AttentionSpec(64, mask=mask).digest)"
    )
    outputs = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    assert (
        "params=[('Int', 'left', 1024, 0), ('Int', 'right', None, 0)] equal_lengths=True"
        in outputs.pop()
    )


def test_a_spec_takes_a_bare_function() -> None:
    spec = AttentionSpec(64, mask=lambda b, h, q, kv: q >= kv)  # type: ignore[arg-type]
    assert isinstance(spec.mask, Mask)
    assert hash(spec) == hash(AttentionSpec(64, mask=spec.mask))


def test_a_specs_digest_tells_masks_apart() -> None:
    masks = [full(), causal(), causal(align="top_left"), sliding_window(LEFT, 0), ~causal()]
    masks += [sliding_window(Int("left", 3), 0), sliding_window(2, 0)]
    assert len({AttentionSpec(64, mask=mask).digest for mask in masks}) == len(masks)


def not_a_condition(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


def no_result(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> None:
    return None


def python_if(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > 5:
        return q_idx >= kv_idx
    return q_idx <= kv_idx


def own_bug(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return {}["missing"]


def calls_a_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return causal()(b, h, q_idx, kv_idx)


def two_arguments(q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (
            not_a_condition,
            "mask not_a_condition returned the integer `q_idx - kv_idx`, not a condition; "
            "return a comparison, or several joined by & and |",
        ),
        (
            no_result,
            "mask no_result returned None, not a condition; "
            "return a comparison, or several joined by & and |",
        ),
        (
            python_if,
            "test_masks.py:{line+1}: `if q_idx > 5:`: the truth of `q_idx > 5` is not known while "
            "the function is traced; write & for `and`, | for `or`, ~ for `not`, "
            "where(condition, a, b) for `if`, minimum and maximum for `min` and `max`, "
            "and (a <= x) & (x < b) for a chained comparison",
        ),
        (
            own_bug,
            "test_masks.py:{line+1}: `return {}[\"missing\"]`: KeyError: 'missing'; "
            "a mask is a function (b, h, q_idx, kv_idx) of symbols",
        ),
        (
            calls_a_mask,
            "test_masks.py:{line+1}: `return causal()(b, h, q_idx, kv_idx)`: TypeError: 'Mask' "
            "object is not callable; call its .mask_mod, or join it to others outside of the "
            "function",
        ),
        (
            two_arguments,
            "mask two_arguments: TypeError: two_arguments() takes 2 positional arguments but 4 "
            "were given; a mask is a function (b, h, q_idx, kv_idx) of symbols",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mask_that_does_not_trace_says_where_and_why(
    mask_mod: Callable[..., Any], message: str
) -> None:
    with pytest.raises(MaskError) as caught:
        assert as_mask(mask_mod).canonical
    line = mask_mod.__code__.co_firstlineno
    assert str(caught.value).endswith(message.replace("{line+1}", str(line + 1)))


def test_what_is_no_mask_is_refused() -> None:
    with pytest.raises(MaskError, match=r"mask=7 is no mask; give a function"):
        as_mask(7)  # type: ignore[arg-type]
    with pytest.raises(MaskError, match=r"align='left': unknown; choose None, 'top_left' or"):
        causal(align="left")


def turned(b: Any, h: Any, kv_idx: Any, q_idx: Any) -> Any:
    return kv_idx >= q_idx


@pytest.mark.parametrize(
    "declare",
    [
        lambda: as_mask(turned).traced,
        lambda: Mask(turned, "turned").traced,
        lambda: causal() & turned,
        lambda: turned | causal(),
        lambda: ~Mask(turned, "turned"),
    ],
)
def test_arguments_in_another_order_are_refused(declare: Callable[[], Any]) -> None:
    with pytest.raises(MaskError) as caught:
        declare()
    assert str(caught.value) == (
        "mask turned takes (b, h, kv_idx, q_idx), and its argument `kv_idx` would be q_idx; "
        "name them in the order (b, h, q_idx, kv_idx)"
    )


def test_arguments_of_other_names_go_by_position() -> None:
    def flex(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
        return token_q >= token_kv

    def any_number(*at: Any) -> Any:
        return at[2] >= at[3]

    @functools.wraps(turned)
    def adapted(b: Any, h: Any, i: Any, j: Any, q_idx: Any = 0) -> Any:
        return turned(b, h, j, i)

    for function in (flex, any_number, lambda b, h, k, q: k >= q):
        assert as_mask(function) == causal(align="top_left")
    assert as_mask(adapted).traced.sym == (Expr(KV_IDX) >= Expr(Q_IDX)).sym


@pytest.mark.parametrize(
    "ask",
    [
        lambda: causal() and full(),
        lambda: causal() or full(),
        lambda: not causal(),
        lambda: 1 if causal() else 2,
    ],
)
def test_a_mask_is_neither_true_nor_false(ask: Callable[[], Any]) -> None:
    with pytest.raises(MaskError) as caught:
        ask()
    assert f"test_masks.py:{ask.__code__.co_firstlineno}: " in str(caught.value)
    assert str(caught.value).endswith(
        "the mask causal() is neither true nor false; write & for `and`, | for `or`, ~ for `not`, "
        "with parentheses around what belongs together"
    )


@pytest.mark.parametrize(
    "join",
    [
        lambda a: a - full(),
        lambda a: a ^ full(),
        lambda a: own_bug ^ a,
        lambda a: a + 1,
        lambda a: 2 * a,
    ],
)
def test_masks_have_no_other_operators(join: Callable[[Mask], Any]) -> None:
    with pytest.raises(MaskError) as caught:
        join(causal())
    assert str(caught.value).endswith(
        "the mask causal() is given to an operator that masks do not have; join masks by & and | "
        "and invert them by ~: a & ~b is a without b, (a & ~b) | (~a & b) one of the two"
    )


def test_lengths_and_batch_and_head_are_there_to_be_used() -> None:
    mask = Mask(lambda b, h, q, kv: (h >= 2) & (b == 0) & (kv < kv_len - q_len), "odd")
    assert {s.name for s in mask.traced.sym.free_symbols} == {"b", "h", "kv_idx", "kv_len", "q_len"}


def test_a_mistake_in_a_folder_called_torch_is_the_users_own(tmp_path) -> None:
    file = tmp_path / "torch" / "mine.py"
    file.parent.mkdir()
    file.write_text("def mine(b, h, q_idx, kv_idx):\n    return q_idx > kv_idx and h > 0\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(MaskError) as caught:
        as_mask(names["mine"]).traced  # noqa: B018
    assert str(caught.value).startswith(f"{file}:2: `return q_idx > kv_idx and h > 0`: ")

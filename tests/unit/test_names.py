"""Parameter names that would clash with the generated module's own."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec, Int, sliding_window
from flashgen.codegen.names import is_taken
from flashgen.loader import Variant
from flashgen.validate import validate


@pytest.mark.parametrize(
    "name",
    [
        "acc",
        "acc_3",
        "m_i",
        "tl",
        "torch",
        "BLOCK_N",
        "q_src",
        "k_src_2",
        "kv_end",
        "some_begin",
        "swap",
        "group",
        "config",
        "scores",
        "head",
        "batch",
        "_launch",
        "_load_tile",
        "_tma_reads",
        "range",
        "CONFIGS",
        "HOPPER_CONFIG",
        "gl",
        "q_desc",
        "heads_together",
        "_producer",
    ],
)
def test_names_of_the_module_are_taken(name: str) -> None:
    assert is_taken(name)


@pytest.mark.parametrize("name", ["left", "window", "left_2", "n", "sinks", "stride", "step"])
def test_names_that_people_choose_are_free(name: str) -> None:
    assert not is_taken(name)


@pytest.mark.parametrize("name", ["seed", "dropout_p", "kept_scale", "threshold", "DROPS"])
def test_names_of_dropout_are_taken_where_there_is_dropout(name: str) -> None:
    assert is_taken(name, dropout=True)
    assert not is_taken(name)


def test_a_taken_name_is_refused() -> None:
    spec = AttentionSpec(64, mask=sliding_window(Int("m_i"), 0))
    assert [str(v) for v in validate(Variant("near", spec, "specs/near.py"))] == [
        "specs/near.py: near: params=Int('m_i', None, min=0): parameter 'm_i' is a name that the "
        "generated module uses; rename the parameter"
    ]

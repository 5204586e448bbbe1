"""Parameter names that would clash with the generated module's own."""

from __future__ import annotations

import ast
import builtins
import json

import pytest

from flashgen import (
    AttentionSpec,
    Float,
    Int,
    Tensor,
    alibi,
    block_sparse,
    causal,
    document,
    sliding_window,
    softcap,
)
from flashgen.codegen.names import FILE, is_fixed, is_taken
from flashgen.loader import Variant
from flashgen.plan import lower
from flashgen.validate import validate
from support.variants import any_hopper, any_hopper_backward, rendered


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


@pytest.mark.parametrize(
    "name", ["left", "window", "left_2", "n", "sinks", "stride", "step", "m", "ctx"]
)
def test_names_that_people_choose_are_free(name: str) -> None:
    assert not is_taken(name)


@pytest.mark.parametrize("name", ["seed", "dropout_p", "kept_scale", "threshold", "DROPS"])
def test_names_of_dropout_are_taken_where_there_is_dropout(name: str) -> None:
    assert is_taken(name, dropout=True)
    assert not is_taken(name)


_IDS = Tensor("user", ("batch", "kv_len"), "int32", sorted=True)
_SLOPES = Tensor("user", ("num_q_heads",))

#: Modules of other structures than those that the names were found in.
OTHERS = {
    "documents": AttentionSpec(128, mask=document(_IDS)),
    "deterministic": AttentionSpec(128, mask=document(_IDS) & causal(), deterministic=True),
    "wide": AttentionSpec(256, mask=block_sparse(block=Int("user", 16, min=1))),
    "two_head_dims": AttentionSpec((192, 128), mask=causal(), score=alibi(_SLOPES)),
    "learned": AttentionSpec(128, mask=causal(), score=alibi(_SLOPES)),
    "padded": AttentionSpec(
        40, "float16", score=softcap(Float("user", above=0)), deterministic=True
    ),
}


@pytest.mark.parametrize("spec", OTHERS.values(), ids=OTHERS)
def test_whatever_a_module_binds_beside_parameters_is_taken(spec: AttentionSpec) -> None:
    plan = lower(spec, "mine")
    module = ast.parse(rendered(plan, any_hopper(plan), any_hopper_backward(plan)))
    reached = [bound for bound in map(_bound_in, module.body) if "user" in bound]
    assert len(reached) > 5
    others = {name for bound in reached for name in bound if "user" not in name}
    others -= {param.name for param in spec.params}
    assert {name for name in others if not is_taken(name)} == set()


def _bound_in(statement: ast.stmt) -> set[str]:
    """The arguments and variables of a function."""
    nodes = list(ast.walk(statement))
    variables = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return variables | {n.arg for n in nodes if isinstance(n, ast.arg)}


def test_a_name_that_functions_of_the_module_use_is_refused() -> None:
    spec = AttentionSpec(64, mask=sliding_window(Int("merge"), 0))
    assert [str(v) for v in validate(Variant("near", spec, "specs/near.py"))] == [
        "specs/near.py: near: params=Int('merge', None, min=0): parameter 'merge' is a name that "
        "the generated module uses; rename the parameter, to merge_ for one"
    ]
    for name in ("torch", "tl", "range", "reference", "_launch", "op", "CONFIGS"):
        assert is_fixed(name), name
    for name in ("top", "shift", "p", "x", "n", "m_i", "key", "out_ptr", "start"):
        assert not is_fixed(name), name
    assert is_fixed("cu_seqlens_q", forms=("dense", "varlen"))
    assert not is_fixed("cu_seqlens_q")
    assert is_fixed("kv_lens", forms=("dense", "cache"))


def test_there_is_another_name_for_each_that_is_taken() -> None:
    taken = json.loads(FILE.read_text())
    for name in (*taken["always"], *taken["dropout"], *dir(builtins)):
        others = (f"{name}_", f"the_{name}", f"{name}_value")
        assert not all(is_taken(other, dropout=True) for other in others)

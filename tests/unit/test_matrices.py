"""Feature maps that begin with a product: what they trace to, what is refused, what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, document, exp, favor, linear, relu, where
from flashgen.explain.call import Asked
from flashgen.explain.linear import explain_linear
from flashgen.feature_maps import as_feature_map
from flashgen.loader import Variant
from flashgen.validate import validate

M, N = (Tensor(name, (64, 32)) for name in "MN")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 32))
LEARNED = torch.zeros(64, 32)
GOOD = AttentionSpec(64, mask=causal(), normaliser=linear(lambda x: exp(x @ M)))


def findings(feature_map: Any, **fields: Any) -> list[str]:
    made = linear(feature_map, **fields.pop("linear", {}))
    variant = Variant("tiny", replace(GOOD, normaliser=made, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


def of(*dims: Any, dtype: str = "float32") -> Any:
    return lambda x: exp(x @ Tensor("M", dims, dtype))


@pytest.mark.parametrize(
    ("feature_map", "fields"),
    [
        (lambda x: exp(x @ M), {}),
        (lambda x: [exp(x @ M), exp(-(x @ M))], {}),
        ((lambda x: exp(x @ M), lambda x: exp(x @ N)), {}),
        (of("num_kv_heads", 64, 128, dtype="bfloat16"), {}),
        ((of("num_q_heads", 64, 16), lambda x: exp(x @ Tensor("N", (64, 16)))), {}),
        (of(192, 32), {"head_dim": (192, 64)}),
        (of(64, 32), {"linear": {"decay": DECAY}}),
    ],
)  # fmt: skip
def test_good_maps(feature_map: Any, fields: dict[str, Any]) -> None:
    assert findings(feature_map, **fields) == []


@pytest.mark.parametrize(
    ("feature_map", "message"),
    [
        (lambda x: exp(x) @ M, "multiplies `exp(x)` by M, and a product comes first; write x @ M, "
         "and functions of that"),
        (lambda x: (x @ M) @ N, "multiplies `(x @ M)` by N, and a product comes first; write x @"),
        (lambda x: x + x @ M, "reads x besides `(x @ M)`; write a function of `(x @ M)` alone"),
        (lambda x: x @ M + x @ N, "multiplies x by M and by N; write x @ M with the columns of"),
        (lambda x: x @ LEARNED, "what a product is with has to be declared; write x @ Tensor('M',"),
        (of(64, 32, dtype="int32"), "M is no matrix that a call passes and that can have a "
         "gradient; declare it as Tensor('M', (head_dim, columns)), of floats"),
        (lambda x: M @ x, "`M @ x` is no product of a vector; write x @ M"),
        (of(32, 64), "vectors of q have 64 elements, and are multiplied by Tensor('M', (32, 64), "
         "'float32', sorted=False); declare it with dims (64, columns), or ('num_kv_heads', 64, "
         "columns)"),
        (of("num_q_heads", 64, 32), "vectors of k have 64 elements, and are multiplied by"),
        (of("num_kv_heads", 4, 64, 32), "vectors of q have 64 elements, and are multiplied by"),
        (of(64, 20), "M has 20 columns; write a multiple of 8 from 16 to 128"),
        (of(64, 256), "M has 256 columns; write a multiple of 8 from 16 to 128"),
        ((lambda x: exp(x @ M), lambda x: exp(x @ Tensor("N", (64, 16)))),
         "products of q and of k have 16 and 32 columns; declare both matrices with as many"),
        ((lambda x: exp(x @ M), lambda x: x @ N), "features of q and of k differ in more than a "
         "matrix; return the same of x @ M and of x @ N"),
        ((exp, exp), "a function for q and one for k are for two matrices; write x @ M in one"),
    ],
)  # fmt: skip
def test_what_is_refused(feature_map: Any, message: str) -> None:
    [finding] = findings(feature_map)
    assert message in finding


def test_maps_that_ship_are_of_products_too() -> None:
    """What `relu` computes, not what its name says."""
    one, other = (as_feature_map(x) for x in (lambda x: relu()(x @ M), lambda x: exp(x @ M)))
    assert one == as_feature_map(lambda x: where(x @ M > 0.0, x @ M, 0.0)) != other
    assert one.never_negative and one.num_features(64) == 32
    [finding] = findings(lambda x: favor()(x @ M))
    assert "favor's features are of a whole vector and a matrix" in finding


def test_masks_have_no_vectors() -> None:
    [finding] = validate(Variant("tiny", AttentionSpec(64, mask=lambda b, h, q, k: q @ M > 0), ""))
    assert "`q_idx @ M` is a product of numbers" in str(finding)


def test_maps_are_told_apart_by_their_matrices() -> None:
    """By name, dims and which is whose: each makes another module."""
    maps = [lambda x: x @ M, lambda x: x @ N, of(64, 64), lambda x: x]
    maps += [(maps[0], maps[1]), (maps[1], maps[0])]
    assert len({as_feature_map(x).canonical for x in maps}) == len(maps)


def test_the_account_of_a_product() -> None:
    """16 heads of 1,024 tokens: products of 64 x 32, once for q and once for k."""
    asked = Asked(batch=1, heads=16, kv_heads=16, q_len=1024)
    found = []
    for spec in (GOOD, replace(GOOD, head_dim=(32, 64), normaliser=linear(exp))):
        [account] = explain_linear([Variant("tiny", spec, None)], "sm_90", asked)
        found.append(account)
    mine, inner = found
    rows = 2 * 16 * 1024
    product, *others = mine.steps
    assert (product.name, product.flops) == ("product", 2 * 64 * 32 * rows)
    assert (product.read, product.written) == (2 * 64 * rows + 2 * 2 * 64 * 32, 2 * 32 * rows)
    assert tuple(others) == inner.steps and mine.head_dims == (64, 64)
    assert mine.backward_flops == inner.backward_flops + 2 * product.flops
    assert mine.feature_map == "exp(x) of x = q @ M and k @ M"
    # Rows of padding may hold NaN: copies have 0 there.
    documents = Variant("tiny", replace(GOOD, mask=document() & causal()), None)
    [account] = explain_linear([documents], "sm_90", asked)
    assert account.steps[0].read == product.read + 2 * 64 * rows
    assert account.steps[0].written == product.written + 2 * 64 * rows

"""The tuner on a GPU: candidates of the backward kernels, and of linear attention."""

from __future__ import annotations

import pytest

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    elu_plus_one,
    identity,
    linear,
    sliding_window,
)
from flashgen.kernels.registry import kernels_of, keys, with_key
from flashgen.plan import lower
from flashgen.tuning.choose import ranked, search_spaces
from flashgen.tuning.device import detect_gpu
from flashgen.tuning.measure import measure
from support.variants import shipped_specs

pytestmark = pytest.mark.gpu

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
LINEAR = {
    "elu": linear(elu_plus_one()),
    "decays": linear(identity(), decay=DECAY, normalise=False),
}
SPECS = {
    **shipped_specs(),
    "window": AttentionSpec(
        64, mask=sliding_window(1024, 0), normaliser=linear(elu_plus_one(), decay=DECAY)
    ),
    **{name: AttentionSpec(128, mask=causal(), normaliser=x) for name, x in LINEAR.items()},
}


@pytest.mark.parametrize("key", [key for key in keys() if with_key(key).gradients])
@pytest.mark.parametrize(
    "name", ["causal_d64", "causal_d80", "documents_d128", "sinks_softmax_d64", "window"]
)
def test_backward_candidates_are_right_and_timed(name: str, key: str) -> None:
    gpu = detect_gpu()
    assert gpu is not None
    if not with_key(key).runs_on(gpu.target):
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    plan = lower(SPECS[name], name)
    spaces = search_spaces(plan)
    candidates = ranked(plan, key, gpu.target, spaces)[:3]
    kernels = kernels_of(plan)
    forward = kernels["portable"], ranked(plan, "portable", gpu.target, spaces)[0]
    result = measure(plan, gpu.target, gpu.name, candidates, kernel=kernels[key], forward=forward)
    assert not result.rejected
    assert {m.config for m in result.measured} == set(candidates)
    for measurement in result.measured:
        assert all(5.0 < rate < 2000.0 for rate in measurement.tflops)


@pytest.mark.parametrize("name", LINEAR)
def test_candidates_of_linear_attention_are_right_and_timed(name: str) -> None:
    """The first, and those that only a measurement puts in front: none is wrong or fails."""
    gpu = detect_gpu()
    assert gpu is not None
    plan = lower(SPECS[name], name)
    spaces = search_spaces(plan)
    forward = kernels_of(plan)["linear"], ranked(plan, "linear", gpu.target, spaces)[0]
    for key, kernel in kernels_of(plan).items():
        order = ranked(plan, key, gpu.target, spaces)
        candidates = (*order[:2], *order[9:])
        result = measure(plan, gpu.target, gpu.name, candidates, kernel=kernel, forward=forward)
        assert not result.rejected
        assert {m.config for m in result.measured} == set(candidates)
        for measurement in result.measured:
            assert all(1.0 < rate < 1000.0 for rate in measurement.tflops)

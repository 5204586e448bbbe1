"""The tuner on a GPU: candidates of the backward kernels."""

from __future__ import annotations

import pytest

from flashgen.kernels.registry import kernels_of, keys, with_key
from flashgen.plan import lower
from flashgen.tuning.choose import ranked, search_spaces
from flashgen.tuning.device import detect_gpu
from flashgen.tuning.measure import measure
from support.variants import shipped_specs

pytestmark = pytest.mark.gpu

SPECS = shipped_specs()


@pytest.mark.parametrize("key", [key for key in keys() if with_key(key).gradients])
@pytest.mark.parametrize(
    "name", ["causal_d64", "causal_d80", "documents_d128", "sinks_softmax_d64"]
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

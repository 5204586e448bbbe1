"""The tuner on a GPU: candidates of the backward kernels."""

from __future__ import annotations

import pytest

from flashgen.config import GRADIENT_FORMS, HOPPER, Form
from flashgen.plan import lower
from flashgen.tuning.device import detect_gpu
from flashgen.tuning.forms import ranked, search_spaces
from flashgen.tuning.measure import measure
from support.variants import shipped_specs

pytestmark = pytest.mark.gpu

SPECS = shipped_specs()


@pytest.mark.parametrize("form", GRADIENT_FORMS)
@pytest.mark.parametrize(
    "name", ["causal_d64", "causal_d80", "documents_d128", "sinks_softmax_d64"]
)
def test_backward_candidates_are_right_and_timed(name: str, form: Form) -> None:
    gpu = detect_gpu()
    assert gpu is not None
    if form == "hopper_backward" and gpu.target != HOPPER:
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    plan = lower(SPECS[name], name)
    spaces = search_spaces(plan)
    candidates = ranked(plan, form, gpu.target, spaces).candidates[:3]
    forward = ranked(plan, "portable", gpu.target, spaces).candidates[0]
    result = measure(plan, gpu.target, gpu.name, candidates, form=form, forward=forward)
    assert not result.rejected
    assert {m.config for m in result.measured} == set(candidates)
    for measurement in result.measured:
        assert all(5.0 < rate < 2000.0 for rate in measurement.tflops)

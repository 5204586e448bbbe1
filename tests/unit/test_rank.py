"""The ranking without a GPU, held to rates that were measured on one."""

import json
from pathlib import Path

import pytest

from flashgen import AttentionSpec, additive_bias, causal, full, sigmoid_attention, softcap
from flashgen.budget.roofline import EXCHANGED_BYTES, SHARED_BYTES_PER_CLOCK, step_clocks
from flashgen.budget.targets import DEFAULT_TARGETS, get_target
from flashgen.budget.traffic import Workload, traffic
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.rank import predict, rank
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import KernelPlan, lower
from flashgen.tuning.choose import ranked, search_spaces
from flashgen.tuning.store import TuneResult, load_results
from support.variants import GENERATED, shipped_plan, shipped_specs

PROBE = json.loads((Path(__file__).parents[1] / "data" / "probe_h200.json").read_text())
H200 = get_target("sm_90")


def probe_rates(cell: dict) -> dict[KernelConfig, float]:
    """TFLOP/s of each configuration that was measured with TMA."""
    return {KernelConfig(*numbers): rate for rate, *numbers, tma in cell["rows"] if tma}


def cell_name(cell: dict) -> str:
    return f"d{cell['head_dim']}-{'causal' if cell['causal'] else 'full'}-{cell['length']}"


@pytest.mark.parametrize("cell", PROBE["cells"], ids=cell_name)
def test_the_models_pick_is_within_10_percent_of_the_best_measured(cell: dict) -> None:
    head_dim, length = cell["head_dim"], cell["length"]
    kernel = lower(AttentionSpec(head_dim, mask=causal() if cell["causal"] else full()), "x")
    heads = 2048 // head_dim
    work = Workload(16384 // length, heads, heads, length, length)
    rates = probe_rates(cell)
    candidates = [c for c in search_space(kernel, "sm_90").candidates if c in rates]
    pick = min(candidates, key=lambda config: predict(kernel, config, H200, work).seconds)
    assert rates[pick] >= 0.9 * max(rates.values())


def test_the_space_holds_what_the_probe_found_best() -> None:
    """No rule rejected a configuration that beats all candidates by more than 2%."""
    for cell in PROBE["cells"]:
        kernel = lower(AttentionSpec(cell["head_dim"]), "x")
        candidates = set(search_space(kernel, "sm_90").candidates)
        rates = probe_rates(cell)
        inside = max(rate for config, rate in rates.items() if config in candidates)
        assert inside >= 0.98 * max(rates.values()), cell_name(cell)


def _ranked(plan: KernelPlan, result: TuneResult) -> tuple[KernelConfig, ...]:
    """A kernel's candidates on a target, in the order of what they promise."""
    return ranked(plan, result.form, result.target, search_spaces(plan, (result.target,)))


def test_nine_of_ten_shipped_variants_get_a_pick_near_the_best_that_tuning_found() -> None:
    near, far = [], []
    for name, spec in shipped_specs().items():
        kernel = lower(spec, name)
        for result in load_results(GENERATED / "tuning" / f"{name}.json"):
            rates = {m.config: m.tflops[-1] for m in result.measured}
            pick = next(c for c in _ranked(kernel, result) if c in rates)
            good = rates[pick] >= 0.9 * max(rates.values())
            (near if good else far).append((name, result.gpu, str(pick), rates[pick]))
    assert near, "no tuning results are committed"
    assert len(near) >= 9 * len(far), far


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
@pytest.mark.parametrize("name", ["causal_d128", "window_d128", "causal_fp32_d64"])
def test_every_candidate_is_ranked_fastest_first(name: str, target: str) -> None:
    kernel = shipped_plan(name)
    candidates = search_space(kernel, target).candidates
    ranked = rank(kernel, target, candidates)
    seconds = [time for _, time in ranked]
    assert sorted(config for config, _ in ranked) == sorted(candidates)
    assert seconds == sorted(seconds)
    assert ranked == rank(kernel, target, reversed(candidates))


def one_step(kernel: KernelPlan, config: KernelConfig, **lengths: int) -> float:
    work = Workload(1, 16, 16, **{"q_len": 8192, "kv_len": 8192, **lengths})
    return predict(kernel, config, H200, work).seconds


def test_half_the_tiles_take_half_the_time() -> None:
    config = KernelConfig(128, 64, 4, 2)
    everything, half = (lower(AttentionSpec(128, mask=m), "x") for m in (full(), causal()))
    assert one_step(half, config) == pytest.approx(one_step(everything, config) / 2, rel=0.1)


def test_no_kernel_beats_the_peak() -> None:
    kernel = lower(AttentionSpec(128), "x")
    flops = 4 * 16 * 8192 * 8192 * 128
    for config in search_space(kernel, "sm_90").candidates:
        assert flops / one_step(kernel, config) < H200.peak_tflops("bf16") * 1e12


def clocks(**fields):
    """Of a step of 128 rows and 64 keys."""
    kernel, config = lower(AttentionSpec(128, **fields), "x"), KernelConfig(128, 64, 4, 2)
    return step_clocks(kernel, config, H200, traffic(kernel, config, H200, WORK))


WORK = Workload(1, 16, 16, 8192, 8192)
ELEMENTS = 128 * 64


def test_a_hyperbolic_tangent_takes_as_long_as_the_exponential() -> None:
    plain, capped = clocks(), clocks(score=softcap(30.0))
    extra = capped.exponentials - plain.exponentials
    assert extra == pytest.approx(ELEMENTS / H200.exp_per_clock)
    assert capped.arithmetic > plain.arithmetic


def test_a_sigmoid_divides_each_element_and_rescales_no_row() -> None:
    assert clocks(normaliser=sigmoid_attention()).exponentials == pytest.approx(
        2 * ELEMENTS / H200.exp_per_clock
    )


def test_a_bias_of_each_score_comes_from_l2_and_changes_its_layout() -> None:
    plain, biased = clocks(), clocks(score=additive_bias())
    itemsize = 4
    l2_per_clock = H200.l2_gbps / (H200.clock_ghz * H200.num_sms)
    assert biased.l2 - plain.l2 == pytest.approx(ELEMENTS * itemsize / l2_per_clock)
    exchanged = ELEMENTS * EXCHANGED_BYTES / SHARED_BYTES_PER_CLOCK
    assert biased.shared - plain.shared == pytest.approx(exchanged)
    assert biased.arithmetic > plain.arithmetic
    assert biased.exponentials == plain.exponentials


def test_a_single_query_is_bound_by_reading_the_keys() -> None:
    """Decode without split KV: too few programs to share the keys of long heads between."""
    kernel = lower(AttentionSpec(128), "x")
    work = Workload(64, 32, 8, q_len=1, kv_len=1 << 20)
    prediction = predict(kernel, KernelConfig(64, 64, 4, 2), H200, work)
    keys = 64 * 8 * (1 << 20) * 2 * 128 * 2
    assert prediction.seconds >= keys / (H200.dram_gbps * 1e9)


def test_what_does_not_fit_has_no_time() -> None:
    kernel = lower(AttentionSpec(256), "x")
    work = Workload(1, 1, 1, 1024, 1024)
    with pytest.raises(ValueError, match="num_stages=4 does not fit sm_86"):
        predict(kernel, KernelConfig(128, 128, 8, 4), get_target("sm_86"), work)

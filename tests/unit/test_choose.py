"""Which kernels a module holds, which digests they go by, and what is chosen for each."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import flashgen.kernels.backward_hopper.kernel
import flashgen.kernels.backward_triton.kernel
from flashgen import AttentionSpec, Tensor, causal, full, t5_bias
from flashgen.config import NO_CHOICE, ChosenConfig, KernelChoice, KernelConfig
from flashgen.kernels.registry import keys, with_key
from flashgen.plan import KernelPlan, lower
from flashgen.spec import Blocks
from flashgen.tuning.choose import choices, digests, ranked, search_spaces
from flashgen.tuning.store import Measurement, TuneResult
from support.variants import kernel_digest

PORTABLE = ("backward_keys", "backward_queries")
GRADIENTS = tuple(key for key in keys() if with_key(key).gradients)

SPEC = AttentionSpec(128, mask=causal(), targets=("sm_80", "sm_90"))
PLAN = lower(SPEC, "causal")
ROWS = Tensor("rows", ("batch", "q_len"))
NARROW = lower(replace(SPEC, head_dim=64), "narrow")


def _measured(plan: KernelPlan, key: str, gpu: str, *tflops: float) -> TuneResult:
    """Of as many candidates as there are rates, the model's last ones."""
    spaces = search_spaces(plan)
    candidates = ranked(plan, key, "sm_90", spaces)[-len(tflops) :]
    measured = tuple(
        Measurement(config, (1.0,), (rate,))
        for config, rate in zip(candidates, tflops, strict=True)
    )
    kernel = digests(plan, spaces)[key]
    return TuneResult("sm_90", gpu, "3.7.1", kernel, (2048,), measured, (), "complete", key)


def _choices(plan: KernelPlan, *results: TuneResult) -> dict[str, KernelChoice]:
    spaces = search_spaces(plan)
    return choices(plan, digests(plan, spaces), spaces, results)


def _chosen(plan: KernelPlan, *results: TuneResult) -> tuple[dict[str, KernelConfig], KernelChoice]:
    chosen = _choices(plan, *results)
    portable = {target: c.config for target, c in chosen["portable"].configs.items()}
    return portable, chosen["hopper"]


def test_the_gluon_kernel_comes_first() -> None:
    found = digests(PLAN, search_spaces(PLAN))
    backward = ["hopper_backward", "backward_keys", "backward_queries"]
    assert list(found) == ["hopper", "portable", *backward]
    assert len(set(found.values())) == 5


def test_the_model_chooses_for_each_kernel() -> None:
    spaces = search_spaces(PLAN)
    portable, hopper = _chosen(PLAN)
    assert set(portable) == {"sm_80", "sm_90"}
    assert portable["sm_90"] == ranked(PLAN, "portable", "sm_90", spaces)[0]
    assert hopper.config is not None and hopper.config.source == "model"
    assert hopper.config.config == ranked(PLAN, "hopper", "sm_90", spaces)[0]
    assert 0 < hopper.config.shared <= 232_448


def test_measurements_of_one_kernel_say_nothing_of_the_other() -> None:
    by_model, without = _chosen(PLAN)
    result = _measured(PLAN, "hopper", "NVIDIA H200", 640.0)
    portable, hopper = _chosen(PLAN, result)
    assert portable == by_model
    assert hopper.config is not None and hopper.config.config == result.measured[0].config
    assert (hopper.config.source, hopper.config.gpu) == ("measured", "NVIDIA H200")
    assert (hopper.config.triton, hopper.config.tflops) == ("3.7.1", 640.0)

    result = _measured(PLAN, "portable", "NVIDIA H200", 500.0)
    portable, hopper = _chosen(PLAN, result)
    assert portable["sm_90"] == result.measured[0].config != by_model["sm_90"]
    assert hopper == without


def test_results_of_another_gluon_kernel_do_not_count() -> None:
    old = replace(_measured(PLAN, "hopper", "NVIDIA H200", 900.0), kernel="0" * 64)
    assert _chosen(PLAN, old) == _chosen(PLAN)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float32"}, {"blocks": Blocks(BLOCK_M=64)}, {"blocks": Blocks(num_warps=4)}],
)
def test_without_a_gluon_kernel_there_is_a_reason(changes: dict[str, object]) -> None:
    plan = lower(replace(SPEC, **changes), "causal")
    assert "hopper" not in digests(plan, search_spaces(plan))
    _, hopper = _chosen(plan)
    assert hopper.config is None and hopper.why_not


def test_a_pin_is_of_both_kernels() -> None:
    plan = lower(replace(SPEC, blocks=Blocks(BLOCK_M=128, BLOCK_N=64)), "causal")
    portable, hopper = _chosen(plan)
    assert hopper.config is not None
    for config in (portable["sm_90"], hopper.config.config):
        assert (config.BLOCK_M, config.BLOCK_N) == (128, 64)


def test_for_other_targets_nothing_is_said_of_hopper() -> None:
    plan = lower(replace(SPEC, targets=("sm_80",)), "causal")
    assert search_spaces(plan)["hopper"] == {}
    assert _chosen(plan)[1] == NO_CHOICE


def test_the_portable_kernel_alone_where_it_was_faster_on_one_gpu() -> None:
    slow = _timed("hopper", "NVIDIA H200", 2.5)
    fast = _timed("portable", "NVIDIA H200", 2.0)
    _, hopper = _chosen(PLAN, slow, fast)
    assert hopper == KernelChoice(why_not="on NVIDIA H200 it took 2.5 ms, the portable kernel 2")
    for other in (
        _timed("portable", "NVIDIA H200", 2.6),
        _timed("portable", "NVIDIA H100", 2.0),
    ):
        assert _chosen(PLAN, slow, other)[1].config is not None


def _backward(plan: KernelPlan, *results: TuneResult) -> dict[str, ChosenConfig]:
    chosen = _choices(plan, *results)
    return {key: chosen[key].configs["sm_90"] for key in PORTABLE}


@pytest.mark.parametrize("key", PORTABLE)
def test_a_backward_kernel_is_chosen_by_its_own_measurements(key: str) -> None:
    by_model = _backward(PLAN)
    first = ranked(PLAN, key, "sm_90", search_spaces(PLAN))[0]
    assert (by_model[key].source, by_model[key].config) == ("model", first)
    result = _measured(PLAN, key, "NVIDIA H200", 480.0, 470.0)
    found = _backward(PLAN, result)
    chosen = found[key]
    assert chosen.config == result.measured[0].config != first
    assert (chosen.source, chosen.gpu, chosen.tflops) == ("measured", "NVIDIA H200", 480.0)
    assert 0 < chosen.shared <= 232_448
    # The other one, and those of another source, have nothing to do with it.
    [other] = set(PORTABLE) - {key}
    assert found[other] == by_model[other]
    assert _backward(PLAN, replace(result, kernel="0" * 64)) == by_model


def test_pins_say_nothing_of_backward_kernels() -> None:
    plan = lower(replace(SPEC, blocks=Blocks(BLOCK_M=128, BLOCK_N=32)), "causal")
    result = _measured(plan, "backward_keys", "NVIDIA H200", 480.0)
    assert _backward(plan, result)["backward_keys"].config == result.measured[0].config


def test_a_result_without_candidates_settles_a_kernel_and_chooses_nothing() -> None:
    result = replace(_measured(PLAN, "backward_keys", "NVIDIA H200", 480.0), measured=())
    assert result.settles(result.kernel, Blocks())
    assert not result.settles("0" * 64, Blocks())
    assert _backward(PLAN, result) == _backward(PLAN)


def _gluon(plan: KernelPlan, *results: TuneResult) -> KernelChoice:
    return _choices(plan, *results)["hopper_backward"]


def test_the_gluon_kernel_of_the_backward_pass_is_chosen_likewise() -> None:
    plan = lower(replace(SPEC, deterministic=True), "causal")  # it has room for a third stage
    by_model = _gluon(plan)
    spaces = search_spaces(plan)
    first, *_, last = ranked(plan, "hopper_backward", "sm_90", spaces)
    assert by_model.config is not None and first != last
    assert (by_model.config.source, by_model.config.config) == ("model", first)
    assert 0 < by_model.config.shared <= 232_448
    result = _measured(plan, "hopper_backward", "NVIDIA H200", 560.0)
    found = _gluon(plan, result)
    assert found.config is not None and found.config.config == last
    assert (found.config.source, found.config.tflops) == ("measured", 560.0)
    assert found.config.shared > by_model.config.shared
    assert _gluon(plan, replace(result, kernel="0" * 64)) == by_model
    # Which is no choice of the portable ones, nor of the forward kernel.
    assert _backward(plan, result) == _backward(plan)
    assert _chosen(plan, result) == _chosen(plan)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 320}, "its tiles have 256 columns at most"),
        ({"dtype": "float32"}, "float32: its tiles are of 16-bit elements"),
        ({"targets": ("sm_80",)}, ""),
    ],
)
def test_without_a_gluon_kernel_gradients_are_the_portable_ones(
    changes: dict[str, object], reason: str
) -> None:
    plan = lower(replace(SPEC, **changes), "causal")
    assert "hopper_backward" not in digests(plan, search_spaces(plan))
    assert _gluon(plan) == KernelChoice(why_not=reason)


def _timed(
    key: str,
    gpu: str,
    ms: float,
    lengths: tuple[int, ...] = (2048,),
    plan: KernelPlan = PLAN,
) -> TuneResult:
    result = _measured(plan, key, gpu, 500.0)
    [measurement] = result.measured
    return replace(result, measured=(replace(measurement, ms=(ms,)),), lengths=lengths)


def test_the_portable_kernels_where_their_times_add_up_to_less() -> None:
    gluon = _timed("hopper_backward", "NVIDIA H200", 2.0)
    keys = _timed("backward_keys", "NVIDIA H200", 1.1)
    queries = _timed("backward_queries", "NVIDIA H200", 0.85)
    assert _gluon(PLAN, gluon, keys, queries) == KernelChoice(
        why_not="on NVIDIA H200 it took 2 ms, "
        "the backward kernel over keys and the backward kernel over queries 1.95"
    )
    for others in (
        (keys,),
        (keys, _timed("backward_queries", "NVIDIA H200", 0.95)),
        (keys, _timed("backward_queries", "NVIDIA H100", 0.85)),
        (keys, _timed("backward_queries", "NVIDIA H200", 0.85, (16384,))),
        (keys, replace(queries, triton="3.6.0")),
    ):
        found = _gluon(PLAN, gluon, *others).config
        assert found is not None and found.source == "measured"


@pytest.mark.full
def test_beside_the_portable_kernel_over_queries_it_is_compared_with_the_other_one() -> None:
    biased = t5_bias().then(lambda score, b, h, q, kv: score + ROWS[b, q])
    plan = lower(replace(SPEC, head_dim=64, mask=full(), score=biased), "two_biases")
    gluon, keys, slower, queries = (
        _timed(key, "NVIDIA H200", ms, plan=plan)
        for key, ms in (
            ("hopper_backward", 1.2),
            ("backward_keys", 1.1),
            ("backward_keys", 1.3),
            ("backward_queries", 0.1),
        )
    )
    assert _gluon(plan, gluon, keys) == KernelChoice(
        why_not="on NVIDIA H200 it took 1.2 ms, the backward kernel over keys 1.1"
    )
    found = _gluon(plan, gluon, slower, queries)
    assert found.config is not None and found.config.source == "measured"
    assert (found.replaces, _gluon(PLAN).replaces) == (("backward_keys",), PORTABLE)


def _digests_with(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The backward kernels' digests where a function of the source has a statement more."""

    def edited(text: str) -> str:
        tree = ast.parse(text)
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and function.name == name:
                function.body.append(ast.Pass())
        return ast.unparse(tree)

    with monkeypatch.context() as patch:
        for module, renders in (
            (flashgen.kernels.backward_triton.kernel, ("render_kernel", "render_backward")),
            (flashgen.kernels.backward_hopper.kernel, ("render_over_keys",)),
        ):
            for render in renders:
                original = getattr(module, render)
                given = functools.partial(_edited_by, edited, original)
                patch.setattr(module, render, given)
        # A plan of its own: what is rendered is kept with it.
        return [kernel_digest(replace(PLAN), key) for key in GRADIENTS]


def _edited_by(
    edited: Callable[[str], str], render: Callable[..., str], *of: Any, **how: Any
) -> str:
    return edited(render(*of, **how))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("nothing", []),
        ("_attention_forward", []),
        ("_backward_rows", []),
        ("_backward_of_keys", ["backward_keys"]),
        ("_backward_of_queries", ["backward_queries"]),
        ("_load_tile", ["backward_keys", "backward_queries"]),
        ("_backward_hopper", ["hopper_backward"]),
        ("_backward_step", ["hopper_backward"]),
        ("_query_tile", ["hopper_backward"]),
        ("_place_sums", ["hopper_backward"]),
    ],
)
def test_a_backward_digest_is_of_what_the_kernel_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, changed: list[str]
) -> None:
    before = [kernel_digest(PLAN, key) for key in GRADIENTS]
    after = zip(GRADIENTS, _digests_with(monkeypatch, name), before, strict=True)
    assert [key for key, now, then in after if now != then] == changed


def test_a_digest_does_not_depend_on_how_python_writes_f_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 unparses them otherwise than 3.11."""
    unparsed: list[str] = []
    original = ast.unparse

    def noted(tree: ast.AST) -> str:
        assert not any(isinstance(node, ast.JoinedStr) for node in ast.walk(tree))
        unparsed.append(original(tree))
        return unparsed[-1]

    monkeypatch.setattr(ast, "unparse", noted)
    kernel_digest(NARROW, "hopper")  # its consumers take turns
    assert any("bar.sync {8 + CONSUMER}, 256" in text for text in unparsed)

"""Compiling in parts what Triton's autotuner tries: which configurations, and no launch."""

from __future__ import annotations

from typing import Any

import pytest
from triton import Config
from triton.runtime.autotuner import Autotuner

from benchmarks.autotuned import WARMUP_MS, compiles_part, tunes_briefly


class Kernel:
    """Stands for a kernel that Triton compiled: notes its calls; with 9 warps it does not compile.

    Attributes:
        calls: of each call, whether nothing was launched, and the warps.
    """

    arg_names = ("x", "n")

    def __init__(self) -> None:
        self.calls = list[tuple[bool, int]]()

    @staticmethod
    def fn(x: object, n: int) -> None:
        """The kernel's function."""

    def run(self, *args: Any, grid: Any, warmup: bool, num_warps: int, **rest: Any) -> None:
        assert args == ("x", 5) and rest["BLOCK"] == 16
        self.calls.append((warmup, num_warps))
        if num_warps == 9:
            raise RuntimeError("out of resource")


def tuner_of(kernel: Kernel, warps: range, **more: Any) -> Autotuner:
    configs = [Config({"BLOCK": 16}, num_warps=n) for n in warps]
    return Autotuner(kernel, kernel.arg_names, configs, ["n"], None, None, **more)


def test_parts_compile_each_configuration_once_and_launch_none() -> None:
    kernel = Kernel()
    tuner = tuner_of(kernel, range(1, 8))
    for part in range(3):
        with compiles_part(part, 3) as problems:
            tuner[(1,)]("x", 5)
        assert not problems
    assert sorted(kernel.calls) == [(True, n) for n in range(1, 8)]
    assert not tuner.cache  # nothing was chosen


def test_what_the_tuner_prunes_is_not_compiled() -> None:
    kernel = Kernel()

    def fewer(configs: list[Config], named: dict[str, Any], **kwargs: Any) -> list[Config]:
        return [config for config in configs if config.num_warps <= named["n"]]

    with compiles_part(0, 1):
        tuner_of(kernel, range(1, 8), prune_configs_by={"early_config_prune": fewer})[(1,)]("x", 5)
    assert kernel.calls == [(True, n) for n in range(1, 6)]


def test_a_configuration_that_does_not_compile_stops_no_other() -> None:
    kernel = Kernel()
    with compiles_part(0, 1) as problems:
        tuner_of(kernel, range(8, 11))[(1,)]("x", 5)
    assert [n for _, n in kernel.calls] == [8, 9, 10]
    [problem] = problems
    assert problem.startswith("fn, BLOCK: 16, num_warps: 9") and problem.endswith("RuntimeError")


def test_tuning_is_brief_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, asked = Kernel(), []

    def do_bench(call: Any, warmup: int, rep: int, quantiles: Any) -> list[float]:
        asked.append(warmup)
        call()
        return [float(len(asked))] * 3

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    with tunes_briefly():
        tuner_of(kernel, range(1, 4))[(1,)]("x", 5)
    assert asked == [WARMUP_MS] * 3
    assert kernel.calls == [(False, 1), (False, 2), (False, 3), (False, 1)]  # the best one last
    tuner = tuner_of(kernel, range(1, 4))
    tuner._do_bench = "as before"
    assert tuner.do_bench == "as before"

"""What a terminal shows while modules are built or checked, and of each built module."""

import io
from pathlib import Path

from rich.console import Console

from flashgen.build import STEPS, Built, Progress
from flashgen.check import check
from flashgen.cli.lines import wrapped
from flashgen.config import ChosenConfig, KernelChoice, KernelConfig
from flashgen.console import ProgressBar, module_line
from support.variants import ROOT


def test_the_bar_moves_within_a_spec():
    bar = ProgressBar(Console(file=io.StringIO(), force_terminal=True), verbose=False)
    seen = []
    with bar:
        bar.start(2)
        for step in (*STEPS[:2], "wait for another build", STEPS[2], "tune", *STEPS[3:], STEPS[0]):
            bar.step("tiny", step)
            task = bar._bars.tasks[0]
            seen.append((task.description, task.completed, task.total))
    steps = [f"tiny: {step}" for step in STEPS]
    assert [(shown, at) for shown, at, _ in seen if shown in steps] == [
        *zip(steps, range(4), strict=True),
        (steps[0], 4),
    ]
    assert ("tiny: tune", 3, 8) in seen


def test_a_check_tells_each_step_of_each_module():
    told = []

    class Told(Progress):
        def start(self, variants):
            told.append(variants)

        def step(self, variant, step):
            told.append((variant, step))

    assert check([ROOT / "specs" / "full_d64.py"], Path(ROOT / "generated"), progress=Told()) == []
    assert told == [1, *(("full_d64", step) for step in STEPS)]


def test_lines_of_a_narrow_terminal():
    line = "  BLOCK_M=64 num_stages=1: " + "steps of 32 keys reduce twice as often " * 3
    shown = wrapped(line, 80)
    assert all(len(part) <= 80 for part in shown.splitlines())
    assert shown.split() == line.split()
    assert shown.startswith("  BLOCK_M=64")
    assert wrapped(line.rstrip(), 200) == line.rstrip()


def chosen(source, *targets, **how):
    config = KernelConfig(192, 128, 12, 4)
    return KernelChoice({target: ChosenConfig(config, source, 1, **how) for target in targets})


def test_the_line_of_a_module():
    by_model = {"portable": chosen("model", "sm_80")}
    line = module_line(Built("tiny", by_model, seconds=1.26))
    assert line == "tiny: 192 x 128 on sm_80, by model; 1.3 s"
    measured = {
        "hopper": chosen("measured", "sm_90", gpu="H100", tflops=730.4),
        "portable": chosen("model", "sm_80", "sm_90"),
    }
    line = module_line(Built("a_name_of_25_letters_d128", measured, seconds=120.0))
    assert line == (
        "a_name_of_25_letters_d128: 192 x 128 on sm_90, measured, 730 TFLOP/s; 1 more target; "
        "120.0 s"
    )
    three = {"portable": chosen("model", "sm_80", "sm_86", "sm_89")}
    assert "on sm_80, by model; 2 more targets;" in module_line(Built("tiny", three))

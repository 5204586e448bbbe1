"""Builds on machines with GPUs: a stand-in measures, everything around it is real."""

import pytest

from flashgen.codegen.render import kernel_digest
from flashgen.config import KernelConfig
from flashgen.tuning.device import Gpu
from flashgen.tuning.store import Measurement, TuneResult, load_results

H200 = Gpu("NVIDIA H200", "sm_90")
FAST = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
SLOW = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)


@pytest.fixture
def machine(monkeypatch):
    """Puts a GPU into the machine; records what is measured on it."""
    calls = []

    class Machine:
        ended = "complete"
        measured = calls

        def has(self, gpu):
            monkeypatch.setattr("flashgen.build.detect_gpu", lambda: gpu)

    machine = Machine()

    def measure(plan, target, gpu, candidates, rejected=(), *, seconds, report):
        calls.append((plan.name, gpu, seconds))
        assert FAST in candidates and SLOW in candidates
        report(1, len(candidates))
        return TuneResult(
            target=target,
            gpu=gpu,
            triton="3.7.1",
            kernel=kernel_digest(plan),
            lengths=(2048,),
            measured=(Measurement(FAST, (1.0,), (500.04,)), Measurement(SLOW, (2.0,), (250.0,))),
            rejected=tuple(rejected),
            ended=machine.ended,
        )

    monkeypatch.setattr("flashgen.tuning.measure.measure", measure)
    machine.has(H200)
    return machine


def row(lines):
    """The cells of the table's only row."""
    (row,) = [line for line in lines if line.lstrip().startswith("tiny")]
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_a_gpu_measures_once(flashgen, project, machine):
    status, lines = flashgen("build", "specs", "--tune-seconds", "7")
    assert status == 0
    assert machine.measured == [("tiny", "NVIDIA H200", 7.0)]
    assert row(lines)[2:5] == ["128 x 64", "8", "2"]
    assert row(lines)[6] == "measured on NVIDIA H200: 500 TFLOP/s"
    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    assert len(machine.measured) == 1


def test_a_module_chosen_by_model_is_measured_where_there_is_a_gpu(flashgen, machine):
    machine.has(None)
    assert row(flashgen("build", "specs")[1])[6] == "by model"
    machine.has(H200)
    assert row(flashgen("build", "specs")[1])[6].startswith("measured on NVIDIA H200")


def test_a_machine_without_a_gpu_keeps_what_was_measured(flashgen, project, machine):
    flashgen("build", "specs")
    published = (project / "generated" / "tiny.py").read_bytes()
    machine.has(None)
    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    _, lines = flashgen("build", "specs", "--force")
    assert row(lines)[6] == "measured on NVIDIA H200: 500 TFLOP/s"
    assert (project / "generated" / "tiny.py").read_bytes() == published
    assert flashgen("check") == (0, ["every module in generated is what its spec renders to"])


def test_another_gpu_adds_its_results(flashgen, project, machine):
    flashgen("build", "specs")
    machine.has(Gpu("NVIDIA H100 PCIe", "sm_90"))
    flashgen("build", "specs")
    results = load_results(project / "generated" / "tuning" / "tiny.json")
    assert [result.gpu for result in results] == ["NVIDIA H100 PCIe", "NVIDIA H200"]


@pytest.mark.parametrize("option", ["--no-tune", "--target=sm_80"])
def test_nothing_is_measured_if(flashgen, machine, option):
    assert row(flashgen("build", "specs", option)[1])[6] == "by model"
    assert machine.measured == []


def test_a_gpu_of_no_listed_target_measures_nothing(flashgen, machine):
    machine.has(Gpu("NVIDIA RTX PRO 6000", "sm_120"))
    assert row(flashgen("build", "specs")[1])[6] == "by model"
    assert machine.measured == []


def test_force_measures_again(flashgen, machine):
    flashgen("build", "specs")
    flashgen("build", "specs", "--force")
    assert len(machine.measured) == 2
    flashgen("build", "specs", "--force", "--no-tune")
    assert len(machine.measured) == 2


def test_a_pin_takes_the_best_measured_that_it_admits(flashgen, project, machine):
    flashgen("build", "specs")
    spec = project / "specs" / "tiny.py"
    spec.write_text(
        spec.read_text()
        .replace("causal\n", "Blocks, causal\n")
        .replace("targets", "blocks=Blocks(BLOCK_M=64), targets")
    )
    assert row(flashgen("build", "specs")[1])[2:5] == ["64 x 64", "4", "2"]
    assert len(machine.measured) == 1


def test_an_interrupt_keeps_the_best_and_stops(flashgen, project, machine):
    (project / "specs" / "zebra.py").write_text((project / "specs" / "tiny.py").read_text())
    machine.ended = "interrupt"
    status, lines = flashgen("build", "specs")
    assert status == 130
    assert row(lines)[6] == "measured on NVIDIA H200: 500 TFLOP/s"
    assert lines[-1] == "interrupted: what is listed is published, the rest was not built"
    assert [name for name, *_ in machine.measured] == ["tiny"]
    assert not (project / "generated" / "zebra.py").exists()
    machine.ended = "complete"
    assert flashgen("build", "specs")[1][-1] == "up to date, nothing to do: tiny"


def test_the_reasons_of_the_rejected_are_kept(flashgen, project, machine):
    flashgen("build", "specs")
    (result,) = load_results(project / "generated" / "tuning" / "tiny.json")
    assert result.rejected and all(reason for _, reason in result.rejected)

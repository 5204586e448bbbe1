"""Builds on machines with GPUs: a stand-in measures, everything around it is real."""

from dataclasses import replace

import pytest

from flashgen.build import Options, Progress, build
from flashgen.config import KernelConfig
from flashgen.kernels.registry import keys
from flashgen.tuning import measure as tuning
from flashgen.tuning.device import Gpu
from flashgen.tuning.measure import measure as whole
from flashgen.tuning.store import Measurement, TuneResult, load_results, save_results
from support.variants import import_file

H200 = Gpu("NVIDIA H200", "sm_90")
A100 = Gpu("NVIDIA A100", "sm_80")
FAST = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
SLOW = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
# The same of the Gluon kernel.
QUICK = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)
TARDY = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
# Of each backward kernel.
OF_KEYS = KernelConfig(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=2)
OF_QUERIES = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
OTHER = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
# Of linear attention: BLOCK_M rows are a chunk.
CHUNK = KernelConfig(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)
BY_RANK = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
# Of the Gluon kernel of the backward pass, which has no other for 64 columns.
OF_ALL = KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2)

#: The faster and the slower one that are measured, and the rate of the former.
KERNELS = {
    "hopper": (QUICK, TARDY, 640.0),
    "portable": (FAST, SLOW, 500.04),
    "backward_keys": (OF_KEYS, OTHER, 470.0),
    "backward_queries": (OF_QUERIES, OTHER, 600.0),
    "hopper_backward": (OF_ALL, OF_ALL, 560.0),
    "linear": (CHUNK, BY_RANK, 50.04),
    "linear_gradients": (CHUNK, BY_RANK, 40.0),
}
BACKWARD = ["backward_keys", "backward_queries"]


@pytest.fixture
def machine(monkeypatch):
    """Puts a GPU into the machine; records what is measured on it."""
    calls = []

    class Machine:
        measured = calls

        def __init__(self):
            self.ended = dict.fromkeys(KERNELS, "complete")

            self.forward = {}

        def has(self, gpu):
            for place in ("build", "stamp"):
                monkeypatch.setattr(f"flashgen.{place}.detect_gpu", lambda: gpu)

    machine = Machine()

    def measure(plan, target, gpu, candidates, rejected=(), *, kernel, forward, seconds, report):
        form = kernel.key
        if machine.ended[form] == "at once":
            raise KeyboardInterrupt
        calls.append((plan.name, form, gpu, seconds))
        machine.forward[form] = forward and (forward[0].key, forward[1])
        fast, slow, rate = KERNELS[form]
        assert fast in candidates and slow in candidates
        report(1, len(candidates))
        return TuneResult(
            target=target,
            gpu=gpu,
            triton="3.7.1",
            kernel=kernel.digest(plan),
            lengths=(2048,),
            measured=tuple(
                Measurement(config, (ms,), (rate / ms,))
                for config, ms in {slow: 2.0, fast: 1.0}.items()
            )[::-1],
            rejected=tuple(rejected),
            ended=machine.ended[form],
            form=form,
        )

    monkeypatch.setattr("flashgen.tuning.measure.measure", measure)
    machine.has(H200)
    return machine


def row(lines, form="portable"):
    """The cells of the only row of the table that is about a form."""
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    (row,) = [row for row in rows if row[:1] == ["tiny"] and row[2] == form]
    return row


BY_MODEL = "by model; runs where TMA cannot read q, k or v"
MEASURED = "measured on NVIDIA H200: 500 TFLOP/s; runs where TMA cannot read q, k or v"
BESIDE = "; runs where TMA cannot read q, k, v or the output's gradient"
MEASURED_HOPPER = "measured on NVIDIA H200: 640 TFLOP/s"


def test_a_gpu_measures_each_kernel_once(flashgen, project, machine):
    status, lines = flashgen("build", "specs", "--tune-seconds", "7", "-v")
    assert status == 0
    assert machine.measured == [
        ("tiny", "hopper", "NVIDIA H200", 7.0),
        ("tiny", "portable", "NVIDIA H200", 7.0),
        ("tiny", "hopper_backward", "NVIDIA H200", 3.5),
        ("tiny", "backward_keys", "NVIDIA H200", 3.5),
        ("tiny", "backward_queries", "NVIDIA H200", 3.5),
    ]
    assert row(lines)[3:6] == ["128 x 64", "8", "2"]
    assert row(lines)[7] == MEASURED
    assert row(lines, "hopper")[3:6] == ["128 x 64", "8", "3"]
    assert row(lines, "hopper")[7] == MEASURED_HOPPER
    assert row(lines, "backward_keys")[3:8] == [
        "64 x 128", "8", "2", "64.5 of 227", f"measured on NVIDIA H200: 470 TFLOP/s{BESIDE}"
    ]  # fmt: skip
    assert row(lines, "backward_queries")[7] == f"measured on NVIDIA H200: 600 TFLOP/s{BESIDE}"
    assert row(lines, "hopper_backward")[3:8] == [
        "128 x 128", "8", "2", "226.5 of 227", "measured on NVIDIA H200: 560 TFLOP/s"
    ]  # fmt: skip
    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    assert len(machine.measured) == 5


def test_backward_kernels_run_after_the_best_forward_kernel(flashgen, machine):
    flashgen("build", "specs")
    assert machine.forward == {
        "hopper": None,
        "portable": None,
        "hopper_backward": ("portable", FAST),
        "backward_keys": ("portable", FAST),
        "backward_queries": ("portable", FAST),
    }


def test_the_module_says_where_backward_kernels_were_measured(flashgen, project, machine):
    flashgen("build", "specs")
    text = (project / "generated" / "tiny.py").read_text()
    tables = text.split("BACKWARD_OF_KEYS = {")[1].split("BACKWARD_OF_QUERIES = {")
    for table, rate in zip(tables, (470, 600), strict=True):
        comment = f"measured on NVIDIA H200 with triton 3.7.1: {rate} TFLOP/s;"
        assert f"    # H200, H100, GH200: {comment}\n    # shared memory " in table


def test_where_no_tiles_fit_a_build_finds_out_once(flashgen, project, machine, monkeypatch):
    """Nothing can be measured of such a kernel, which is kept with the reasons."""
    spec = project / "specs" / "tiny.py"
    text = 'AttentionSpec(512, "float32", mask=causal(), targets=("sm_86",))'
    spec.write_text(f"from flashgen import AttentionSpec, causal\n\nspec = {text}\n")
    machine.has(Gpu("NVIDIA RTX A6000", "sm_86"))

    def measure(plan, *given, kernel, **options):
        if kernel.key == "portable":
            config = given[2][0]
            measurement = (Measurement(config, (1.0,), (20.0,)),)
            digest = kernel.digest(plan)
            return TuneResult(
                "sm_86", given[1], "3.7.1", digest, (2048,), measurement, (), "complete"
            )
        return whole(plan, *given, kernel=kernel, **options)

    monkeypatch.setattr(tuning, "measure", measure)
    assert flashgen("build", "specs")[0] == 0
    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    results = load_results(project / "generated" / "tuning" / "tiny.json")
    for result in results[:2]:
        assert result.form in BACKWARD and result.measured == ()
        assert all("shared memory" in reason for _, reason in result.rejected)


def test_the_best_of_each_kernel_stands_in_the_module(flashgen, project, machine):
    flashgen("build", "specs")
    module = import_file(project / "generated" / "tiny.py")
    assert QUICK.as_dict() == module.HOPPER_CONFIG
    assert {"sm_90": {**FAST.as_dict(), "USE_TMA": True}} == module.CONFIGS
    assert {"sm_90": {**OF_KEYS.as_dict(), "USE_TMA": True}} == module.BACKWARD_OF_KEYS
    assert {"sm_90": {**OF_QUERIES.as_dict(), "USE_TMA": True}} == module.BACKWARD_OF_QUERIES
    assert OF_ALL.as_dict() == module.BACKWARD_HOPPER


def test_results_of_before_there_was_a_gluon_kernel_count(flashgen, project, machine):
    flashgen("build", "specs")
    file = project / "generated" / "tuning" / "tiny.json"
    save_results(file, [r for r in load_results(file) if r.form == "portable"])
    machine.measured.clear()
    lines = flashgen("build", "specs", "-v")[1]
    assert [form for _, form, *_ in machine.measured] == [
        "hopper",
        "hopper_backward",
        *BACKWARD,
    ]
    assert row(lines)[7] == MEASURED
    assert row(lines, "hopper")[7] == MEASURED_HOPPER


def test_the_gluon_kernel_is_measured_on_hopper_alone(flashgen, project, machine):
    spec = project / "specs" / "tiny.py"
    spec.write_text(spec.read_text().replace('("sm_90",)', '("sm_80", "sm_90")'))
    machine.has(A100)
    lines = flashgen("build", "specs", "-v")[1]
    assert [form for _, form, *_ in machine.measured] == ["portable", *BACKWARD]
    assert row(lines, "hopper")[7] == "by model"
    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])


def test_a_module_chosen_by_model_is_measured_where_there_is_a_gpu(flashgen, machine):
    machine.has(None)
    lines = flashgen("build", "specs", "-v")[1]
    assert row(lines)[7] == BY_MODEL and row(lines, "hopper")[7] == "by model"
    machine.has(H200)
    lines = flashgen("build", "specs", "-v")[1]
    assert row(lines)[7] == MEASURED and row(lines, "hopper")[7] == MEASURED_HOPPER


def test_a_machine_without_a_gpu_keeps_what_was_measured(flashgen, project, machine):
    flashgen("build", "specs")
    published = (project / "generated" / "tiny.py").read_bytes()
    machine.has(None)
    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    _, lines = flashgen("build", "specs", "--force", "-v")
    assert row(lines)[7] == MEASURED and row(lines, "hopper")[7] == MEASURED_HOPPER
    assert (project / "generated" / "tiny.py").read_bytes() == published
    assert flashgen("check") == (0, ["every module in generated is what its spec renders to"])


def test_another_gpu_adds_its_results(flashgen, project, machine):
    flashgen("build", "specs")
    machine.has(Gpu("NVIDIA H100 PCIe", "sm_90"))
    flashgen("build", "specs")
    results = load_results(project / "generated" / "tuning" / "tiny.json")
    assert [(result.gpu, result.form) for result in results] == [
        (gpu, form)
        for gpu in ("NVIDIA H100 PCIe", "NVIDIA H200")
        for form in (*BACKWARD, "hopper", "hopper_backward", "portable")
    ]


@pytest.mark.parametrize("option", ["--no-tune", "--target=sm_80"])
def test_nothing_is_measured_if(flashgen, machine, option):
    assert row(flashgen("build", "specs", option, "-v")[1])[7].startswith("by model")
    assert machine.measured == []


def test_kernels_that_nobody_asks_for_are_not_measured(project, machine):
    options = Options(kernels=("backward_queries",))
    paths = [project / "specs"]
    assert [built.chosen is None for built in build(paths, options, Progress())] == [False]
    assert [form for _, form, *_ in machine.measured] == ["backward_queries"]
    # Nor missed, until somebody does.
    assert [built.chosen is None for built in build(paths, options, Progress())] == [True]
    assert [built.chosen is None for built in build(paths, Options(), Progress())] == [False]
    assert sorted(form for _, form, *_ in machine.measured) == sorted(keys())


def test_a_gpu_of_no_listed_target_measures_nothing(flashgen, machine):
    machine.has(Gpu("NVIDIA RTX PRO 6000", "sm_120"))
    assert row(flashgen("build", "specs", "-v")[1])[7] == BY_MODEL
    assert machine.measured == []


def test_force_measures_again(flashgen, machine):
    flashgen("build", "specs")
    flashgen("build", "specs", "--force")
    assert len(machine.measured) == 10
    flashgen("build", "specs", "--force", "--no-tune")
    assert len(machine.measured) == 10


def test_a_pin_takes_the_best_measured_that_it_admits(flashgen, project, machine):
    flashgen("build", "specs")
    spec = project / "specs" / "tiny.py"
    spec.write_text(
        spec.read_text()
        .replace("causal\n", "Blocks, causal\n")
        .replace("targets", "blocks=Blocks(BLOCK_M=64), targets")
    )
    lines = flashgen("build", "specs", "-v")[1]
    assert row(lines)[3:6] == ["64 x 64", "4", "2"]
    # Which the Gluon kernel cannot take.
    assert "no Gluon kernel: " in row(lines)[7] and " hopper " not in str(lines)
    # Pins say nothing of the backward kernels.
    assert row(lines, "backward_keys")[3] == "64 x 128"
    assert row(lines, "hopper_backward")[3] == "128 x 128"
    assert len(machine.measured) == 5


@pytest.mark.parametrize(
    "ended, measured",
    [
        ({"hopper": "interrupt", "portable": "complete"}, ["hopper"]),
        ({"hopper": "complete", "portable": "at once"}, ["hopper"]),
        ({"hopper": "complete", "portable": "interrupt"}, ["hopper", "portable"]),
        (
            dict.fromkeys(keys(), "complete") | {"backward_keys": "interrupt"},
            ["hopper", "portable", "hopper_backward", "backward_keys"],
        ),
    ],
)
def test_an_interrupt_keeps_the_best_and_stops(flashgen, project, machine, ended, measured):
    (project / "specs" / "zebra.py").write_text((project / "specs" / "tiny.py").read_text())
    machine.ended = ended
    status, lines = flashgen("build", "specs", "-v")
    assert status == 130
    assert row(lines, "hopper")[7] == MEASURED_HOPPER
    assert row(lines)[7] == (MEASURED if "portable" in measured else BY_MODEL)
    assert lines[-1] == "interrupted: what is listed is published, the rest was not built"
    assert [(name, form) for name, form, *_ in machine.measured] == [("tiny", f) for f in measured]
    assert not (project / "generated" / "zebra.py").exists()
    machine.ended = dict.fromkeys(keys(), "complete")
    flashgen("build", "specs")
    assert flashgen("build", "specs")[1][-1] == "up to date, nothing to do: tiny, zebra"


def test_an_interrupt_before_anything_was_measured_publishes_nothing(flashgen, project, machine):
    machine.ended = {"hopper": "at once", "portable": "complete"}
    assert flashgen("build", "specs")[0] == 130
    assert machine.measured == []
    assert not (project / "generated" / "tiny.py").exists()


def test_the_reasons_of_the_rejected_are_kept(flashgen, project, machine):
    flashgen("build", "specs")
    results = load_results(project / "generated" / "tuning" / "tiny.json")
    assert len(results) == 5
    rejected = [entry for result in results for entry in result.rejected]
    assert rejected and all(reason for _, reason in rejected)


LINEAR = """\
from flashgen import AttentionSpec, causal, elu_plus_one, linear

spec = AttentionSpec(
    head_dim=64, mask=causal(), normaliser=linear(elu_plus_one()), targets=("sm_90",)
)
"""


def test_kernels_of_linear_attention_are_measured_by_pass(flashgen, project, machine):
    """A build without them measures nothing; one that forgets the digest, nothing anew."""
    (project / "specs" / "tiny.py").write_text(LINEAR)
    module, file = (project / "generated" / x for x in ("tiny.py", "tuning/tiny.json"))
    lines = flashgen("build", "specs", "--tune-seconds", "7", "-v")[1]
    assert machine.measured == [
        ("tiny", "linear", "NVIDIA H200", 7.0),
        ("tiny", "linear_gradients", "NVIDIA H200", 3.5),
    ]
    assert machine.forward == {"linear": None, "linear_gradients": ("linear", CHUNK)}
    assert row(lines, "linear")[7] == "measured on NVIDIA H200: 50 TFLOP/s"
    for table in ("CONFIGS", "CONFIGS_OF_GRADIENTS"):
        [config] = getattr(import_file(module), table).values()
        constants = {"CHUNK": 32, "num_warps": 4, "num_stages": 2, "USE_TMA": True}
        assert config == {**constants, "PROGRAMS": 2}
    text = module.read_text()
    for rate in (50, 40):
        measured = f"measured on NVIDIA H200 with triton 3.7.1: {rate} TFLOP/s;"
        assert f"    # H200, H100, GH200: {measured}\n    # shared memory " in text
    assert "chunks of 32 rows, 4 warps, 2 stages, measured on NVIDIA H200" in " ".join(
        flashgen("explain", "specs/tiny.py")[1]
    )

    assert flashgen("build", "specs") == (0, ["up to date, nothing to do: tiny"])
    machine.has(None)
    flashgen("build", "specs", "--force")
    assert module.read_text() == text and len(machine.measured) == 2

    machine.has(H200)
    old = [replace(r, kernel="0") if r.form == "linear" else r for r in load_results(file)]
    save_results(file, old)
    flashgen("build", "specs")
    assert [form for _, form, *_ in machine.measured[2:]] == ["linear"]
    assert module.read_text() == text

import pytest

from flashgen.config import KernelConfig
from flashgen.errors import OutputError
from flashgen.spec import Blocks
from flashgen.tuning.store import (
    Measurement,
    TuneResult,
    best_for,
    load_results,
    merged,
    save_results,
)

SMALL = KernelConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
LARGE = KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=3)
HUGE = KernelConfig(BLOCK_M=256, BLOCK_N=256, num_warps=8, num_stages=5)


def result(
    gpu="NVIDIA H200", triton="3.7.1", kernel="k1", tflops=500.0, target="sm_90", form="portable"
):
    return TuneResult(
        target=target,
        gpu=gpu,
        triton=triton,
        kernel=kernel,
        lengths=(2048, 16384),
        measured=(
            Measurement(LARGE, (0.125, 7.5), (400.0, tflops)),
            Measurement(SMALL, (0.25, 15.0), (200.0, tflops / 2)),
        ),
        rejected=((HUGE, "SRAM: needs 458,752 B, has 232,448 B"),),
        ended="complete",
        form=form,
    )


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "tuning" / "a.json"
    results = (result(gpu="NVIDIA A100", target="sm_80"), result(form="hopper"), result())
    save_results(path, results)
    assert load_results(path) == results


def test_no_file_is_no_results(tmp_path):
    assert load_results(tmp_path / "a.json") == ()


def test_the_file_reads_well(tmp_path):
    path = tmp_path / "a.json"
    save_results(path, (result(),))
    assert (
        path.read_text()
        == """\
{
  "results": [
    {
      "target": "sm_90",
      "gpu": "NVIDIA H200",
      "triton": "3.7.1",
      "kernel": "k1",
      "ended": "complete",
      "lengths": [2048, 16384],
      "measured": [
        {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "ms": [0.125, 7.5], "tflops": [400.0, 500.0]},
        {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "ms": [0.25, 15.0], "tflops": [200.0, 250.0]}
      ],
      "rejected": [{"BLOCK_M": 256, "BLOCK_N": 256, "num_warps": 8, "num_stages": 5, "reason": "SRAM: needs 458,752 B, has 232,448 B"}]
    }
  ]
}
"""
    )


def test_figures_are_rounded(tmp_path):
    path = tmp_path / "a.json"
    exact = result(tflops=512.3456789)
    save_results(path, (exact,))
    (loaded,) = load_results(path)
    assert loaded.measured[0].tflops == (400.0, 512.3)
    save_results(path, (loaded,))
    assert load_results(path) == (loaded,)


def test_saving_again_changes_no_byte(tmp_path):
    path = tmp_path / "a.json"
    save_results(path, (result(),))
    before = path.read_bytes()
    save_results(path, load_results(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (
            '{"results": [{"gpu": "NVI',
            "JSONDecodeError: Unterminated string starting at: line 1 column 22 (char 21)",
        ),
        ('{"results": [{"gpu": "NVIDIA H200"}]}', "KeyError: 'target'"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
    ],
)
def test_a_damaged_file_is_not_taken_for_no_results(tmp_path, text, what):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(OutputError) as caught:
        load_results(path)
    assert str(caught.value) == (
        f"{path}: not a file of tuning results ({what}); "
        "restore it from version control, or delete it to choose anew"
    )


def test_a_file_of_before_there_were_forms_is_of_the_portable_kernel(tmp_path):
    path = tmp_path / "a.json"
    save_results(path, (result(),))
    assert '"form"' not in path.read_text()
    assert [r.form for r in load_results(path)] == ["portable"]
    save_results(path, (result(form="hopper"),))
    assert '"form": "hopper"' in path.read_text()


def test_merging_keeps_the_other_form():
    hopper, new = result(kernel="g1", form="hopper"), result(kernel="k2")
    assert merged([result(), hopper], [new]) == (hopper, new)
    assert merged([new], [hopper]) == (hopper, new)


def test_merging_keeps_other_gpus_and_tritons():
    h100, older = result(gpu="NVIDIA H100"), result(triton="3.6.0")
    new = result(kernel="k2")
    assert merged([result(), h100, older], [new]) == (h100, older, new)


ANY = Blocks()


def test_the_best_is_of_the_newest_triton_then_the_fastest():
    old = result(triton="3.9.0", tflops=900.0)
    slow = result(gpu="NVIDIA GH200", triton="3.10.0", tflops=400.0)
    fast = result(gpu="NVIDIA H200", triton="3.10.0", tflops=500.0)
    assert best_for([old, slow, fast], "sm_90", "k1", ANY) == (fast, fast.measured[0])
    assert best_for([fast, slow, old], "sm_90", "k1", ANY) == (fast, fast.measured[0])


@pytest.mark.parametrize(("older", "newer"), [("3.7", "3.7.1"), ("3.8.0rc1", "3.8.0")])
def test_a_longer_version_is_newer_and_a_candidate_older(older, newer):
    results = [result(triton=older, tflops=900.0), result(triton=newer)]
    assert best_for(results, "sm_90", "k1", ANY)[0].triton == newer


def test_the_best_is_of_this_target_and_kernel():
    assert best_for([result()], "sm_80", "k1", ANY) is None
    assert best_for([result()], "sm_90", "k2", ANY) is None
    assert best_for([], "sm_90", "k1", ANY) is None


def test_the_best_is_one_that_the_spec_admits():
    best = best_for([result()], "sm_90", "k1", Blocks(BLOCK_M=(32, 64)))
    assert best == (result(), result().measured[1])
    assert best_for([result()], "sm_90", "k1", Blocks(num_warps=2)) is None

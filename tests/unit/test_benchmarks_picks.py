"""The model's picks beside given results."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks import picked, picks, record, table
from benchmarks.account_tables import pick_share, picks_table
from benchmarks.figures import newest_results
from flashgen.config import KernelConfig
from flashgen.files import lock
from flashgen.kernels.base import Space
from flashgen.kernels.forward_triton.rank import rank
from flashgen.place import Place
from flashgen.tuning.device import Gpu
from flashgen.tuning.store import (
    Measurement,
    TuneResult,
    fields_of,
    load_results,
    result_of,
    save_results,
)

A, B, C = KernelConfig(128, 64, 8, 2), KernelConfig(64, 64, 4, 2), KernelConfig(64, 128, 4, 3)


@pytest.fixture(scope="module")
def kernel():
    """The portable kernel of causal_d64, with three candidates, of which A is the pick."""
    found = picked.kernel_of("causal_d64", "portable")
    return replace(found, space=Space((A, B, C), ((KernelConfig(16, 16, 4, 2), "too small"),)))


def result(kernel, *rates, **fields):
    """Rates of A, B, C at the first length; half of that at the second."""
    measured = tuple(
        Measurement(config, (1.0, 2.0), (rate, rate / 2))
        for config, rate in zip((A, B, C), rates, strict=False)
    )
    given = {"target": "sm_90", "gpu": "A GPU", "triton": "3.6.0", "kernel": kernel.digest}
    given |= {"lengths": (2048, 16384), "measured": measured, "rejected": kernel.space.rejected}
    return TuneResult(**given | {"ended": "complete", "form": "portable"} | fields)


def test_the_pick_is_what_a_build_without_tuning_takes():
    kernels = {(k.plan.name, k.form): k for k in picked.kernels_of(["causal_d64"])}
    assert list(kernels) == [("causal_d64", "hopper"), ("causal_d64", "portable")]
    portable = kernels["causal_d64", "portable"]
    candidates = portable.space.candidates
    assert candidates[0] == rank(portable.plan, "sm_90", reversed(candidates))[0][0]
    assert picked.kernel_of("causal_fp32_d64", "hopper") is None
    with pytest.raises(SystemExit, match="no spec nothing"):
        picked.kernels_of(["nothing"])


def test_the_result_with_most_candidates_of_this_kernel_counts(kernel):
    some, every = result(kernel, 5.0, 6.0), result(kernel, 1.0, 2.0, 3.0)
    others = (
        replace(every, kernel="of another source"),
        replace(every, form="hopper"),
        replace(every, target="sm_80"),
    )
    assert picked.result_for(kernel, [some, every, *others]) is every
    assert picked.result_for(kernel, [*others, some]) is some
    assert picked.result_for(kernel, others) is None
    assert picked.is_complete(kernel, every)
    assert not picked.is_complete(kernel, some)
    assert not picked.is_complete(kernel, None)
    failed = replace(some, rejected=((C, "does not run"),))
    assert picked.is_complete(kernel, failed)


def test_a_row_keeps_what_was_measured(kernel):
    failed = replace(result(kernel, 5.0, 6.0), rejected=((C, "does not run"),))
    row = json.loads(json.dumps(picked.row_of(kernel, failed)))
    assert result_of(row) == failed
    assert (row["looked_at"], row["candidates"]) == (3, 3)
    empty = picked.row_of(kernel, None)
    assert (empty["pick"], empty["measured"]) == (A.as_dict(), [])


def test_committed_rows_are_results_as_builds_keep_them():
    rows = newest_results()["picks"]["cells"]
    assert any(row["measured"] for row in rows)
    for row in rows:
        if row["measured"]:
            assert fields_of(result_of(row)).items() <= row.items()


def test_known_results_are_of_builds_and_of_the_last_run(kernel):
    row = picked.row_of(kernel, result(kernel, 1.0, 2.0, 3.0))
    built = picked.known_results("causal_d64", None)
    assert {x.form for x in built} >= {"hopper", "portable"}
    newest = picked.document_of([row, picked.row_of(kernel, None)])
    assert picked.known_results("causal_d64", newest)[len(built) :] == [result_of(row)]
    assert len(picked.known_results("full_d64", newest)) == len(
        picked.known_results("full_d64", None)
    )


def rows_of(kernel):
    portable = picked.row_of(kernel, result(kernel, 95.0, 100.0, 90.0))
    gluon = picked.row_of(replace(kernel, form="hopper"), result(kernel, 80.0, 70.0, 60.0))
    return gluon, portable


def test_a_share_is_of_the_best_and_of_all_candidates(kernel):
    gluon, portable = rows_of(kernel)
    assert pick_share([portable]) == pytest.approx(0.95)
    assert pick_share([gluon]) == 1.0
    assert pick_share([gluon, portable]) == pytest.approx(0.8)
    incomplete = picked.row_of(kernel, result(kernel, 95.0, 100.0))
    assert pick_share([incomplete]) is pick_share([gluon, incomplete]) is None
    assert pick_share([picked.row_of(kernel, None)]) is None
    failed = replace(result(kernel, 95.0), measured=result(kernel, 1.0, 2.0).measured[1:])
    row = picked.row_of(kernel, replace(failed, rejected=((A, "broken"), (C, "broken"))))
    assert pick_share([row]) is None
    for other in ({"lengths": [1024]}, {"gpu": "another"}, {"triton": "3.7.1"}):
        assert pick_share([gluon, portable | other]) is None


TABLE = """\
| spec | Gluon: pick | best | measured | rate | portable: pick | best | measured | rate \
| module: rate |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| causal_d64 | 128 x 64 w8 s2 | 128 x 64 w8 s2 | 3 of 3 | 1.000 | 128 x 64 w8 s2 | 64 x 64 w4 s2 \
| 3 of 3 | 0.950 | 0.800 |
| other | - | - | - | - | 128 x 64 w8 s2 | - | 0 of 3 | - | - |

Within 10% of the best: Gluon kernels 1 of 1, portable 1 of 2, modules 0 of 2."""


def test_the_table(kernel):
    other = {**picked.row_of(kernel, None), "spec": "other"}
    document = picked.document_of([*rows_of(kernel), other])
    text = picks_table(document)
    assert text.endswith(TABLE)
    assert "A GPU, triton 3.6.0, " in text
    assert json.loads(record.layout(document)) == document
    assert TABLE in table.fill(
        "<!-- benchmark: picks -->\n<!-- /benchmark -->", {"picks": document}
    )


def test_a_kept_result_waits_for_a_build(kernel, tmp_path, monkeypatch):
    """One that is under way would write its own results over it, or the other way round."""
    place, said, waiting = Place(tmp_path, "mine"), [], threading.Event()

    def say(line):
        said.append(line)
        waiting.set()

    monkeypatch.setattr(picks, "print", say, raising=False)
    with ThreadPoolExecutor(1) as pool:
        with lock(place.lock, on_wait=lambda: None):
            kept = pool.submit(picks.keep, place, result(kernel, 400.0))
            assert waiting.wait(60) and not kept.done()
            save_results(place.tuning, [result(kernel, 300.0, gpu="Another GPU")])
        kept.result()
    assert said == ["mine: a build has the lock"]
    gpus = [one.gpu for one in load_results(place.tuning)]
    assert gpus == ["A GPU", "Another GPU"]


def test_measuring_looks_at_what_is_not_complete(kernel, monkeypatch, tmp_path, capsys):
    """The second kernel has been measured before; rows are written and shown, nothing is kept."""
    gluon = replace(kernel, form="hopper")
    known = [result(kernel, 95.0, 100.0, 90.0)]
    compiled, measured = [], []

    def measured_on(gpu, of):
        measured.append(of.form)
        return result(of, 80.0, 100.0, 60.0, form=of.form)

    monkeypatch.setattr(picks, "kernels_of", lambda names=(): [gluon, kernel])
    monkeypatch.setattr(picks, "known_results", lambda name, newest: known)
    monkeypatch.setattr(picks, "detect_gpu", lambda: Gpu("A GPU", "sm_90"))
    monkeypatch.setattr(picks, "compile_all", lambda kernels, jobs: compiled.extend(kernels))
    monkeypatch.setattr(picks, "measured_on", measured_on)
    monkeypatch.setattr(picks, "OUT", tmp_path)
    path = tmp_path / "picks.json"

    def run(*arguments):
        measured.clear()
        monkeypatch.setattr(sys, "argv", ["picks", "--json", str(path), *arguments])
        return picks.main()

    assert run("--measure") == 0
    assert (measured, compiled) == (["hopper"], [gluon])
    rows = json.loads(path.read_text())["cells"]
    assert [pick_share([row]) for row in rows] == pytest.approx([0.8, 0.95])
    assert (
        "Within 10% of the best: Gluon kernels 0 of 1, portable 1 of 1" in capsys.readouterr().out
    )
    assert not (tmp_path / "tuning").exists()
    assert run("--measure", "--again", "--forms", "portable", "--keep") == 0
    assert measured == ["portable"]
    [kept] = load_results(tmp_path / "tuning" / "causal_d64.json")
    assert kept.measured[0].tflops == (80.0, 40.0)
    assert run() == 0
    assert measured == []
    monkeypatch.setattr(picks, "detect_gpu", lambda: Gpu("A100", "sm_80"))
    assert run("--measure") == 2

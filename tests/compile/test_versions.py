"""The kernels of shipped modules, compiled as they stand there by the Triton that is here.

`docs/versions.json` records what each Triton says of each of them. Marked ``versions``: a few that
differ in what Tritons differ in, for the oldest and the newest Triton in every run; the rest, with
each Triton, for the full run. With a Triton between them every run compiles one kernel of each
language: whether records are what the compiler here says.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import triton

from support.compiling.record import FILE, recorded
from support.compiling.shipped import Shipped, shipped_kernels
from support.variants import shipped_specs

RECORD = json.loads(FILE.read_text())

#: Between them: TMA's additions, a split pass, pairs of keys and values, cut tiles of queries and
#: loads at several indices, float32.
FEW = (
    ("causal_d128", "_backward_hopper"),
    ("causal_d256", "_backward_queries_hopper"),
    ("documents_d128", "_attention_hopper"),
    ("documents_d128", "_backward_of_keys"),
    ("causal_fp32_d64", "_backward_of_queries"),
)


#: Those that the Tritons between them compile in every run, as quick as any: of Gluon, of Triton.
FEWER = (FEW[1], FEW[4])


@pytest.mark.versions
@pytest.mark.parametrize(("name", "kernel"), FEW)
def test_shipped_kernels_compile(name: str, kernel: str, request: pytest.FixtureRequest) -> None:
    shipped = shipped_kernels(name)[kernel]
    at_an_end = triton.__version__ in (min(RECORD), max(RECORD))
    asked = at_an_end or (name, kernel) in FEWER or request.config.getoption("--fresh")
    if asked or not _known(kernel, shipped, name):
        _compile(kernel, shipped, name)


REST = [(name, kernel) for name in shipped_specs() for kernel in RECORD["3.7.1"][name]]


@pytest.mark.parametrize(("name", "kernel"), [of for of in REST if of not in FEW])
def test_the_others_do(name: str, kernel: str, request: pytest.FixtureRequest) -> None:
    """A Triton that the record has figures of need not compile them again, but for --fresh."""
    shipped = shipped_kernels(name)[kernel]
    if request.config.getoption("--fresh") or not _known(kernel, shipped, name):
        _compile(kernel, shipped, name)


def _compile(kernel: str, shipped: Shipped, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of fusion, if it is not said
        compiled = shipped.compiled()
    assert compiled.shared == shipped.predicted
    if known := _known(kernel, shipped, name):
        found = (compiled.shared, compiled.registers, compiled.spilled)
        assert found == (known["shared"], known["registers"], known["spilled"])


def _known(kernel: str, shipped: Shipped, name: str) -> dict[str, Any] | None:
    return recorded(kernel, shipped, RECORD.get(triton.__version__, {}).get(name, {}))


@pytest.mark.parametrize("name", shipped_specs())
def test_the_record_is_of_the_kernels_as_they_are(name: str) -> None:
    for kernel, shipped in shipped_kernels(name).items():
        of_this = {version: recorded(kernel, shipped, RECORD[version][name]) for version in RECORD}
        assert all(of_this.values()), "PYTHONPATH=tests python -m support.compiling.record"
        for known in of_this.values():
            assert known["shared"] == known["predicted"], kernel


def test_fusion_is_said_everywhere() -> None:
    """Triton 3.9 warns of a launch that leaves it to the default, which is to change."""
    for name in shipped_specs():
        text = (FILE.parents[1] / "generated" / f"{name}.py").read_text()
        launches = text.count("[grid](") + text.count(",)](")
        assert text.count("**_FUSED") == launches, name

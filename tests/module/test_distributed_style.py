"""ContextParallelStyle: the same gradients as one process, with all else that shards a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, document, softmax
from support.ranks import Pool
from support.styled import gradients_of_one, gradients_of_ranks, refused_style
from support.variants import lowered, rendered

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

SPEC = AttentionSpec(
    16,
    "float32",
    mask=document() & causal(),
    normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",))),
    forms=("dense", "mesh"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("modules") / "styled.py"
    file.write_text(rendered(lowered(SPEC)))
    return str(file)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(2, Path(tmp_path_factory.mktemp("ranks")))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("whole", "backend"), [(False, ""), (False, "aot_eager"), (True, "aot_eager")]
)
def test_gradients(whole: bool, backend: str, path: str, ranks: Pool) -> None:
    """With FSDP2 and activation checkpoints, of parts and of wholes, compiled or not.

    What attention learns has the gradient that FSDP makes of its ranks' parts, as all else.
    """
    right = gradients_of_one(path)
    for found in ranks.run(gradients_of_ranks, path, whole, backend):
        assert isinstance(found, dict), found
        assert found.keys() == right.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, right[name], rtol=1e-4, atol=1e-4, msg=name)


def test_what_is_refused(path: str, ranks: Pool) -> None:
    first, second = ranks.run(refused_style, path)
    assert first == second
    assert first == [
        "RuntimeError: ContextParallelStyle: apply it by parallelize_module before",
        "TypeError: Layer.forward: takes x, document_ids; the style is for a module whose forward "
        "is the attention of three tensors, q, k and v",
        "",
        "ValueError: ContextParallelStyle: was applied on another mesh before; make one for each "
        "mesh",
    ]

"""Models of transformers by flashgen's kernels, beside eager attention."""

import warnings

import pytest
import torch

from flashgen.integrations.transformers import register, unregister
from support.hugging_face import FAMILIES, close, inputs, padding, pair, static_is_broken, tokens


@pytest.fixture(autouse=True, scope="module")
def registered(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "flashgen"))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*eager reference")  # no kernel ran
            yield register()
        unregister()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_gradients_and_tokens(name, registered):
    family = FAMILIES[name]
    models = pair(family, registered)
    attended = padding(24, (7, 24), (0, 20))
    given = inputs(name, attended)
    logits, ours = (model(**given)[0] for model in models)
    if name not in ("t5", "vit"):  # eager gives padding the mean of v, flashgen 0
        logits, ours = logits * attended[..., None], ours * attended[..., None]
    close(ours, logits)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    for out in (logits, ours):
        (out * weights).sum().backward()
    named = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (which, right), mine in named:
        if right.grad is not None:
            close(mine.grad, right.grad, which)
    if not family.generates:
        return
    # Two sequences, one behind padding; windows and chunks of 12 are full before the end.
    prompt = {"inputs": tokens(2, 20), "attention_mask": padding(20, (5, 20), (0, 20))}
    for cache in (None, "static"):
        if cache and static_is_broken(name):
            continue
        right, mine = (
            model.generate(**prompt, max_new_tokens=4, do_sample=False, cache_implementation=cache)
            for model in models
        )
        assert torch.equal(mine, right), cache

"""Models of transformers by flashgen's kernels, beside eager attention."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

from flashgen.integrations.transformers import attention, described_mask, register, unregister
from support.caches import own_cache
from support.hugging_face import FAMILIES, close, inputs, padding, pair, static_is_broken, tokens


@pytest.fixture(autouse=True, scope="module")
def registered(tmp_path_factory):
    with own_cache(tmp_path_factory):
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


LENGTH = 70
IMAGES = torch.full((2, LENGTH), -1)
IMAGES[0, 5:40], IMAGES[0, 50:60], IMAGES[1, 1:3] = 0, 1, 0
CAUSAL = torch.ones(2, 1, LENGTH, LENGTH).tril().bool()
HOLES = CAUSAL & (torch.arange(LENGTH) % 9 != 4)
MASKS = {
    "images": described_mask(
        2, LENGTH, LENGTH, mask_function=or_masks(causal_mask_function, blockwise_overlay(IMAGES))
    ),
    "elements without holes": CAUSAL & (torch.arange(LENGTH) > 6),
    "elements": HOLES,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_the_device_looks_at(name, registered):
    """Bounds of what it finds, forward and backward."""
    mask = MASKS[name]
    given = [torch.randn(2, 2, LENGTH, 16, requires_grad=True) for _ in range(3)]
    out, _ = attention(SimpleNamespace(), *given, mask)
    shown = mask if isinstance(mask, torch.Tensor) else mask.to_dense()
    scores = (given[0] @ given[1].mT * 16**-0.5).masked_fill(~shown, -torch.inf)
    right = (scores.softmax(-1).nan_to_num() @ given[2]).transpose(1, 2)
    close(out, right)
    weights = torch.randn(out.shape)
    for mine, wanted in zip(
        torch.autograd.grad((out * weights).sum(), given),
        torch.autograd.grad((right * weights).sum(), given),
        strict=True,
    ):
        close(mine, wanted.nan_to_num())

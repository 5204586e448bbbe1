"""The splits that `flashgen explain --form cache` shows are the kernel's, in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen import AttentionSpec, causal, sliding_window
from flashgen.explain.cached import Place, explain_variant_cached
from flashgen.explain.call import Asked
from flashgen.loader import Variant
from support.cached import CacheCall, cached
from support.variants import rendered_module

FORMS = ("dense", "cache")
SPECS = {
    "causal": AttentionSpec(16, "float32", mask=causal(align="bottom_right"), forms=FORMS),
    "window": AttentionSpec(
        16, "float32", mask=sliding_window(250, 0, align="bottom_right"), forms=FORMS
    ),
}

#: One query, some, and several tiles of them; few programs, many, and splits that are asked for.
CALLS = (
    (CacheCall((900,) * 3, 1), 7),
    (CacheCall((1500,), 3, heads=2, page_size=16), 40),
    (CacheCall((600,) * 2, 70, heads=4, kv_heads=2), 17),
    (CacheCall((900,) * 2, 2, heads=6, kv_heads=2, num_splits=5), 9),
)


@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("name", SPECS)
def test_parts_are_those_that_the_kernel_writes(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, (call, sms) = SPECS[name], CALLS[number]
    [kv_len], q_len = set(call.kv_lens), call.lengths[0]
    asked = Asked(q_len, kv_len, len(call.kv_lens), call.heads, call.kv_heads)
    place = Place(call.page_size, call.num_splits, sms)
    account = explain_variant_cached(Variant("x", spec, None), "sm_90", asked, place)

    module, made, make = rendered_module(spec), [], torch.Tensor.new_empty

    def empty(x, *shape, **options):
        found = make(x, *shape, **options)
        if options == {"dtype": torch.float32}:  # the module's own, and not the interpreter's
            made.append(found.fill_(math.nan))
        return found

    monkeypatch.setattr(module, "_cache_config", lambda *_: account.config.as_dict() | {
        "programs": account.splits.programs_of_an_sm
    })  # fmt: skip
    monkeypatch.setattr(module, "_num_sms_of", lambda device: sms)
    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    given = cached(call, spec, torch.float32)
    with torch.no_grad():
        module.cache_attention(**given.arguments, num_splits=call.num_splits)
    slots = 2 * account.splits.programs
    kept = made[-1].numel() // (slots * (16 + 2))
    outputs, sums = made[-1].split([slots * kept * 16, slots * kept * 2])
    # The maxima of a part's rows, and of its outputs one number for each column.
    written = int((~sums.view(slots, 2, kept)[:, 0, 0].isnan()).sum())
    rows = int((~outputs.view(slots * kept, 16)[:, 0].isnan()).sum())
    assert account.partial == 2 * 4 * (rows * 16 + written * 2 * kept)
    assert (written == 0) == (account.splits.most == 1)
    assert name == "window" or account.splits.most > 1

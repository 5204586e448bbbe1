"""Small models of transformers with random weights, for comparisons with eager attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 97

#: What the configurations of text models share.
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        config: the name of its configuration's class.
        model: the name of its class.
        options: of the configuration.
        generates: whether it makes tokens one after another.
    """

    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    generates: bool = True


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _TEXT),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _TEXT),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_TEXT, "sliding_window": 12}),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_TEXT, "sliding_window": 12, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_TEXT,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_TEXT,
            "sliding_window": 12,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4": Family(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_TEXT,
            "intermediate_size_mlp": 32,
            "attention_chunk_size": 12,
            "num_local_experts": 2,
            "moe_layers": [],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": None,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": Family(
        "BertConfig",
        "BertModel",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        generates=False,
    ),
    "vit": Family(
        "ViTConfig",
        "ViTModel",
        {
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 24,
            "patch_size": 4,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        generates=False,
    ),
}


def config_of(family: Family, **changes: Any) -> Any:
    """The configuration of a family, with other values of some fields."""
    return getattr(transformers, family.config)(**{**family.options, **changes})


def pair(family: Family, other: str, **changes: Any) -> tuple[Any, Any]:
    """Two equal models: with eager attention, and with that of a name.

    Weights are large enough for rows of weights that are far from even.
    """
    cls: Callable[..., Any] = getattr(transformers, family.model)
    models = []
    for name in ("eager", other):
        torch.manual_seed(0)
        model = cls._from_config(config_of(family, **changes), attn_implementation=name).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
                elif parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        models.append(model)
    return models[0], models[1]


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids of tokens that are no padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def padding(length: int, *runs: tuple[int, int]) -> torch.Tensor:
    """An attention mask: for each sequence the first token and the one behind the last."""
    mask = torch.zeros(len(runs), length, dtype=torch.long)
    for row, (first, end) in zip(mask, runs, strict=True):
        row[first:end] = 1
    return mask


def inputs(name: str, attended: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """What a model of a family takes: two sequences, or two images."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator())}
    length = 24 if attended is None else attended.shape[1]
    given = {"input_ids": tokens(2, length)}
    if attended is not None:
        given["attention_mask"] = attended
    if name == "t5":
        given["decoder_input_ids"] = tokens(2, 18, seed=1)
    return given


def close(mine: torch.Tensor, right: torch.Tensor, what: str = "") -> None:
    """Asserts that tensors differ by what float32 rounds in a few layers."""
    mine, right = mine.detach(), right.detach()
    bound = 1e-4 * max(float(right.abs().max()), 1.0)
    worst = float((mine - right).abs().max())
    assert worst <= bound, f"{what}: {worst} of {bound}"


def static_is_broken(name: str) -> bool:
    """Whether the installed transformers itself fails with a static cache, with any attention."""
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    return name == "llama4" and release < (5, 18)

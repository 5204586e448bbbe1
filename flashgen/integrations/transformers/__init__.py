"""transformers' models on flashgen's kernels: ``attn_implementation="fgen"``.

transformers keeps attention functions and mask functions in two registries, by name. `register`
adds flashgen's to both. It was tested with transformers 5.17 and 5.24.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from flashgen.integrations.layers.described import DescribedMask
from flashgen.integrations.transformers.attention import attention
from flashgen.integrations.transformers.masks import described_mask

__all__ = ["NAME", "DescribedMask", "attention", "described_mask", "register", "unregister"]

#: The name of the implementation. transformers takes names that contain "flash", "sdpa" or
#: "flex_attention", or begin with "paged|", for its own.
NAME = "fgen"


def register() -> str:
    """Adds flashgen's attention to transformers' registries; again, it changes nothing.

    Returns:
        The name to load a model with: ``attn_implementation=register()``, or
        ``model.set_attn_implementation("fgen")``.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, described_mask)
    return NAME


def unregister() -> None:
    """Takes it out of them again: models that have it raise at their next call."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)

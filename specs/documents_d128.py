"""Causal within each of the documents that are packed into a sequence, by a tensor of their ids."""

from flashgen import AttentionSpec, causal, document

spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=document() & causal())

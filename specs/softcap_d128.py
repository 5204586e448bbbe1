"""Causal, scores squashed into (-cap, cap) as in Gemma 2 and Grok-1; the call chooses the cap."""

from flashgen import AttentionSpec, Float, causal, softcap

cap = Float("cap", default=30.0, above=0.0, doc="scores stay below it")
spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=causal(), score=softcap(cap))

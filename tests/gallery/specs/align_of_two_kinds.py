from flashgen import AttentionSpec, causal, document

spec = AttentionSpec(64, mask=document() & causal(align="top_left"), align="bottom_right")

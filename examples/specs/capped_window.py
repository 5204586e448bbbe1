"""A sliding window, soft-capped scores and a learned sink of each head, in one kernel.

Gemma 2 caps the scores of its windows, gpt-oss gives each of its heads a sink; a model with both
finds no kernel in any library. Window and cap are arguments of the call.

    out = capped_window.attention(q, k, v, sinks=sinks, window=1024, cap=30.0)
"""

from flashgen import AttentionSpec, Float, Int, Tensor, sliding_window, softcap, softmax

window = Int("window", default=1024, min=0, doc="keys before its own that a query sees")
cap = Float("cap", default=30.0, above=0.0, doc="scores stay below it")
spec = AttentionSpec(
    head_dim=64,
    dtype="bfloat16",
    mask=sliding_window(window, 0),
    score=softcap(cap),
    normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",))),
)

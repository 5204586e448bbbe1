"""Causal chunks, a learned slope of each head (ALiBi), and a learned sink for heads with no use.

A head may look near or far within its chunk, or give its weight to nothing. Slopes and sinks are
parameters of the model; they get gradients like q, k and v.

    out = chunks_with_sinks.attention(q, k, v, slopes=slopes, sinks=sinks, chunk=2048)
"""

from flashgen import AttentionSpec, Int, Tensor, alibi, causal, chunked, softmax

chunk = Int("chunk", default=2048, min=1, doc="positions of a chunk")
spec = AttentionSpec(
    head_dim=128,
    dtype="bfloat16",
    mask=chunked(chunk) & causal(),
    score=alibi(Tensor("slopes", ("num_q_heads",))),
    normaliser=softmax(sink=Tensor("sinks", ("num_q_heads",))),
)

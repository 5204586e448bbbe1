"""gpt-oss: a causal window, and a learned logit of each head that takes its share of the weights.

The layers that see everything are the same with left=2**30.
"""

from flashgen import AttentionSpec, Int, Tensor, sliding_window, softmax

left = Int("left", default=127, doc="keys before its own that a query sees")
sinks = Tensor("sinks", ("num_q_heads",), "bfloat16", doc="the logit of each head's sink")
spec = AttentionSpec(
    head_dim=64,
    dtype="bfloat16",
    mask=sliding_window(left, 0, align="bottom_right"),
    normaliser=softmax(sink=sinks),
)

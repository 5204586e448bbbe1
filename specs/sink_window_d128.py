"""A causal window and the first few keys of the sequence (StreamingLLM)."""

from flashgen import AttentionSpec, Int, causal, sink_tokens, sliding_window

sinks = Int("sinks", default=4, doc="first keys that every query after them sees")
left = Int("left", default=1024, doc="keys before its own that a query sees")
spec = AttentionSpec(
    head_dim=128,
    dtype="bfloat16",
    mask=causal() & (sink_tokens(sinks) | sliding_window(left, 0)),
)

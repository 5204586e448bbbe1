import math

from flashgen import AttentionSpec, causal, softmax, where


def some_heads(b, h):
    return where(h < 4, 0.0, -math.inf)


spec = AttentionSpec(head_dim=64, mask=causal(), normaliser=softmax(sink=some_heads))

"""Verifying a tree of drafted tokens against a stream: its first tokens, and the most recent.

Speculative decoding (SpecInfer, Medusa) for a StreamingLLM cache: the queries are the drafted
tokens, and so are the last q_len keys. Of the context a token sees the sinks and a window, of the
others that are drafted its ancestors.

    out = tree_with_sinks.attention(q, k, v, ancestors=ancestors, sinks=4, recent=1020)
"""

from flashgen import AttentionSpec, Int, kv_len, q_len, sink_tokens, tree

sinks = Int("sinks", default=4, doc="first keys of the context that are kept in sight")
recent = Int("recent", default=1020, doc="last keys of the context that are")


def window(b, h, q_idx, kv_idx):
    return kv_idx >= kv_len - q_len - recent


spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=tree() & (sink_tokens(sinks) | window))

"""Packed documents under a sliding window, with Gemma 2's softcap: fine-tuning its local layers.

Window and cap are arguments of the call; a window never reaches into the document before.

    out = packed_windows.attention(q, k, v, document_ids=ids, left=4095, cap=50.0)
"""

from flashgen import AttentionSpec, Float, Int, document, sliding_window, softcap

left = Int("left", default=4095, doc="keys before its own that a query sees")
cap = Float("cap", default=50.0, above=0.0, doc="scores stay below it")
spec = AttentionSpec(
    head_dim=256,
    dtype="bfloat16",
    mask=document() & sliding_window(left, 0),
    score=softcap(cap),
)

"""Causal text with images whose patches all see one another, as in Gemma 3 and its like.

Every text token is a segment of its own, every image is one: ids count segments along a sequence.
The bounds end at the end of the last query's image, looked up in a table made for the call.

    is_patch = tokens == IMAGE_TOKEN                  # (batch, seq)
    inside = is_patch[:, 1:] & is_patch[:, :-1]       # continues the image before it
    starts = torch.nn.functional.pad(~inside, (1, 0), value=True)
    segments = starts.cumsum(-1, dtype=torch.int32)
    out = images_in_text.attention(q, k, v, segments=segments)
"""

from flashgen import AttentionSpec, Tensor, causal, document

segments = Tensor("segments", ("batch", "kv_len"), "int32", sorted=True, doc="an id an image")
spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=causal() | document(segments))

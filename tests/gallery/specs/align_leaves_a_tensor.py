from flashgen import AttentionSpec, Tensor

ENDS = Tensor("ends", ("batch", "q_len"), "int32")

spec = AttentionSpec(64, mask=lambda b, h, q, kv: kv < ENDS[b, q], align="bottom_right")

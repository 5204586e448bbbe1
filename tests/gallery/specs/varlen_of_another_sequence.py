from flashgen import AttentionSpec, Tensor

keep = Tensor("keep", ("batch", "kv_len"), "bool")
spec = AttentionSpec(64, mask=lambda b, h, q, kv: keep[b // 2, kv], forms=("dense", "varlen"))

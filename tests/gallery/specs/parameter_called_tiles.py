from flashgen import AttentionSpec, Mask, Tensor

tiles = Tensor("tiles", ("q_len", "kv_len"), "bool")
spec = AttentionSpec(64, mask=Mask(lambda b, h, q_idx, kv_idx: tiles[q_idx, kv_idx], "shown"))

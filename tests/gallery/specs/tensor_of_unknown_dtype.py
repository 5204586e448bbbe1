from flashgen import AttentionSpec, Tensor, document

ids = Tensor("ids", ("batch", "kv_len"), "int64", sorted=True)
spec = AttentionSpec(head_dim=64, mask=document(ids))

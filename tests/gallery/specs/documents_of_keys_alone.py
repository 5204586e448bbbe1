from flashgen import AttentionSpec, Tensor, document

kv_ids = Tensor("kv_ids", ("batch", "kv_len"), "int32", sorted=True)

spec = AttentionSpec(head_dim=64, mask=document(kv_ids=kv_ids))

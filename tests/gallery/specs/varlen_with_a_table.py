from flashgen import AttentionSpec, Tensor, block_sparse

blocks = Tensor("blocks", ("batch", None, None), "bool")
spec = AttentionSpec(64, mask=block_sparse(blocks, 128), forms=("dense", "varlen"))

spec = {"head_dim": 64}

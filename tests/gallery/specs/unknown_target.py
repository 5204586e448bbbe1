from flashgen import AttentionSpec

spec = AttentionSpec(head_dim=64, targets=("sm_90", "h100"))

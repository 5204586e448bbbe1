from flashgen import AttentionSpec, alibi, softcap

spec = AttentionSpec(head_dim=64, score=softcap(30.0) + alibi(8))

from flashgen import AttentionSpec


def stick_breaking(scores):
    return scores.sigmoid()


spec = AttentionSpec(head_dim=64, normaliser=stick_breaking)

from flashgen import AttentionSpec, Int

room = Int("kv_lens")
spec = AttentionSpec(64, mask=lambda b, h, q, kv: kv < room, forms=("dense", "varlen"))

from flashgen import AttentionSpec

specs = [
    AttentionSpec(64, dtype="float32", autocast=True, name="of_float32"),
    AttentionSpec(64, forms=("dense", "varlen"), autocast=True, name="of_forms"),
    AttentionSpec(64, autocast="bfloat16", name="of_a_dtype"),
]

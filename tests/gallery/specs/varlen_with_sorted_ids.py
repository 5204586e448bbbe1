from flashgen import AttentionSpec, document

spec = AttentionSpec(64, mask=document(), forms=("dense", "varlen"))

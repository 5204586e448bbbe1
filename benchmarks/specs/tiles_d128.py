"""Masks whose tiles are decided on the GPU: the table of benchmarks.tiles.

`benchmarks.tile_cells` has the same masks in plain torch, and what calls pass.
"""

from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    causal,
    chosen_blocks,
    clamp,
    natten_2d,
    q_len,
)

KEYS = ("batch", "kv_len")
IMG, KEEP, IDS = (Tensor(name, KEYS, "int32") for name in ("img", "keep", "ids"))
FLAG = Tensor("flag", ("kv_len",), "bool")
GATE = Tensor("gate", ("num_q_heads", "q_len", None), "bool")
SEEN = Tensor("seen", ("q_len", "kv_len"), "bool")

#: Cells of `sta` have 64 tokens and lie in a square of this many rows; it sees 3 x 3 of them.
ROW = 16


def islands(b, h, q, kv):
    return (kv <= q) | ((IMG[b, q] == IMG[b, kv]) & (IMG[b, q] > 0))


def flags(b, h, q, kv):
    return FLAG[q] | FLAG[kv] | (abs(q - kv) <= 128)


def padding(b, h, q, kv):
    return (kv <= q) & (KEEP[b, kv] > 0)


def returning(b, h, q, kv):
    return (kv <= q) & (IDS[b, q] == IDS[b, kv])


def moba(b, h, q, kv):
    return (kv <= q) & GATE[h, q, kv // 64]


def dense(b, h, q, kv):
    return SEEN[q, kv]


def sta(b, h, q, kv):
    seen = True
    for part in (lambda at: at // 64 // ROW, lambda at: at // 64 % ROW):
        centre = clamp(part(q), 1, ROW - 2)
        seen = seen & (part(kv) >= centre - 1) & (part(kv) <= centre + 1)
    return seen


def of(name, mask):
    return AttentionSpec(head_dim=128, dtype="bfloat16", mask=mask, name=name, targets=("sm_90",))


def lists(heads, rows):
    return Tensor("chosen", ("batch", heads, rows, None), "int32")


specs = [
    of(f"{mask.__name__}_d128", Mask(mask, mask.__name__, equal_lengths=True))
    for mask in (islands, flags, padding, returning, moba, dense, sta)
]
specs += [
    of("natten_d128", natten_2d(128, 128, 13)),
    of("chosen64_d128", chosen_blocks() & causal()),
    of("chosen1_d128", chosen_blocks(query_block=1) & causal()),
    of("chosen_heads_d128", chosen_blocks(lists("num_q_heads", (q_len + 63) // 64)) & causal()),
]

"""Lists of chosen blocks, for tests: with entries twice, or of no block, and lists of nothing."""

from __future__ import annotations

import torch

from flashgen import AttentionSpec, Mask, Tensor, causal, chosen_blocks, q_len
from support.cases import Case

#: Whether lists have counts, by the names of the masks below.
COUNTED = ("counted", "each_counted")


def _counts(query_block: int) -> Tensor:
    dims = ("batch", "num_kv_heads", (q_len + (query_block - 1)) // query_block)
    return Tensor("counts", dims, "int32")


def _of_heads() -> Tensor:
    return Tensor("mine", (1, "num_q_heads", (q_len + 63) // 64, None), "int32")


CHOSEN: dict[str, Mask] = {
    "blocks": chosen_blocks() & causal(),
    "small": chosen_blocks(block=16) & causal(),
    "counted": chosen_blocks(counts=_counts(64), block=128),
    "of_heads": chosen_blocks(_of_heads(), block=32),
    "long": chosen_blocks(query_block=128),
    "each": chosen_blocks(query_block=1) & causal(),
    "each_counted": chosen_blocks(counts=_counts(1), block=32, query_block=1),
    "each_or_near": chosen_blocks(query_block=1) & causal()
    | Mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 20), "near", equal_lengths=True),
}

#: The keys of a block and the queries of a list.
SIZES = {
    "blocks": (64, 64),
    "small": (16, 64),
    "counted": (128, 64),
    "of_heads": (32, 64),
    "long": (64, 128),
    "each": (64, 1),
    "each_counted": (32, 1),
    "each_or_near": (64, 1),
}


def chosen_spec(name: str, head_dim: int = 16, dtype: str = "float32") -> AttentionSpec:
    """A variant with one of these masks."""
    return AttentionSpec(head_dim, dtype, mask=CHOSEN[name])


def chosen_case(name: str, length: int, heads: tuple[int, int, int], most: int = 4) -> Case:
    """A call of it: (batch, heads of q, heads of keys), and lists of so many entries."""
    batch, q_heads, kv_heads = heads
    block, query_block = SIZES[name]
    generator = torch.Generator().manual_seed(length)
    blocks, rows = -(-length // block), -(-length // query_block)
    of_heads = (1, q_heads) if name == "of_heads" else (batch, kv_heads)
    sizes = (*of_heads, rows, most)
    # Some entries are twice in a list, some are no block, on either side.
    index = torch.randint(-2, blocks + 1, sizes, generator=generator).int()
    if query_block == 1:  # sixteen queries choose alike, but for one of seven
        index = index[:, :, ::16].repeat_interleave(16, 2)[:, :, :rows]
        index[:, :, ::7, 2] = -1
    index[..., 0] = torch.arange(rows) * query_block // block
    index[:, :, 1] = -1
    index[:, :, -1] = index[:, :, -1, :1]
    params = {"mine" if name == "of_heads" else "chosen": index}
    if name in COUNTED:
        params["counts"] = torch.randint(0, most + 1, sizes[:-1], generator=generator).int()
    return Case(length, length, *heads, params=params)

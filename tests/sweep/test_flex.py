"""FlexAttention's call with one import changed, by kernels: of each kind of case one.

The others run by the modules' references, in tests/module/test_flex.py.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flashgen.flex import flex_attention
from support import flex_oracle
from support.caches import own_cache
from support.flex_cases import BATCH, CASES, KINDS, LENGTH
from support.flex_compare import compare, qkv


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with own_cache(tmp_path_factory):
        yield


@pytest.mark.parametrize("name", KINDS)
def test_by_kernels(name):
    case = CASES[name]()
    compare(case, *qkv(case.q_len, case.kv_len))


def test_a_table_that_is_the_mask():
    """Its lists of tiles come from the table."""
    table = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool).repeat(BATCH, 1, 1, 1)
    table[1, 0, 1, 0] = False
    count, at = table.sum(-1).int(), table.int().argsort(-1, descending=True).int()
    mask = BlockMask.from_kv_blocks(count, at, BLOCK_SIZE=16, seq_lengths=(LENGTH, LENGTH))
    seen = table.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., :LENGTH, :LENGTH]
    inputs = qkv()
    out = flex_attention(*inputs, block_mask=mask)
    expected, _ = flex_oracle.attention(*inputs, seen=seen)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(out)
    mine = torch.autograd.grad(out, inputs, weights)
    right = torch.autograd.grad(expected, inputs, weights.double())
    torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)

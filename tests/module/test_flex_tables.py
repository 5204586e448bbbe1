"""BlockMasks whose tables say more, or less, than their functions."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flashgen.flex import flex_attention
from flashgen.integrations import variants
from support import flex_oracle
from support.flex_cases import BATCH, HEADS, LENGTH
from support.flex_compare import qkv, square

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run the eager reference"),
    pytest.mark.usefixtures("own_cache"),
]


class TestTables:
    """The table of a BlockMask is part of what it shows."""

    def blocks(self, table, block=8, mask_mod=None, full=None):
        """A BlockMask of a dense table; its full blocks are not masked."""
        lists = [
            None if x is None else (x.sum(-1).int(), x.int().argsort(-1, descending=True).int())
            for x in (table, full)
        ]
        [(count, at), full] = lists
        more = (None, None) if full is None else full
        return BlockMask.from_kv_blocks(
            count, at, *more, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH)
        )

    def check(self, block_mask, seen):
        inputs = qkv()
        out, lse = flex_attention(*inputs, block_mask=block_mask, return_lse=True)
        expected, lse_expected = flex_oracle.attention(*inputs, seen=seen)
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, lse_expected.float(), rtol=1e-4, atol=1e-4)
        weights = torch.randn_like(out)
        mine = torch.autograd.grad(out, inputs, weights)
        right = torch.autograd.grad(expected, inputs, weights.double())
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)

    def pairs(self, table, block=8):
        return table.repeat_interleave(block, -2).repeat_interleave(block, -1)[
            ..., :LENGTH, :LENGTH
        ]

    @pytest.mark.parametrize("sizes", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)])
    def test_without_a_function_it_is_the_mask(self, sizes):
        table = torch.rand(*sizes, 3, 3) < 0.6
        self.check(self.blocks(table), self.pairs(table))

    def test_that_hides_more_than_the_function(self):
        table = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)[None, None]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = self.blocks(table, mask_mod=lambda b, h, q, kv: q >= kv)
        self.check(mask, self.pairs(table) & causal)

    def test_with_full_blocks_that_the_function_would_mask(self):
        some = torch.eye(3, dtype=torch.bool)[None, None]
        full = some.roll(1, -1)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        for partial, whole in ((some, full), (~full, full)):
            mask = self.blocks(partial, mask_mod=lambda b, h, q, kv: q >= kv, full=whole)
            self.check(mask, self.pairs(whole) | (self.pairs(partial) & causal))

    def test_that_says_the_same_is_left_out(self, fresh):
        self.check(
            square(lambda b, h, q, kv: q >= kv), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        )
        [family] = variants._families.values()
        [(_, variant)] = family._variants
        assert variant.tensors == {} and not hasattr(variant.module, "listed_blocks")

    def test_of_one_batch_entry_for_a_function_of_several(self):
        """torch reads the one table for all entries, and the function of each."""
        first = torch.tensor([6, 20])
        mask = square(lambda b, h, q, kv: kv < first[b])  # whose table is that of b = 0
        seen = torch.arange(LENGTH) < torch.tensor([6, 8])[:, None, None, None]
        self.check(mask, seen.expand(BATCH, 1, LENGTH, LENGTH))

    def test_is_compared_once_per_object(self, monkeypatch):
        from flashgen.integrations import block_table

        calls, compare_ = [], block_table._compare
        monkeypatch.setattr(
            block_table, "_compare", lambda *given: calls.append(1) or compare_(*given)
        )
        mask, inputs = square(lambda b, h, q, kv: q >= kv), qkv()
        for _ in range(3):
            flex_attention(*inputs, block_mask=mask)
        assert len(calls) == 1
        mask.kv_num_blocks[..., -1] = 0
        mask.full_kv_num_blocks[..., -1] = 0
        out, lse = flex_attention(*inputs, block_mask=mask, return_lse=True)
        assert len(calls) == 2
        assert (out[:, :, 16:] == 0).all() and torch.isinf(lse[:, :, 16:]).all()

    def test_is_compared_again_where_the_function_captures_another_number(self):
        """The table is of the first, and hides what the second shows."""
        width = 4
        mask = square(lambda b, h, q, kv: (q >= kv) & (q - kv < width))
        flex_attention(*qkv(), block_mask=mask)
        table, width = mask.to_dense().bool(), LENGTH
        assert not table.all()
        self.check(mask, self.pairs(table) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def test_is_compared_again_for_a_tensor_that_has_the_id_of_an_earlier_one(self):
        from types import SimpleNamespace

        held = SimpleNamespace(ids=torch.arange(LENGTH) // 7)
        mask = square(lambda b, h, q, kv: held.ids[q] == held.ids[kv])
        table = mask.to_dense().bool()
        flex_attention(*qkv(), block_mask=mask)
        earlier, held.ids, others = id(held.ids), None, []
        while id(zeros := torch.zeros(LENGTH, dtype=torch.int64)) != earlier:
            others.append(zeros)  # which takes the memory of another object
            assert len(others) < 10**5
        held.ids = zeros
        self.check(mask, self.pairs(table))

    def test_of_inference_mode_is_read_as_it_is_now(self):
        """torch does not count what is written to such tensors."""
        with torch.inference_mode():
            ids = torch.arange(LENGTH) // 7
            mask = square(lambda b, h, q, kv: ids[q] == ids[kv])
            inputs = tuple(x.detach() for x in qkv())
            table = mask.to_dense().bool()
            for written in (None, ids, mask.kv_num_blocks):
                if written is not None:
                    written.zero_()
                table &= written is not mask.kv_num_blocks
                out = flex_attention(*inputs, block_mask=mask)
                seen = self.pairs(table) & (ids[:, None] == ids)
                expected, _ = flex_oracle.attention(*inputs, seen=seen)
                torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)

    def test_whose_blocks_have_all_rows(self):
        table = torch.tensor([[[[True, False, True]]]])
        mask = self.blocks(table, (2**30, 8))
        self.check(mask, table.repeat_interleave(8, -1).expand(1, 1, LENGTH, LENGTH))
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = self.blocks(table, (2**30, 8), mask_mod=lambda b, h, q, kv: q >= kv)
        self.check(mask, table.repeat_interleave(8, -1) & causal)

    def test_of_a_slice(self):
        mask = square(lambda b, h, q, kv: q >= kv)[:, :, 2:]
        inputs = tuple(x.detach() for x in qkv(8))
        with pytest.raises(ValueError, match="it was sliced, and has no mask_mod any more"):
            flex_attention(*inputs, block_mask=mask)
        mask.mask_mod = lambda b, h, q, kv: q + 16 >= kv
        mask.seq_lengths = (8, LENGTH)
        out = flex_attention(*inputs, block_mask=mask)
        expected, _ = flex_oracle.attention(*inputs, mask_mod=mask.mask_mod)
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)

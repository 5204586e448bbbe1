"""Which calls of FlexAttention trace a function again: not each new closure."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flashgen.flex import flex_attention
from flashgen.integrations import variants
from support import flex_oracle
from support.flex_cases import BATCH, HEADS, LENGTH, Case, draw
from support.flex_compare import compare, qkv

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run the eager reference"),
    pytest.mark.usefixtures("own_cache"),
]


class TestWhatIsTracedAgain:
    """A function is traced when its code, or what it captures, is new."""

    @pytest.fixture(autouse=True)
    def compiled(self, fresh, monkeypatch):
        """The specs that are compiled, in order."""
        self.specs = []

        def noted(spec):
            self.specs.append(spec)
            return compile_(spec)

        compile_ = variants.compiled
        monkeypatch.setattr(variants, "compiled", noted)

    def attend(self, score_mod=None, mask_mod=None, length=LENGTH, learned=()):
        compare(Case(score_mod, mask_mod, length, length, learned), *qkv(length, length))

    def test_not_a_new_closure_over_other_tensors(self):
        def slope(slopes):
            return lambda score, b, h, q, kv: score + slopes[h] * (q - kv)

        for _ in range(3):
            self.attend(slope(draw(HEADS)))
        assert len(self.specs) == 1

    def test_not_for_other_lengths(self):
        def masked(ids):
            return lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)

        for length in (24, 17, 40):
            ids = torch.arange(length).repeat(BATCH, 1) // 7
            self.attend(None, masked(ids), length)
        assert len(self.specs) == 1
        [ids] = self.specs[0].params
        assert (ids.names, ids.dtype, ids.sorted) == (("batch", "kv_len"), "int32", True)

    def test_an_int_is_a_constant_first_and_an_argument_from_its_second_value_on(self):
        def window(left):
            return lambda b, h, q, kv: (q >= kv) & (q - kv < left)

        for left in (4, 9, 2, 13):
            self.attend(None, window(left))
        assert [[p.name for p in spec.params] for spec in self.specs] == [[], ["left"]]

    def test_a_float_too(self):
        def capped(cap):
            return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)

        for cap in (2.5, 7.0, 3.25):
            self.attend(capped(cap))
        assert [[p.name for p in spec.params] for spec in self.specs] == [[], ["cap"]]

    def test_a_number_that_python_decides_by_stays_a_constant(self):
        def repeated(times, left):
            def score_mod(score, b, h, q, kv):
                for _ in range(times):
                    score = score * 0.5
                return torch.where(q - kv < left, score, score - 1)

            return score_mod

        for times, left in ((1, 5), (2, 4), (3, 9), (1, 6), (2, 5)):
            self.attend(repeated(times, left))
        assert [len(spec.params) for spec in self.specs] == [0, 1, 1, 1]

    def test_a_sign_that_changes(self):
        """An index of a constant above 0 needs no more than that; one below counts from the end."""

        def shifted(by):
            table = draw(3 * LENGTH)
            return lambda score, b, h, q, kv: score + table[kv + by]

        for by in (3, 5, -2, -4, 0):
            self.attend(shifted(by))

    def test_what_a_global_an_attribute_or_a_list_holds_now(self):
        class Held:
            factor = 2.0

            def __init__(self):
                self.offset = 1

        held, steps = Held(), [1, 2]

        def score_mod(score, b, h, q, kv):
            return score * held.factor + held.offset * (q - kv) + steps[-1]

        for change in (
            lambda: None,
            lambda: setattr(held, "offset", 3),
            lambda: setattr(Held, "factor", 0.5),
            lambda: steps.append(5),
        ):
            change()
            out = flex_attention(*(qkv := self.inputs()), score_mod)
            expected, _ = flex_oracle.attention(*qkv, score_mod)
            torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)

    def inputs(self):
        return tuple(x.detach() for x in qkv())

    def test_a_helper_that_is_another_now(self):
        def with_helper(helper):
            return lambda score, b, h, q, kv: helper(score, q - kv)

        for helper in (torch.add, torch.sub, lambda a, b: a - 2 * b, lambda a, b: a - 3 * b):
            self.attend(with_helper(helper))

    def test_a_value_that_cannot_be_looked_through(self):
        """A queue may change unseen: the function is traced at each call."""
        from collections import deque

        held = deque([2])

        def score_mod(score, b, h, q, kv):
            return score * held[0]

        self.attend(score_mod)
        held.appendleft(3)
        self.attend(score_mod)

    def test_longer_sequences_where_an_index_becomes_negative(self):
        table = draw(3 * LENGTH)

        def score_mod(score, b, h, q, kv):
            return score + table[(q - kv) + LENGTH]

        self.attend(score_mod, length=LENGTH)
        self.attend(score_mod, length=LENGTH - 5)
        assert len(self.specs) == 1
        self.attend(score_mod, length=LENGTH + 10)
        assert len(self.specs) == 2

    def test_captured_tensors_are_not_kept(self):
        def call():
            table, ids = draw(HEADS), torch.arange(LENGTH) // 5
            mask = create_block_mask(
                lambda b, h, q, kv: ids[q] == ids[kv], None, None, LENGTH, LENGTH, "cpu"
            )
            flex_attention(*self.inputs(), lambda s, b, h, q, kv: s + table.exp()[h], mask)
            return weakref.ref(table), weakref.ref(ids), weakref.ref(mask)

        held = call()
        gc.collect()
        assert [x() for x in held] == [None] * 3

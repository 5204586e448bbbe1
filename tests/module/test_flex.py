"""FlexAttention's call with one import changed, on the CPU: modules compute by their references."""

import functools
import gc
import sys
import warnings
import weakref

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import flashgen.flex
from flashgen.errors import FlashgenError, MaskError
from flashgen.flex import flex_attention, prepare
from flashgen.integrations import variants
from flashgen.integrations.captures import is_of_library
from support import flex_oracle
from support.flex_cases import BATCH, CASES, GYM, HEADS, LENGTH, TORCH, Case, draw
from support.flex_compare import compare, qkv

pytestmark = pytest.mark.filterwarnings("ignore:.*run the eager reference")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A cache of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "flashgen"))
        yield


@pytest.fixture
def fresh(monkeypatch):
    """No variant is known yet."""
    monkeypatch.setattr(variants, "_families", {})


#: What captures no tensor is traced as in other tests: the full run has its modules too.
PLAIN = [name for name, make in CASES.items() if isinstance(make, functools.partial)]
RUN = [pytest.param(x, marks=pytest.mark.full if x in PLAIN[::2] else ()) for x in CASES]


@pytest.mark.parametrize("name", RUN)
def test_with_the_import_changed(name):
    case = CASES[name]()
    compare(case, *qkv(case.q_len, case.kv_len))


def test_the_cases_are_many():
    assert (len(TORCH), len(GYM)) == (77, 27)


OF_8 = torch.randint(0, 256, (LENGTH,), dtype=torch.uint8)
OF_7 = torch.randint(-128, 128, (LENGTH,), dtype=torch.int8)
OF_7[::5] = -128
OF_15 = torch.randint(-(2**15), 2**15, (LENGTH,), dtype=torch.int16)
ROWS = torch.randint(100, 256, (LENGTH, 4), dtype=torch.uint8)
BITS = torch.randint(0, 256, (LENGTH, LENGTH // 8), dtype=torch.uint8)
NUMBER = torch.tensor(200, dtype=torch.uint8)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, kv: s + 0.01 * (OF_8[q] - OF_8[kv]) + 0.01 * (OF_8[kv] + 100),
        lambda s, b, h, q, kv: s + 0.01 * (OF_8[q] * 3) + 0.01 * (~OF_8[kv] + -OF_8[q]),
        lambda s, b, h, q, kv: s + 0.01 * ((OF_8[q] << 1) + (100 + OF_8[kv]) % 7 + OF_8[q] ** 2),
        lambda s, b, h, q, kv: s + 0.01 * OF_7[q].abs() + 0.01 * (-OF_7[kv] - 3),
        lambda s, b, h, q, kv: s + 0.001 * (OF_7[q] + OF_8[kv]) + 1e-4 * (OF_15[q] + OF_7[kv]),
        lambda s, b, h, q, kv: s + 1e-4 * torch.mul(OF_15[q], OF_15[kv]),
        lambda s, b, h, q, kv: s + 0.01 * (torch.where(q > kv, OF_8[q], OF_8[kv]) + NUMBER),
        lambda s, b, h, q, kv: s + 0.01 * (torch.maximum(OF_8[q], OF_8[kv]) + (q > kv) * OF_8[q]),
        lambda s, b, h, q, kv: s + 0.001 * (ROWS[kv] + ROWS[q]).sum(),
        # With positions, floats and after a cast there are as many bits as there need be.
        lambda s, b, h, q, kv: s + 0.01 * (q + OF_8[q] + OF_8[kv]) + 0.01 * ROWS[kv].sum(),
        lambda s, b, h, q, kv: s + 0.01 * (OF_8[q].float() - OF_8[kv].float()),
        lambda s, b, h, q, kv: s + 0.01 * (OF_8[q].long() - OF_8[kv]) + 0.01 * (OF_8[q] * 1.5 + 9),
    ],
)
def test_integers_of_few_bits_wrap_around(score_mod):
    compare(Case(score_mod), *qkv())


def test_bits_from_the_most_significant_on():
    compare(Case(None, lambda b, h, q, kv: (BITS[q, kv // 8] >> (7 - kv % 8)) & 1 == 1), *qkv())
    compare(Case(None, lambda b, h, q, kv: (BITS[q, kv // 8] << (kv % 8)) >= 128), *qkv())


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


class TestCapturedTensors:
    def test_of_int64_are_read_as_they_are_now(self):
        ids = torch.arange(LENGTH) // 7
        mask = lambda b, h, q, kv: ids[q] == ids[kv]  # noqa: E731
        inputs = qkv()
        for _ in range(2):
            block_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu")
            out = flex_attention(*inputs, block_mask=block_mask)
            expected, _ = flex_oracle.attention(*inputs, mask_mod=mask)
            torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
            ids.copy_(torch.arange(LENGTH) // 3)

    def test_of_int64_that_an_array_shares(self):
        """numpy writes to it, which torch does not count."""
        array = torch.arange(LENGTH).numpy().copy()
        ids = torch.from_numpy(array)
        for _ in range(2):
            attended(lambda score, b, h, q, kv: score + ids[kv])
            array[:] = array[::-1].copy()

    def test_beyond_32_bits_are_refused(self):
        big = torch.arange(LENGTH) + 2**40
        with pytest.raises(MaskError, match=r"^big: .* exceeds 32 bits; subtract what"):
            flex_attention(*qkv(), lambda score, b, h, q, kv: score + big[kv])

    def test_of_float64_that_float32_rounds_by_much_are_refused(self):
        """Seconds since 1970, say, whose differences are compared."""
        seconds = 1.7e9 + torch.arange(LENGTH, dtype=torch.float64)
        with pytest.raises(MaskError, match=r"^seconds: .* too large for float32; subtract"):
            attended(lambda score, b, h, q, kv: score - (seconds[q] - seconds[kv]).abs())
        seconds -= 1.7e9
        seconds[0] = -torch.inf
        attended(lambda score, b, h, q, kv: score + seconds[kv] * 0.3)

    def test_of_other_dtypes_are_refused(self):
        table = draw(LENGTH).to(torch.complex64)
        with pytest.raises(FlashgenError, match=r"test_flex\.py:\d+: "):
            flex_attention(*qkv(), lambda score, b, h, q, kv: score + table[kv])


def square(mask_mod, batch=1, heads=1, block=8, length=LENGTH):
    return create_block_mask(mask_mod, batch, heads, length, length, "cpu", BLOCK_SIZE=block)


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


class TestTheCall:
    def test_the_signature_is_torchs(self):
        import inspect

        mine, torchs = (
            inspect.signature(f).parameters for f in (flex_attention, theirs.flex_attention)
        )
        assert list(mine)[:-1] == list(torchs) and list(mine)[-1] == "fallback"
        for name, parameter in torchs.items():
            assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)

    def test_grouped_heads(self):
        q, k, v = qkv(heads=2)
        case = Case(lambda score, b, h, q, kv: score + h * (q - kv), lambda b, h, q, kv: q >= kv)
        with pytest.raises(ValueError, match="pass enable_gqa=True"):
            flex_attention(q, k, v)
        compare(case, q, k, v, enable_gqa=True)

    @pytest.mark.parametrize("widths", [(20, 20), (4, 33), (16, 16)])
    def test_head_dimensions_of_any_size(self, widths):
        q, k, _ = qkv(width=widths[0])
        _, _, v = qkv(width=widths[1])
        compare(Case(lambda score, b, h, q, kv: score - (q - kv).abs()), q, k, v)

    def test_a_scale(self):
        inputs = qkv()
        out = flex_attention(*inputs, scale=0.5)
        torch.testing.assert_close(out, flex_oracle.attention(*inputs, scale=0.5)[0].float())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_16_bits(self, dtype):
        inputs = qkv(dtype=dtype)
        out, lse = flex_attention(*inputs, return_lse=True)
        expected, right = flex_oracle.attention(*inputs)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(out, expected.to(dtype), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, right.float(), rtol=1e-3, atol=1e-3)

    def test_autocast(self):
        """As in torch, q, k and v take the dtype of autocast, whichever they have."""
        q, k, v = qkv()
        with torch.autocast("cpu", torch.bfloat16):
            out = flex_attention(q, k.half(), v)
            right = theirs.flex_attention(*(x.detach() for x in (q, k.half(), v)))
        assert out.dtype == right.dtype == torch.bfloat16
        torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
        assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32

    def test_keys_for_all_batch_entries(self):
        q, k, v = qkv()
        k, v = k[:1].detach(), v[:1].detach()
        mask = square(lambda b, h, q, kv: q + b >= kv, BATCH)
        with pytest.raises(ValueError, match="pass equal batches, or one of 1 beside a block_mask"):
            flex_attention(q, k, v)
        out = flex_attention(q, k, v, block_mask=mask)
        both = (x.expand(BATCH, -1, -1, -1) for x in (k, v))
        expected, _ = flex_oracle.attention(q, *both, mask_mod=mask.mask_mod)
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)

    def test_what_is_refused(self):
        q, k, v = (x.detach() for x in qkv())
        mask = square(lambda b, h, q, kv: q >= kv)
        for error, message, call in (
            (NotImplementedError, "max_scores=True.*fallback='torch'",
             lambda: flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))),
            (NotImplementedError, r"scale: got -0\.5; .*query by it and pass 1; or pass fallback",
             lambda: flex_attention(q, k, v, scale=-0.5)),
            (ValueError, "return_lse: is given beside return_aux",
             lambda: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))),
            (ValueError, "kernel_options: BLOCKM: not an option",
             lambda: flex_attention(q, k, v, kernel_options={"BLOCKM": 64})),
            (NotImplementedError, r"query: got torch\.float64",
             lambda: flex_attention(q.double(), k.double(), v.double())),
            (TypeError, r"key: got torch\.bfloat16, query is torch\.float32; pass one dtype",
             lambda: flex_attention(q, k.bfloat16(), v)),
            (ValueError, "it is for q_len 24 and kv_len 24, and query and key have 20 and 24",
             lambda: flex_attention(q[:, :, :20], k, v, block_mask=mask)),
            (ValueError, "its table is for 3 of batch, query has 2",
             lambda: flex_attention(q, k, v, block_mask=square(mask.mask_mod, 3))),
            (TypeError, "block_mask: got function; pass a BlockMask",
             lambda: flex_attention(q, k, v, block_mask=mask.mask_mod)),
            (ValueError, "fallback: got 'sdpa'", lambda: flex_attention(q, k, v, fallback="sdpa")),
        ):  # fmt: skip
            with pytest.raises(error, match=message):
                call()
        flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "PRESCALE_QK": True})

    def test_a_function_that_cannot_be_traced_is_refused_by_its_line(self):
        def branching(score, b, h, q_idx, kv_idx):
            if q_idx > kv_idx:
                return score
            return score * 2

        with pytest.raises(FlashgenError) as caught:
            flex_attention(*qkv(), branching)
        message = str(caught.value)
        assert "test_flex.py" in message and "`if q_idx > kv_idx:`" in message
        assert message.endswith(
            "pass fallback='torch', and torch's FlexAttention computes the call"
        )

    def test_or_goes_to_torch(self, monkeypatch):
        calls = []
        monkeypatch.setattr(theirs, "flex_attention", lambda *given, **more: calls.append(given))
        q, k, v = qkv()
        branching = lambda score, b, h, q, kv: score if q > kv else -score  # noqa: E731
        flex_attention(q, k, v, branching, scale=0.5, fallback="torch")
        flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True), fallback="torch")
        assert [given[:6] for given in calls] == [
            (q, k, v, branching, None, 0.5), (q, k, v, None, None, None),
        ]  # fmt: skip
        flex_attention(q, k, v, lambda score, b, h, q, kv: score + q, fallback="torch")
        assert len(calls) == 2

    def test_so_do_captured_numbers_that_32_bits_do_not_hold(self, monkeypatch):
        """Whether a tensor has such numbers is known when its function has long been traced."""
        calls = []
        monkeypatch.setattr(theirs, "flex_attention", lambda *given, **more: calls.append(given))
        q, k, v = qkv()
        for dtype in (torch.int64, torch.float64):
            numbers = torch.arange(LENGTH, dtype=dtype)
            score_mod = lambda score, b, h, q, kv: score + numbers[kv]  # noqa: B023, E731
            for added, fallen_back in ((0, False), (2**40 + 1, True), (-(2**40) - 1, False)):
                numbers += added
                flex_attention(q, k, v, score_mod, fallback="torch")
                assert [given[:4] for given in calls] == [(q, k, v, score_mod)] * fallen_back
                calls.clear()


class TestCompiled:
    """torch.compile traces what was prepared, and not flashgen."""

    def functions(self):
        slopes = torch.nn.Parameter(torch.rand(HEADS))
        ids = torch.arange(LENGTH) // 7
        score_mod = lambda score, b, h, q, kv: score + slopes[h] * (kv - q)  # noqa: E731
        return slopes, score_mod, square(lambda b, h, q, kv: ids[q] == ids[kv])

    def test_prepared_with_gradients(self):
        slopes, score_mod, mask = self.functions()
        inputs = qkv()
        attend = prepare(*inputs, score_mod, mask)
        traced = torch.compile(
            lambda q, k, v: attend(q.sin(), k, v, return_lse=True), fullgraph=True, backend="eager"
        )
        out, lse = traced(*inputs)
        expected, right = flex_oracle.attention(
            inputs[0].sin(), *inputs[1:], score_mod, mask.mask_mod
        )
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, right.float(), rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(out.sum(), (*inputs, slopes))
        expected_grads = torch.autograd.grad(expected.sum(), (*inputs, slopes))
        torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-3)

    def test_prepared_reads_what_tensors_hold_now(self):
        slopes, score_mod, mask = self.functions()
        inputs = tuple(x.detach() for x in qkv())
        attend = prepare(*inputs, score_mod, mask)
        traced = torch.compile(attend, fullgraph=True, backend="eager")
        traced(*inputs)
        with torch.no_grad():
            slopes.mul_(-2)
        expected, _ = flex_oracle.attention(*inputs, score_mod, mask.mask_mod)
        torch.testing.assert_close(traced(*inputs), expected.float(), rtol=1e-4, atol=1e-4)

    def test_prepared_for_a_table_refuses_other_lengths(self):
        _, _, mask = self.functions()
        attend = prepare(*qkv(), block_mask=mask)
        with pytest.raises(ValueError, match="got q_len 20 and kv_len 20; it was prepared for 24"):
            attend(*qkv(20, 20))
        free = prepare(*qkv(), lambda score, b, h, q, kv: score + q - kv)
        assert free(*qkv(20, 31)).shape == (BATCH, HEADS, 20, 16)

    def test_the_call_itself_says_so(self):
        _, score_mod, mask = self.functions()
        inputs = tuple(x.detach() for x in qkv())

        def call(q, k, v):
            return flex_attention(q, k, v, score_mod, mask)

        with pytest.raises(Exception, match=r"flashgen\.flex\.prepare"):
            torch.compile(call, fullgraph=True, backend="eager")(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loose = torch.compile(call, backend="eager")(*inputs)
        torch.testing.assert_close(loose, call(*inputs))


def test_both_names_are_one():
    from flashgen.integrations import flex

    assert flashgen.flex.flex_attention is flex.flex_attention


class Slotted:
    """An object without a dict, and a method with a default."""

    __slots__ = ("factor", "table")

    def __init__(self, factor):
        self.factor, self.table = factor, draw(HEADS)

    def score_mod(self, score, b, h, q, kv, power=1):
        return score * self.factor + self.table[h] ** power


class OfAClass:
    """A tensor that instances share, and a property."""

    shared = torch.linspace(-1, 1, LENGTH)
    factor = 0.5

    @property
    def twice(self):
        return 2 * self.factor

    def score_mod(self, score, b, h, q, kv):
        return score * self.twice + self.shared[kv]


@pytest.mark.parametrize("held", [Slotted(0.5), OfAClass()], ids=lambda held: type(held).__name__)
def test_what_an_object_holds(fresh, held):
    compare(Case(held.score_mod), *qkv())
    held.factor = 2.0
    compare(Case(held.score_mod), *qkv())


def test_a_function_that_a_librarys_object_wraps(fresh):
    """torch.no_grad() as a decorator copies itself at each call."""
    power = draw(HEADS)
    compare(Case(torch.enable_grad()(lambda score, b, h, q, kv: score + power[h])), *qkv())


@pytest.mark.parametrize("name", ["token", "mine"])
def test_a_module_of_the_users_own(fresh, tmp_path, monkeypatch, name):
    """It is looked through, also if it has the name of one of Python's."""
    import importlib.util

    (tmp_path / f"{name}.py").write_text(
        "import torch\nWIDTH = 3\nBIAS = torch.arange(24.0)\n"
        "def score_mod(score, b, h, q, kv):\n    return score + WIDTH * BIAS[kv]\n"
    )
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    is_of_library.cache_clear()
    through = lambda score, b, h, q, kv: module.score_mod(score, b, h, q, kv) - module.WIDTH  # noqa: E731
    try:
        for _ in range(2):
            compare(Case(module.score_mod), *qkv())
            compare(Case(through), *qkv())
            module.WIDTH = 1
    finally:
        is_of_library.cache_clear()


def attended(score_mod):
    """The output for a score function, which is right."""
    inputs = tuple(x.detach() for x in qkv())
    out = flex_attention(*inputs, score_mod)
    expected, _ = flex_oracle.attention(*inputs, score_mod)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)


class TestWhatCouldChangeUnseen:
    """Values that are read in ways other than by a name."""

    def test_an_attribute_of_a_function(self):
        def score_mod(score, b, h, q, kv):
            return score * score_mod.factor

        for score_mod.factor in (1, 2):
            attended(score_mod)

    def test_what_is_imported_when_it_runs(self, tmp_path, monkeypatch):
        (tmp_path / "imported_late.py").write_text("FACTOR = 1\n")
        monkeypatch.syspath_prepend(tmp_path)

        def score_mod(score, b, h, q, kv):
            from imported_late import FACTOR

            return score * FACTOR

        attended(score_mod)
        attended(score_mod)
        sys.modules["imported_late"].FACTOR = 3
        attended(score_mod)
        del sys.modules["imported_late"]

    def test_numbers_of_other_classes(self):
        import numpy as np

        class Steps(int):
            unit = "step"

        held = [Steps(2), np.float32(0.5), (1.0).__add__]

        def score_mod(score, b, h, q, kv):
            return score * held[0] + held[1] * (q - kv) + held[2](1.0)

        attended(score_mod)
        held[0], held[1] = Steps(3), np.float32(0.25)
        attended(score_mod)

    def test_a_dict_that_makes_what_is_missing(self):
        from collections import defaultdict

        held = defaultdict(lambda: 2, tables=[draw(HEADS)])

        def score_mod(score, b, h, q, kv):
            return score * held["factor"] + held["tables"][0][h]

        attended(score_mod)
        held["factor"] = 3
        attended(score_mod)

    def changing(self, score_mod, change):
        """What a score function computes while ``change`` sets a number to others."""
        for number in (1.0, 2.0, 3.0, 0.5):  # the second and later ones could be a Float
            change(number)
            attended(score_mod)

    @pytest.mark.parametrize("name", ["static", "of_class", "twice", "base", "meta", "described"])
    def test_what_a_class_has(self, fresh, name):
        class Described:
            def __get__(self, instance, owner):
                return self.held

        class Meta(type):
            meta = 1.0

        class Base:
            base = 1.0
            described = Described()

        class Held(Base, metaclass=Meta):
            @staticmethod
            def static():
                return factor_of_globals

            @classmethod
            def of_class(cls):
                return factor_of_globals

            @property
            def twice(self):
                return factor_of_globals

        def change(number):
            global factor_of_globals
            factor_of_globals = Base.base = Meta.meta = number
            vars(Base)["described"].held = number

        held = Held if name == "meta" else Held()
        score_mods = {
            "static": lambda score, b, h, q, kv: score * held.static() + Held.static() * q,
            "of_class": lambda score, b, h, q, kv: score * held.of_class(),
            "twice": lambda score, b, h, q, kv: score * held.twice,
            "base": lambda score, b, h, q, kv: score * Held.base,
            "meta": lambda score, b, h, q, kv: score * held.meta,
            "described": lambda score, b, h, q, kv: score * held.described,
        }
        self.changing(score_mods[name], change)

    @pytest.mark.parametrize("name", ["factor", "index", "times", "super"])
    def test_what_python_calls_without_a_name(self, fresh, name):
        class Base:
            def own(self, score):
                return score * factor_of_globals

        class Held(Base):
            def __getattr__(self, name):
                if name != "factor":
                    raise AttributeError(name)
                return vars(self)["numbers"][name]

            def __getitem__(self, at):
                return self.held[at]

            def __mul__(self, score):
                return score * factor_of_globals

            def own(self, score):
                return super().own(score) + 1

        def change(number):
            global factor_of_globals
            factor_of_globals = number
            vars(held).update(numbers={"factor": number}, held=[number])

        held = Held()
        score_mods = {
            "factor": lambda score, b, h, q, kv: score * held.factor,
            "index": lambda score, b, h, q, kv: score * held[0],
            "times": lambda score, b, h, q, kv: held * score,
            "super": lambda score, b, h, q, kv: held.own(score),
        }
        self.changing(score_mods[name], change)

    def test_a_tensor_that_a_static_method_reads(self, fresh):
        class Held:
            @staticmethod
            def times(score):
                return score * factor_of_globals

        def change(number):
            global factor_of_globals
            factor_of_globals = torch.tensor(number)

        self.changing(lambda score, b, h, q, kv: Held.times(score), change)

    @pytest.mark.parametrize("kind", ["deque", "UserDict", "dict"])
    def test_an_object_that_holds_more_than_attributes(self, fresh, kind):
        import collections

        class Deque(collections.deque):
            pass

        class Dict(dict):
            pass

        held = {"deque": Deque([0]), "UserDict": collections.UserDict(), "dict": Dict()}[kind]

        def change(number):
            if kind == "dict":
                held.factor = number
            else:
                held[0] = number

        factor = (lambda: held.factor) if kind == "dict" else (lambda: held[0])
        self.changing(lambda score, b, h, q, kv: score * factor(), change)

    def test_a_function_that_is_cached(self, fresh):
        def cached(function):
            function = functools.lru_cache(function)
            return lambda score, b, h, q, kv: function(score)

        attended(cached(lambda score: score * 2))
        attended(cached(lambda score: score * 3))

    def test_a_method_of_a_dict(self, fresh):
        held = {}
        get = held.get
        self.changing(
            lambda score, b, h, q, kv: score * get("factor"), lambda x: held.update(factor=x)
        )

    @pytest.mark.parametrize("read", ["getattr", "globals", "vars"])
    def test_a_name_that_is_composed(self, fresh, read):
        class Held:
            pass

        held, name = Held(), "factor_of_globals"

        def change(number):
            globals()[name] = held.factor_of_globals = number

        factor = {
            "getattr": lambda: getattr(held, name),
            "globals": lambda: globals()[name],
            "vars": lambda: vars(held)["factor_of_" + "GLOBALS".lower()],
        }[read]
        self.changing(lambda score, b, h, q, kv: score * factor(), change)

    def test_a_number_taken_out_of_a_tensor_is_refused(self):
        table = draw(HEADS)
        for taken in (
            lambda: table.tolist()[0],
            lambda: table.max().item(),
            lambda: float(table[0]),
        ):
            with pytest.raises(FlashgenError, match=r"test_flex\.py:\d+"):
                flex_attention(*qkv(), lambda score, b, h, q, kv, taken=taken: score * taken())

    def test_a_tensor_that_is_written_to_is_refused(self):
        table = draw(HEADS)
        before = table.clone()
        with pytest.raises(FlashgenError):
            flex_attention(*qkv(), lambda score, b, h, q, kv: score + table.add_(1)[h])
        assert torch.equal(table, before)

    def test_a_maximum_of_a_tensor(self):
        table = draw(HEADS)

        def score_mod(score, b, h, q, kv):
            return score - table.max() + table[:2].sum() * table[h]

        attended(score_mod)
        table.mul_(-3)
        attended(score_mod)


@pytest.mark.parametrize("before", [(), (3, 5)], ids=["a constant", "a number of the call"])
def test_a_mask_that_hides_all_keys(fresh, before):
    """As a window of 0 does: the output is 0, as torch's."""
    q, k, v = qkv(LENGTH, LENGTH)
    for window in (*before, 0):

        def within(b, h, q_idx, kv_idx, window=window):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

        mask = create_block_mask(within, None, None, LENGTH, LENGTH, device="cpu")
        out, lse = flex_attention(q, k, v, None, mask, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_any_strides():
    q, k, v = (x.detach().mT.contiguous().mT for x in qkv())
    assert q.stride(-1) != 1
    expected, _ = flex_oracle.attention(q, k, v)
    torch.testing.assert_close(flex_attention(q, k, v), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [16, 12])  # the latter is padded
def test_the_output_has_its_strides_in_the_order_of_the_query(head_dim):
    tokens = torch.randn(2, 24, 4, head_dim, requires_grad=True)
    q = tokens.transpose(1, 2)
    out = flex_attention(q, q, q)
    rows = out.transpose(1, 2).view(2, 24, 4 * head_dim)  # no copy, as of torch's own output
    expected, _ = flex_oracle.attention(q, q, q)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(rows.sin().sum(), tokens)
    (right,) = torch.autograd.grad(expected.sin().sum(), tokens)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-4)

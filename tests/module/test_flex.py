"""FlexAttention's call with one import changed, on the CPU: modules compute by their references."""

import functools
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import flashgen.flex
from flashgen.errors import FlashgenError
from flashgen.flex import flex_attention, prepare
from support import flex_oracle
from support.flex_cases import BATCH, CASES, GYM, HEADS, LENGTH, TORCH, Case
from support.flex_compare import compare, qkv, square

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run the eager reference"),
    pytest.mark.usefixtures("own_cache"),
]

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

from dataclasses import replace

import pytest
import torch

from flashgen.errors import ValidationError
from flashgen.kernels.registry import with_key
from flashgen.loader import Variant
from flashgen.masks import causal, sliding_window
from flashgen.params import Int, Tensor
from flashgen.plan import lower
from flashgen.scores import additive_bias, alibi
from flashgen.spec import AttentionSpec, Blocks
from flashgen.validate import unfit, validate

GOOD = AttentionSpec(head_dim=64, mask=causal())


def findings(name="tiny", **fields):
    variant = Variant(name, replace(GOOD, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 16},
        {"head_dim": 512},
        {"head_dim": (192, 128)},
        {"head_dim": [192, 128]},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"dtype": torch.bfloat16},
        {"dtype": "float32", "input_precision": "tf32"},
        {"scale": 1},
        {"scale": 0.125},
        {"mask": sliding_window(Int("left", default=4), 0)},
        {"mask": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
        {"blocks": Blocks(BLOCK_M=128, BLOCK_N=(32, 64), num_warps=[4, 8], num_stages=1)},
        {"targets": ("sm_90",)},
        {"targets": ["gfx942", "sm_80"]},
        {"name": "match"},
        {"dropout": True},
        {"deterministic": True},
        {"deterministic": True, "score": alibi(Tensor("slopes", ("num_q_heads",)))},
    ],
)
def test_good_fields(fields):
    assert findings(**fields) == []


def test_dtypes_of_torch_are_those_of_their_names():
    assert AttentionSpec(64, torch.float16) == AttentionSpec(64, "float16")
    assert AttentionSpec(64, torch.float16).digest == AttentionSpec(64, "float16").digest
    assert Tensor("x", (3,), torch.int32).declaration == Tensor("x", (3,), "int32").declaration
    [finding] = findings(dtype=torch.float64)
    assert "dtype='float64': not a dtype that flashgen supports" in finding


IN_TINY = "specs/tiny.py: tiny: "


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dropout": 0.1}, "dropout=0.1: neither True nor False; "
         "write dropout=True; calls choose dropout_p"),
        ({"deterministic": 1}, "deterministic=1: neither True nor False; "
         "write deterministic=True, or leave it out"),
        ({"deterministic": True, "score": additive_bias(Tensor("bias", ("q_len", "kv_len")))},
         "deterministic=True: gradients of 'bias' are sums that several programs add to; "
         "index it by head, query, key or distance, or by all of b, h, q_idx and kv_idx"),
        ({"head_dim": 0}, "head_dim=0: not a multiple of 8 from 16 to 512; "
         "write one that is, or (qk, v) of two"),
        ({"head_dim": 7}, "head_dim=7: not a multiple of 8 from 16 to 512; "
         "write one that is, or (qk, v) of two"),
        ({"head_dim": 520}, "head_dim=520: not a multiple of 8 from 16 to 512; "
         "write one that is, or (qk, v) of two"),
        ({"head_dim": 64.0}, "head_dim=64.0: not a multiple of 8 from 16 to 512; "
         "write one that is, or (qk, v) of two"),
        ({"head_dim": (64, True)}, "head_dim=(64, True): True is not a multiple of 8 "
         "from 16 to 512; write two that are"),
        ({"head_dim": (64, 64, 64)}, "head_dim=(64, 64, 64): not a pair; "
         "write a multiple of 8 from 16 to 512, or (qk, v) of two"),
        ({"dtype": "bf16"}, "dtype='bf16': not a dtype that flashgen supports; "
         "write one of 'float16', 'bfloat16', 'float32'"),
        ({"input_precision": "tf32"}, "input_precision='tf32': applies to float32, "
         "and dtype is 'bfloat16'; leave it out"),
        ({"dtype": "float32", "input_precision": "tf32x3"}, "input_precision='tf32x3': "
         "not a precision of float32 products; write one of 'tf32', 'ieee', None"),
        ({"scale": 0}, "scale=0: not a positive number of 32 bits, below 2**127; "
         "write one, or leave it out"),
        ({"scale": 1e-40}, "scale=1e-40: not a positive number of 32 bits, below 2**127; "
         "write one, or leave it out"),
        ({"scale": float("inf")}, "scale=inf: not a positive number of 32 bits, below 2**127; "
         "write one, or leave it out"),
        ({"scale": 2.0**127}, f"scale={2.0**127}: not a positive number of 32 bits, below 2**127; "
         "write one, or leave it out"),
        ({"scale": "0.1"}, "scale='0.1': not a positive number of 32 bits, below 2**127; "
         "write one, or leave it out"),
        ({"scale": True}, "scale=True: not a positive number of 32 bits, below 2**127; "
         "write one, or leave it out"),
        ({"mask": "causal"}, "mask='causal': not a mask; "
         "give a mask of flashgen's, or a function (b, h, q_idx, kv_idx) -> bool"),
        ({"blocks": Blocks(BLOCK_M=48)}, "blocks.BLOCK_M=48: not a power of two from 16 to 256; "
         "write one of 16, 32, 64, 128, 256, a tuple of some, or leave it out"),
        ({"blocks": Blocks(BLOCK_N=(64, 512))}, "blocks.BLOCK_N=(64, 512): "
         "not a power of two from 16 to 256; "
         "write one of 16, 32, 64, 128, 256, a tuple of some, or leave it out"),
        ({"blocks": Blocks(num_warps=())}, "blocks.num_warps=(): "
         "not a power of two from 1 to 16; "
         "write one of 1, 2, 4, 8, 16, a tuple of some, or leave it out"),
        ({"blocks": Blocks(num_stages=6)}, "blocks.num_stages=6: not a number from 1 to 5; "
         "write one of 1, 2, 3, 4, 5, a tuple of some, or leave it out"),
        ({"blocks": 64}, "blocks=64: not Blocks; write blocks=Blocks(BLOCK_M=..., ...)"),
        ({"targets": ("sm_90", "sm_91")}, "targets='sm_91': unknown target; "
         "write a tuple of some of sm_80, sm_86, sm_89, sm_90, sm_100, gfx942"),
        ({"targets": "sm_90"}, "targets='sm_90': not a tuple of targets; "
         "write a tuple of some of sm_80, sm_86, sm_89, sm_90, sm_100, gfx942"),
        ({"targets": ()}, "targets=(): not a tuple of targets; "
         "write a tuple of some of sm_80, sm_86, sm_89, sm_90, sm_100, gfx942"),
        ({"targets": ("sm_90", "sm_90")}, "targets=('sm_90', 'sm_90'): a target is listed twice; "
         "list it once"),
    ],
)  # fmt: skip
def test_a_bad_field(fields, message):
    assert findings(**fields) == [IN_TINY + message]


@pytest.mark.parametrize(
    "name, problem",
    [
        ("causal-d64", "not an identifier that Python can import"),
        ("64", "not an identifier that Python can import"),
        ("", "not an identifier that Python can import"),
        ("naïve", "not an identifier that Python can import"),
        ("class", "a keyword of Python"),
        ("__init__", "a name that Python keeps for itself"),
    ],
)
def test_a_bad_name(name, problem):
    assert findings(name=name) == [
        f"specs/tiny.py: {name}: name={name!r}: {problem}; "
        "rename the spec file, or give the spec another name"
    ]


def test_a_mask_that_returns_no_condition():
    (message,) = findings(mask=lambda b, h, q_idx, kv_idx: q_idx - kv_idx)
    assert message == (
        IN_TINY + "mask=mask: mask returned the integer `q_idx - kv_idx`, not a condition; "
        "return a comparison, or several joined by & and |"
    )


def test_a_mask_that_raises():
    def broken(b, h, q_idx, kv_idx):
        return q_idx[0] >= kv_idx

    (message,) = findings(mask=broken)
    assert message.startswith(IN_TINY + "mask=broken: ")
    assert message.endswith(
        "TypeError: 'Expr' object is not subscriptable; "
        "a mask is a function (b, h, q_idx, kv_idx) of symbols"
    )


def test_everything_wrong_is_reported_at_once():
    variant = Variant("tiny", replace(GOOD, head_dim=7, dtype="int8", targets=("h100",)), None)
    error = ValidationError(validate(variant))
    assert [violation.field for violation in error.violations] == ["head_dim", "dtype", "targets"]
    assert len(str(error).splitlines()) == 3


def refusal(target, **blocks):
    """What is said of blocks of a causal head_dim=256 that no target has room for."""
    spec = AttentionSpec(head_dim=256, mask=causal(), blocks=Blocks(**blocks))
    plan = lower(spec, "tiny")
    kernel = with_key("portable")
    rejected = kernel.space(plan, target).rejected
    return str(unfit(Variant("tiny", spec, "specs/tiny.py"), plan, kernel, target, rejected))


def test_blocks_that_do_not_fit_with_the_largest_that_do():
    assert refusal("sm_90", BLOCK_M=128, BLOCK_N=128, num_stages=3) == (
        "specs/tiny.py: tiny: SRAM budget exceeded on sm_90: needs 458,808 B, has 232,448 B "
        "(BLOCK_M=128 BLOCK_N=128 num_stages=3: "
        "Q 65,536 + K 196,608 + V 196,608 + barriers 56). "
        "Largest BLOCK_N that fits: 32."
    )


def test_of_several_choices_the_one_nearest_to_fitting_is_reported():
    assert refusal("sm_90", BLOCK_M=(128, 256), BLOCK_N=(64, 128), num_stages=(4, 5)) == (
        "specs/tiny.py: tiny: SRAM budget exceeded on sm_90: needs 327,744 B, has 232,448 B "
        "(BLOCK_M=128 BLOCK_N=64 num_stages=4: "
        "Q 65,536 + K 131,072 + V 131,072 + barriers 64). "
        "Largest BLOCK_N that fits: 32."
    )


def test_where_no_block_n_helps_other_blocks_are_named():
    message = refusal("sm_86", BLOCK_M=256, BLOCK_N=64, num_stages=2)
    assert message.endswith(". Nearest blocks that fit: BLOCK_M=128 BLOCK_N=16 num_stages=2.")


def test_where_nothing_fits_the_target_has_to_go(monkeypatch):
    monkeypatch.setattr("flashgen.validate.TILE_SIDES", ())
    monkeypatch.setattr("flashgen.validate.largest_fitting", lambda *arguments: None)
    message = refusal("sm_86", BLOCK_M=256, BLOCK_N=64, num_stages=2)
    assert message.endswith(". No smaller blocks fit: leave sm_86 out of targets.")

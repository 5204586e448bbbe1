"""What `attention` refuses, in exactly these words: the argument, what came, what is accepted."""

from __future__ import annotations

import re

import pytest
import torch

from support.variants import shipped_module, shipped_specs

D, BF16 = 128, torch.bfloat16


def _zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = _zeros(2, 4, 6, D)
KEYS = _zeros(2, 2, 6, D)

REFUSED = [
    # of causal_d128, with one argument replaced
    ("q", [1, 2], TypeError, "q: got list; pass a torch.Tensor"),
    ("v", None, TypeError, "v: got NoneType; pass a torch.Tensor"),
    (
        "q",
        GOOD.half(),
        TypeError,
        "q: got torch.float16; causal_d128 was built for torch.bfloat16",
    ),
    (
        "k",
        KEYS.float(),
        TypeError,
        "k: got torch.float32; causal_d128 was built for torch.bfloat16",
    ),
    ("q", GOOD[0], ValueError, "q: got 3 dimensions; pass (batch, heads, seq, head_dim)"),
    ("k", KEYS[None], ValueError, "k: got 5 dimensions; pass (batch, heads, seq, head_dim)"),
    (
        "q",
        _zeros(2, 4, 6, 64),
        ValueError,
        "q: got head_dim 64; causal_d128 was built for 128",
    ),
    (
        "v",
        _zeros(2, 2, 6, 96),
        ValueError,
        "v: got head_dim 96; causal_d128 was built for 128",
    ),
    (
        "k",
        _zeros(2, 2, D, 6).mT,
        ValueError,
        "k: its last dimension has stride 6; make it contiguous",
    ),
    (
        "q",
        _zeros(1).expand(2, 4, 6, D),
        ValueError,
        "q: its last dimension has stride 0; make it contiguous",
    ),
    (
        "q",
        torch.empty_strided((2, 4, 6, D), (0, 0, 2**23, 1), dtype=BF16, device="meta"),
        ValueError,
        "q: its rows are 8388608 elements apart; pass under 2**23",
    ),
    (
        "k",
        _zeros(2, 2, 6, D, device="meta"),
        ValueError,
        "k: is on meta, q on cpu; pass one device",
    ),
    ("k", _zeros(3, 2, 6, D), ValueError, "k: got batch 3, q has 2; pass equal batches"),
    ("v", _zeros(1, 2, 6, D), ValueError, "v: got batch 1, q has 2; pass equal batches"),
    ("v", _zeros(2, 4, 6, D), ValueError, "v: got 4 heads, k has 2; pass as many as k"),
    ("v", _zeros(2, 2, 7, D), ValueError, "v: got kv_len 7, k has 6; pass equal lengths"),
    ("scale", "0.1", TypeError, "scale: got str; pass an int or a float"),
    ("scale", True, TypeError, "scale: got bool; pass an int or a float"),
    ("scale", 0, ValueError, "scale: got 0; pass a positive number of 32 bits, below 2**127"),
    ("scale", -0.5, ValueError, "scale: got -0.5; pass a positive number of 32 bits, below 2**127"),
    (
        "scale",
        float("nan"),
        ValueError,
        "scale: got nan; pass a positive number of 32 bits, below 2**127",
    ),
    (
        "scale",
        1e-40,
        ValueError,
        "scale: got 1e-40; pass a positive number of 32 bits, below 2**127",
    ),
    (
        "scale",
        1e39,
        ValueError,
        "scale: got 1e+39; pass a positive number of 32 bits, below 2**127",
    ),
    (
        "scale",
        3e38,
        ValueError,
        "scale: got 3e+38; pass a positive number of 32 bits, below 2**127",
    ),
    (
        "scale",
        float("inf"),
        ValueError,
        "scale: got inf; pass a positive number of 32 bits, below 2**127",
    ),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"), REFUSED, ids=[case[3] for case in REFUSED]
)
def test_refused(argument: str, value: object, error: type[Exception], message: str) -> None:
    arguments = {"q": GOOD, "k": KEYS, "v": KEYS, argument: value}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        shipped_module("causal_d128").attention(**arguments)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(4, 3), (2, 4), (4, 0)], ids=["no divisor", "more", "none"]
)
def test_head_counts_that_do_not_group(q_heads: int, kv_heads: int) -> None:
    keys = _zeros(2, kv_heads, 6, D)
    message = f"k: got {kv_heads} heads for {q_heads} of q; pass a divisor of q's"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        shipped_module("causal_d128").attention(_zeros(2, q_heads, 6, D), keys, keys)


@pytest.mark.parametrize("kv_len", [5, 7, 0])
def test_unequal_lengths_where_the_mask_does_not_define_them(kv_len: int) -> None:
    keys = _zeros(2, 2, kv_len, D)
    message = (
        f"k: got kv_len {kv_len} for q_len 6; causal() is for equal lengths only; rebuild the spec"
        " with align='top_left' or align='bottom_right'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        shipped_module("causal_d128").attention(GOOD, keys, keys)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "left: got -1; pass an int from 0 to 2**30"),
        (2**30 + 1, ValueError, "left: got 1073741825; pass an int from 0 to 2**30"),
        (1.0, TypeError, "left: got float; pass an int"),
        (True, TypeError, "left: got bool; pass an int"),
        (None, TypeError, "left: got NoneType; pass an int"),
        (torch.tensor(3), TypeError, "left: got Tensor; pass an int"),
    ],
)
def test_refused_parameters(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        shipped_module("window_d128").attention(GOOD, KEYS, KEYS, left=value)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'left'"):
        shipped_module("causal_d128").attention(GOOD, KEYS, KEYS, left=3)
    with pytest.raises(TypeError, match="positional argument"):
        shipped_module("causal_d128").attention(GOOD, KEYS, KEYS, 0.5)


def test_a_gpu_that_the_module_was_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor = "NVIDIA T4", 7, 5

    module = shipped_module("causal_d128")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    targets = ", ".join(shipped_specs()["causal_d128"].targets)
    message = (
        f"q: is on NVIDIA T4 (sm_75); causal_d128 was built for {targets}:"
        " rebuild it with --target sm_75"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module._config(torch.device("cuda", 7))

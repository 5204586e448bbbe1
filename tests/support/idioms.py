"""What is found in functions for FlexAttention: each runs on torch's tensors, and traces.

Each is given the tensors that it captures first, as `THEIRS` or as `OURS`.
"""

# ruff: noqa: E712, SIM300  (conditions beside True and False are the point here)

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import noop_mask

from flashgen import AttentionSpec, Constant, Tensor

LENGTH = 12
VALUES = {
    "flags": torch.tensor([[i % 3 == 0 for i in range(LENGTH)], [i > 4 for i in range(LENGTH)]]),
    "marked": torch.tensor([i % 4 < 2 for i in range(LENGTH)]),
    "ids": torch.arange(2 * LENGTH, dtype=torch.int32).reshape(2, LENGTH) % 5,
    "spans": torch.tensor([[2, 7], [0, 3]], dtype=torch.int32),
    "slopes": torch.tensor([0.5, -1.25, 3.0, 0.0], dtype=torch.float64),
    "packed": (torch.arange(2 * LENGTH, dtype=torch.int32).reshape(LENGTH, 2) * 73 - 500) % 256,
    "words": torch.arange(LENGTH, dtype=torch.int32) * 123456789 - 2**30,
    "chosen": torch.arange(12, dtype=torch.int32).reshape(2, 3, 2) * 5 % 4,
    "coords": torch.arange(6.0 * LENGTH, dtype=torch.float64).reshape(2, LENGTH, 3) % 7 / 8 - 0.3,
    "powers": torch.tensor([2**i for i in range(8)], dtype=torch.int32),
}
DECLARED = {
    "flags": Tensor("flags", ("batch", "kv_len"), "bool"),
    "marked": Tensor("marked", ("kv_len",), "bool"),
    "ids": Tensor("ids", ("batch", "kv_len"), "int32"),
    "spans": Tensor("spans", ("batch", 2), "int32"),
    "slopes": Tensor("slopes", ("num_q_heads",)),
    "packed": Tensor("packed", ("q_len", None), "int32"),
    "words": Tensor("words", ("kv_len",), "int32"),
    "chosen": Tensor("chosen", ("batch", None, 2), "int32"),
    "coords": Tensor("coords", ("batch", "kv_len", 3)),
    "powers": Constant("powers", [2**i for i in range(8)]),
}
#: What torch indexes, and what flashgen does.
THEIRS, OURS = SimpleNamespace(**VALUES), SimpleNamespace(**DECLARED)
MASKS: dict[str, Callable[..., Any]] = {
    "cast and times": lambda t, b, h, q, kv: kv <= (q > 3).to(torch.long) * 4,
    "product": lambda t, b, h, q, kv: (q >= kv) * (q - kv < 5),
    "sum above 0": lambda t, b, h, q, kv: (q >= kv) + (kv < 3) > 0,
    "sum of two is one": lambda t, b, h, q, kv: (q >= kv) + (kv < 3) == 1,
    "sum of three": lambda t, b, h, q, kv: (
        (q >= kv).int() + (kv < 8).int() + t.flags[b, kv].int() == 3
    ),
    "two of three": lambda t, b, h, q, kv: sum([q >= kv, kv < 3, t.marked[kv]]) >= 2,
    "products of numbers": lambda t, b, h, q, kv: (q >= kv).long() * (q - kv < 5).long() != 0,
    "bits of numbers": lambda t, b, h, q, kv: ((q >= kv).int() & 1) == 1,
    "times True": lambda t, b, h, q, kv: (q >= kv) * True,
    "plus 1": lambda t, b, h, q, kv: (q >= kv) + 1 == 2,
    "is 1": lambda t, b, h, q, kv: (t.flags[b, kv] == 1) & (q >= kv),
    "is not True": lambda t, b, h, q, kv: t.flags[b, kv] != True,
    "is False": lambda t, b, h, q, kv: False == (q >= kv),
    "is never 2": lambda t, b, h, q, kv: (q >= kv) == 2,
    "below": lambda t, b, h, q, kv: (q >= kv) < t.flags[b, kv],
    "at most": lambda t, b, h, q, kv: (q >= kv) <= t.flags[b, kv],
    "half": lambda t, b, h, q, kv: t.flags[b, kv].float() > 0.5,
    "divided by a number of the head": lambda t, b, h, q, kv: q // (2 * h + 1) == kv // (2 * h + 1),
    "divided by an element": lambda t, b, h, q, kv: (
        (q - kv) % torch.clamp(t.spans[b, h % 2], min=1) == 0
    ),
    "same flags": lambda t, b, h, q, kv: t.marked[q] == t.marked[kv],
    "other flags": lambda t, b, h, q, kv: t.marked[q] != t.marked[kv],
    "beside a number": lambda t, b, h, q, kv: (q % 2 == 0) == kv % 2,
    "opposite": lambda t, b, h, q, kv: 1 - t.flags[b, kv].float() == 0,
    "minimum": lambda t, b, h, q, kv: torch.minimum(q >= kv, t.marked[kv]),
    "bool of bool": lambda t, b, h, q, kv: (q >= kv).bool() & (q > kv).to(torch.bool),
    "logical on numbers": lambda t, b, h, q, kv: torch.logical_and(q % 2, kv % 3),
    "logical not": lambda t, b, h, q, kv: torch.logical_not(kv % 3),
    "noop": lambda t, b, h, q, kv: b.new_ones(size=(), dtype=torch.bool, device=b.device),
    "noop of torch": lambda t, b, h, q, kv: noop_mask(b, h, q, kv),
    "transformers": lambda t, b, h, q, kv: (
        q.new_ones((), dtype=torch.bool) & (q >= kv).to(q.device) & (kv > q - 3).to("cpu")
    ),
    "likes": lambda t, b, h, q, kv: (
        (torch.zeros_like(q) <= kv) & torch.ones_like(q > kv) & (torch.full_like(q, 2.5) <= kv)
    ),
    "no copies": lambda t, b, h, q, kv: (q.detach() >= kv.contiguous().clone()).cpu(),
    "to another": lambda t, b, h, q, kv: (q / 2).to(q) >= kv.to(q.device, torch.int32),
    "as another": lambda t, b, h, q, kv: (q / 2).type_as(kv) >= kv.type(torch.int64),
    "scalars": lambda t, b, h, q, kv: (torch.tensor(3) > kv) | torch.tensor(False) & (q > kv),
    "scalar first": lambda t, b, h, q, kv: torch.tensor(2) // 1 <= torch.tensor(4) - kv,
    "maximum": lambda t, b, h, q, kv: torch.max(q - 4, torch.tensor(0)) <= kv,
    "sign": lambda t, b, h, q, kv: torch.sign(q - kv) >= 0,
    "floor": lambda t, b, h, q, kv: torch.floor((q - 5) / 4) == torch.floor((kv - 5) / 4),
    "ceil": lambda t, b, h, q, kv: torch.ceil((q - 5) / 4) <= torch.ceil(kv / 3),
    "floats that are whole": lambda t, b, h, q, kv: (
        (torch.floor(q / 4.0) == kv // 4.0) & (torch.ceil(kv * 0.25) > q % (6 / 2))
    ),
    "masked fill": lambda t, b, h, q, kv: (q >= kv).masked_fill(kv < 2, True),
    "window of a float": lambda t, b, h, q, kv: (q - kv < 8 / 2) & (q >= kv),
    "fractions": lambda t, b, h, q, kv: (q - kv < 2.5) & (q - kv > -1.5) & (-2.5 <= q - kv),
    "numpy": lambda t, b, h, q, kv: abs(q - kv) <= np.float64(3.7),
    "never": lambda t, b, h, q, kv: (q - kv == 2.5) | (q != kv + 0.5) & (q > kv),
    "factors": lambda t, b, h, q, kv: 2.0 * kv - 1.0 <= 0.5 * q + 0.25,
    "infinite": lambda t, b, h, q, kv: q - kv < math.inf,
    "turned": lambda t, b, h, q, kv: 2.5 > q - kv,
    "in two steps": lambda t, b, h, q, kv: t.ids[b][q] == t.ids[b, :][kv],
    "unpacked": lambda t, b, h, q, kv: (t.spans[b][0] <= kv) & (kv < list(t.spans[b])[1]),
    "packed bits": lambda t, b, h, q, kv: (t.packed[q, kv // 8] >> (kv % 8)) & 1,
    "bits in words": lambda t, b, h, q, kv: (~(t.words[q] >> kv) & 1) | (kv % 2),
    "bit of the head": lambda t, b, h, q, kv: (t.packed[q, kv // 8] & (1 << (h + kv % 4))) != 0,
    "packed bits by a power": lambda t, b, h, q, kv: (
        (t.packed[q, kv // 8] // t.powers[kv % 8]) % 2 == 1
    ),
    "shifted elements": lambda t, b, h, q, kv: (
        (t.ids[b, kv] << (q % 5)) ^ (t.words[kv] >> 20) | 6 > t.ids[b, q]
    ),
    "divided by a power": lambda t, b, h, q, kv: q // (1 << h) == kv // (1 << h),
    "remainders of floats": lambda t, b, h, q, kv: (kv % 2.5 < 1) | (q // 2.5 == 3.0),
    "chosen blocks": lambda t, b, h, q, kv: (t.chosen[b, q // 4] == kv // 4).any(),
    "all but chosen blocks": lambda t, b, h, q, kv: (kv // 4 != t.chosen[b, q // 4]).all(dim=-1),
    "one of": lambda t, b, h, q, kv: torch.isin(kv // 4, t.chosen[b, q // 4]) & (q >= kv),
    "aten": lambda t, b, h, q, kv: (
        torch.ops.aten.ge.Tensor(q, kv) & torch.ops.aten.lt.Scalar(kv, 9)
    ),
    "shapes": lambda t, b, h, q, kv: h.new_zeros(h.shape) + kv.view(-1) <= q + q.ndim // 9,
}
SCORES: dict[str, Callable[..., Any]] = {
    "penalty": lambda t, s, b, h, q, kv: s - 10000.0 * (q < kv),
    "opposite": lambda t, s, b, h, q, kv: s + (1.0 - t.flags[b, kv].float()) * -1e30,
    "gate": lambda t, s, b, h, q, kv: s * (s > 0) + t.slopes[h] * (q >= kv).double(),
    "counts": lambda t, s, b, h, q, kv: s + ((q >= kv).int() + t.marked[kv].int()) / 4,
    "least": lambda t, s, b, h, q, kv: torch.where(q >= kv, s, torch.finfo(torch.float32).min),
    "hidden": lambda t, s, b, h, q, kv: torch.where(q >= kv, s, torch.tensor(-math.inf)),
    "filled": lambda t, s, b, h, q, kv: s.masked_fill(q < kv, -math.inf),
    "silu": lambda t, s, b, h, q, kv: F.silu(s),
    "softplus": lambda t, s, b, h, q, kv: F.softplus(s) + F.softplus(s, beta=2, threshold=3),
    "logsigmoid": lambda t, s, b, h, q, kv: F.logsigmoid(s),
    "logaddexp": lambda t, s, b, h, q, kv: torch.logaddexp(s, 10 * t.slopes[h]),
    "sign": lambda t, s, b, h, q, kv: s + torch.sign(s) + 2 * torch.sign(q - kv),
    "square": lambda t, s, b, h, q, kv: torch.square(s) + torch.log1p(s.abs()),
    "alpha": lambda t, s, b, h, q, kv: torch.sub(torch.add(s, q - kv, alpha=0.5), h, alpha=2),
    "turned": lambda t, s, b, h, q, kv: torch.rsub(s, 3),
    "likes": lambda t, s, b, h, q, kv: s + torch.full_like(s, 2.5) + s.new_full((), 1),
    "extremes": lambda t, s, b, h, q, kv: torch.max(s, t.slopes[h]) + torch.min(q, kv),
    "scalars": lambda t, s, b, h, q, kv: torch.tensor(3.5) * s + torch.tensor(2.0) ** (q - kv),
    "floor": lambda t, s, b, h, q, kv: s - 0.25 * torch.floor((q - kv) / 4),
    "gelu": lambda t, s, b, h, q, kv: F.gelu(s) + 0.5 * F.gelu(s - 1, approximate="tanh"),
    "clamped": lambda t, s, b, h, q, kv: (
        F.relu6(s) + F.hardswish(s) / 2 + F.hardsigmoid(s - 1) + F.hardtanh(s, -2.5, 1.5)
    ),
    "bent": lambda t, s, b, h, q, kv: (
        F.mish(s) + F.elu(s, 0.75) + F.leaky_relu(s, 0.25) + F.softsign(s)
    ),
    "erf": lambda t, s, b, h, q, kv: s + 3 * torch.erf(s / 2),
    "atan": lambda t, s, b, h, q, kv: s + 3 * torch.atan(s) + torch.atan(t.slopes[h] * (q - kv)),
    "hyperbolic": lambda t, s, b, h, q, kv: torch.cosh(s / 16) + torch.sinh(s / 8) + s,
    "sinc": lambda t, s, b, h, q, kv: s + 3 * torch.sinc(s / 4) + torch.tan(s / 40),
    "steps": lambda t, s, b, h, q, kv: (
        s + torch.heaviside((q - kv).type_as(s), s.new_tensor(0.5)) + torch.nan_to_num(t.slopes[h])
    ),
    "remainders": lambda t, s, b, h, q, kv: s % 7.25 - (2 * s) % -2.625 + torch.fmod(s, 3.5),
    "rounded": lambda t, s, b, h, q, kv: torch.floor(s / 3.1) - torch.ceil(s / 2.3) + torch.frac(s),
    "between": lambda t, s, b, h, q, kv: (
        torch.lerp(s, t.slopes[h], 0.25) + torch.expm1(s / 40) + torch.log10(s.abs() + 1)
    ),
    "dot": lambda t, s, b, h, q, kv: s + torch.dot(t.coords[b, q], t.coords[b, kv]),
    "products": lambda t, s, b, h, q, kv: (
        s - (t.coords[b, q] - t.coords[b, kv]).abs().sum() + t.coords[b, q] @ t.coords[b, kv]
    ),
    "aten": lambda t, s, b, h, q, kv: (
        torch.ops.aten.gelu.default(s) + torch.ops.aten.mul.Tensor(s, h)
    ),
    "viewed": lambda t, s, b, h, q, kv: s * t.slopes[h].view(-1, 1, 1) + s.expand_as(s),
}

#: What Gluon is to have of its own, together.
PACKED = Tensor("packed", ("q_len", None), "int32")


def _visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    bits = PACKED[q_idx, kv_idx // 8]
    return ((bits >> (kv_idx % 8)) & 1 == 1) | (bits & (1 << h) != 0) & (q_idx >= kv_idx)


def _bent(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    turned = torch.atan(score) + torch.atan((q_idx - kv_idx) / 9)
    return F.gelu(score) + turned + 0.25 * torch.floor(score * 0.013 + 7.5) - h // 1.5


BENT_BITS = AttentionSpec(64, mask=_visible, score=_bent)

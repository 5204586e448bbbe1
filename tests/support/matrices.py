"""Feature maps that begin with a product: variants, and calls held to products in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, Tensor, causal, document, exp, full, linear
from support.linear_packed import offsets
from support.oracle import error_and_bound
from support.recurrence import quadratic, recurrence, room_on

FORMS = ("dense", "varlen")
M = Tensor("M", (24, 16))
OF_Q, OF_K = Tensor("of_q", ("num_q_heads", 24, 32)), Tensor("of_k", ("num_kv_heads", 24, 32))
SHARED = Tensor("shared", ("num_kv_heads", 24, 16))
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def hedgehog(x: Any) -> Any:
    """Features of an element of the product."""
    return [exp(x), exp(-x)]


def squares(x: Any) -> Any:
    """A feature that may be read of any product."""
    return x * x + 0.5 * x


@dataclass(frozen=True)
class Case:
    """A variant, and a call of it.

    Attributes:
        spec: what is under test.
        features: its features of a product's element.
        lens: of sequences, all of one call: packed ones where there are several.
        room: of packed sequences, keys that a call's kv_lens leave out.
        ids: whether positions have ids, some of padding.
    """

    spec: AttentionSpec
    features: Any
    lens: tuple[int, ...] = (40,)
    room: int = 0
    ids: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The matrices of q and of k."""
        return self.spec.normaliser.feature_map.matrices  # type: ignore[attr-defined,no-any-return]

    @property
    def inner(self) -> AttentionSpec:
        """Linear attention of products, as they are."""
        normaliser = self.spec.normaliser
        made = linear(self.features, normalise=normaliser.normalise)  # type: ignore[attr-defined]
        columns = int(self.tensors[0].names[-1])
        return AttentionSpec((columns, self.spec.v_head_dim), "float32", self.spec.mask, None, made)


def _spec(feature_map: Any, mask: Any, normalise: bool = True, **fields: Any) -> AttentionSpec:
    made = linear(feature_map, normalise=normalise)
    return AttentionSpec((24, 8 * 2), "float32", mask=mask, normaliser=made, **fields)


CASES = {
    "shared": Case(_spec(lambda x: hedgehog(x @ M), causal()), hedgehog),
    "pair": Case(
        _spec((lambda x: squares(x @ OF_Q), lambda x: squares(x @ OF_K)), causal(), False), squares
    ),
    "heads": Case(_spec(lambda x: hedgehog(x @ SHARED), full()), hedgehog),
    "documents": Case(_spec(lambda x: hedgehog(x @ M), document() & causal()), hedgehog, ids=True),
    "varlen": Case(
        _spec(lambda x: squares(x @ SHARED), causal(), False, forms=FORMS), squares, (20, 0, 9)
    ),
    "room": Case(_spec(lambda x: hedgehog(x @ M), full(), forms=FORMS), hedgehog, (20, 3, 9), 4),
}


def drawn(case: Case) -> dict[str, torch.Tensor]:
    """q, k and v, each sequence after the other with its room, and the matrices of a call."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(case.lens) + len(case.lens) * case.room
    shapes: dict[str, tuple[int, ...]] = {
        "q": (1, 4, sum(case.lens), 24), "k": (1, 2, rows, 24), "v": (1, 2, rows, 16)
    }  # fmt: skip
    sizes = {"num_q_heads": 4, "num_kv_heads": 2}
    for tensor in case.tensors:
        shapes[tensor.name] = tuple(sizes.get(x) or int(x) for x in tensor.names)
    found = {x: torch.randn(y, generator=generator) for x, y in shapes.items()}
    return {x: y if x in "qkv" else 0.2 * y for x, y in found.items()}


def _ids(case: Case) -> torch.Tensor:
    ids = torch.arange(sum(case.lens), dtype=torch.int32) // 11
    ids[15:18], ids[-3:] = -1, -1
    return ids[None]


def _by_recurrence(run: Any, case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The output of products by the recurrence, or by all weights."""
    of_q, of_k = (given[x.name] for x in (case.tensors[0], case.tensors[-1]))
    if of_q.dim() == 3 and case.tensors[0].names[0] == "num_kv_heads":
        of_q = torch.cat([x.expand(2, -1, -1) for x in of_q[:, None]])
    q, k = given["q"] @ of_q, given["k"] @ of_k
    outs, at, at_k = [], 0, 0
    for n in case.lens:
        part = (q[:, :, at : at + n], *(x[:, :, at_k : at_k + n] for x in (k, given["v"])))
        at, at_k = at + n, at_k + n + case.room
        options = {"ids": _ids(case)} if case.ids else {}
        outs += [run(case.inner, *part, **options)[0]] if n else []
    return torch.cat(outs, 2)


def check_matrices(module: ModuleType, case: Case, device: str = "cpu") -> None:
    """Fails unless output and gradients are as near to float64 as torch's, those of matrices too.

    The module runs on the device, and what is right on the CPU. What belongs to no sequence is NaN.
    """
    tensors = drawn(case)
    hidden = _hidden(case, tensors)
    right, given = (
        tensors | {x: tensors[x].masked_fill(rows, value) for x, rows in hidden.items()}
        for value in (0.0, torch.nan)
    )
    grad = torch.randn(1, 4, sum(case.lens), 16, generator=torch.Generator().manual_seed(1))

    def with_gradients(run: Any, given: Any, dtype: torch.dtype) -> Any:
        leaves = {x: y.detach().to(dtype).requires_grad_() for x, y in given.items()}
        out = run(leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))
        return dict(zip(("out", *given), (out.detach(), *grads), strict=True))

    mine = with_gradients(lambda x: _attention(module, case, x, device), given, torch.float32)
    exact, rough = (
        with_gradients(lambda x, run=run: _by_recurrence(run, case, x), right, dtype)
        for run, dtype in ((recurrence, torch.float64), (quadratic, torch.float32))
    )
    for name, x in mine.items():
        size = 4.0 if name in exact and name not in ("out", "v") else 0.0
        error, allowed = error_and_bound(x, exact[name], rough[name], size)
        allowed *= room_on(device)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _hidden(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows that may hold anything."""
    if case.ids:
        return dict.fromkeys("qkv", (_ids(case) == -1)[:, None, :, None])
    if not case.room:
        return {}
    keys = torch.ones(tensors["k"].shape[2], dtype=torch.bool)
    at = 0
    for n in case.lens:
        keys[at : at + n] = False
        at += n + case.room
    return dict.fromkeys("kv", keys[:, None])


def _attention(
    module: ModuleType, case: Case, given: dict[str, torch.Tensor], device: str
) -> torch.Tensor:
    given = {x: y.to(device) for x, y in given.items()}
    matrices = {x: y for x, y in given.items() if x not in "qkv"}
    q, k, v = (given[x] for x in "qkv")
    scale = int(case.tensors[0].names[-1]) ** -0.5
    if len(case.lens) == 1:
        ids = {"document_ids": _ids(case).to(device)} if case.ids else {}
        out: torch.Tensor = module.attention(q, k, v, **matrices, **ids, scale=scale)
        return out.cpu()
    # Two tokens behind the last sequence are NaN.
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    q, k, v = (torch.cat((x, x.new_full((2, *x.shape[1:]), torch.nan))) for x in (q, k, v))
    begins = offsets(case.lens).to(device)
    cu, options = begins, {}
    if case.room:
        cu = offsets([n + case.room for n in case.lens]).to(device)
        options = {"kv_lens": torch.tensor(case.lens, dtype=torch.int32, device=device)}
    longest = max(case.lens) + case.room
    out = module.varlen_attention(
        q, k, v, begins, cu, longest, longest, **matrices, **options, scale=scale
    )
    return out[: sum(case.lens)].transpose(0, 1)[None].cpu()

"""FLOPs of both passes, as torch's counter has them: of the pairs that the mask shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flashgen import (
    AttentionSpec,
    Constant,
    Int,
    Tensor,
    causal,
    chunked,
    dilated,
    document,
    full,
    global_tokens,
    prefix_lm,
    sliding_window,
    strided,
)
from support.cases import Case
from support.contract import native_inputs
from support.variants import rendered_module, shipped_module, shipped_specs

_LEFT = Int("left", 3, min=-1)


def _by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx + 2 * h


def _by_entry(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= q_idx + b) & (kv_idx < q_idx + b + 3 - h)


#: Whose bounds say all that there is to be said of a query's keys.
EXACT = {
    "full": full(),
    "causal": causal(align="top_left"),
    "bottom right": causal(align="bottom_right"),
    "window": sliding_window(_LEFT, 1, align="bottom_right"),
    "chunks": chunked(5, align="top_left") & causal(align="top_left"),
    "prefix": prefix_lm(Int("prefix", 4), align="top_left"),
    "runs that overlap": global_tokens(3, align="top_left")
    | sliding_window(4, 0, align="top_left"),
    "apart": sliding_window(_LEFT, 0, align="top_left") | (lambda b, h, q, k: k >= 9),
    "heads": _by_head,
    "heads and entries": _by_entry,
}

#: Of which the bounds let too many be seen; and what counts as visible.
LOOSE = {
    "documents": (
        document(Tensor("ids", ("batch", "kv_len"), "int32")) & causal(),
        causal(align="top_left"),
    ),
    "remainders": (dilated(3, align="top_left"), full()),
    "remainders of some heads": (
        strided(4, heads="alternating", align="top_left"),
        lambda b, h, q, k: (k <= q) & ((h % 2 == 1) | (k >= q - 4)),
    ),
    "a table": (
        lambda b, h, q, k: (k <= q) & (k < Constant("ends", [2, 3, 4, 5])[h]),
        causal(align="top_left"),
    ),
}


def _module(mask: Any, head_dim: Any = 16) -> Any:
    spec = AttentionSpec(head_dim, "float32", mask=mask)
    return rendered_module(spec, name="flops"), spec


def _counts(module: Any, tensors: Any, **params: Any) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with FlopCounterMode(display=False) as counter:
        module.attention(*leaves, **params).sum().backward()
    found = counter.get_flop_counts()["Global"]
    operators = "op", "op_backward", "op_tiles"
    known = {getattr(module, name).overloadpacket for name in operators if hasattr(module, name)}
    assert set(found) <= known
    return found[module.op.overloadpacket], found[module.op_backward.overloadpacket]


def _seen(module: Any, tensors: Any, **params: Any) -> int:
    """Of equal scores the log-sum-exp says how many there are."""
    q, k, v = tensors
    _, lse = module.reference(torch.zeros_like(q), k, v, return_lse=True, **params)
    return int(lse.double().exp().round().sum())


@pytest.mark.parametrize("lengths", [(12, 12), (7, 19), (19, 7), (1, 12)], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_pairs_that_are_seen(name: str, lengths: tuple[int, int]) -> None:
    module, spec = _module(EXACT[name])
    case = Case(*lengths, batch=2, q_heads=4, kv_heads=2)
    tensors, given = native_inputs(case, spec), case.arguments(spec)
    pairs = _seen(module, tensors, **given)
    meta = [x.to("meta") for x in tensors]
    assert _counts(module, meta, **given) == (4 * 16 * pairs, 10 * 16 * pairs)
    assert "that the mask lets see" in module._visible_pairs.__doc__


@pytest.mark.parametrize("left", [-1, 0, 5, 100])
def test_the_call_s_numbers_count(left: int) -> None:
    module, spec = _module(EXACT["window"])
    tensors = native_inputs(Case(12, 17, q_heads=2, kv_heads=1), spec)
    pairs = _seen(module, tensors, left=left)
    assert _counts(module, [x.to("meta") for x in tensors], left=left)[0] == 4 * 16 * pairs


@pytest.mark.parametrize("name", LOOSE)
def test_what_bounds_do_not_say_counts_as_seen(name: str) -> None:
    mask, visible = LOOSE[name]
    (module, spec), (other, _) = _module(mask), _module(visible)
    case = Case(12, 12, batch=2, q_heads=4, kv_heads=2)
    tensors, given = native_inputs(case, spec), case.arguments(spec)
    meta = [x.to("meta") for x in tensors]
    given = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    assert _counts(module, meta, **given)[0] == 4 * 16 * _seen(other, tensors)
    assert "Too many" in module._visible_pairs.__doc__


def test_each_product_is_as_wide_as_its_heads() -> None:
    module, _ = _module(full(), (32, 16))
    q, k, v = (torch.empty(1, 2, 8, d, device="meta") for d in (32, 32, 16))
    assert _counts(module, (q, k, v)) == (2 * (32 + 16) * 128, 2 * (3 * 32 + 2 * 16) * 128)


@pytest.mark.filterwarnings("ignore:.*eager reference")
def test_tensors_of_the_cpu_and_fake_ones_count_too() -> None:
    """Of which gradients are the reference's, which computes every pair."""
    module, spec = _module(causal())
    tensors = native_inputs(Case(8, 8, q_heads=2, kv_heads=1), spec)
    with FlopCounterMode(display=False) as counter:
        module.attention(*tensors)
    assert counter.get_total_flops() == 4 * 16 * 2 * 36
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        module.attention(*map(mode.from_tensor, tensors))
    assert counter.get_total_flops() == 4 * 16 * 2 * 36


def test_long_sequences_take_no_time() -> None:
    module, _ = _module(causal(align="top_left"))
    q, k = (torch.empty(1, 8, n, 16, device="meta") for n in (2**17, 2**17))
    assert _counts(module, (q, k, k))[0] == 4 * 16 * 8 * (2**17 * (2**17 + 1) // 2)
    assert module._visible_pairs.cache_info().hits == 1  # the backward pass asks again


@pytest.mark.filterwarnings("ignore:.*eager reference")
def test_a_length_that_is_not_known_yet_counts_every_pair() -> None:
    module, spec = _module(causal())
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.target == module.op]
        q, k, v, scale = (
            x.meta["example_value"] if isinstance(x, torch.fx.Node) else x for x in nodes[0].args
        )
        seen.append((module._flops(q.shape, k.shape, v.shape, scale, out_shape=None), q.shape[2]))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(module.attention, backend=backend, dynamic=True, fullgraph=True)
    compiled(*native_inputs(Case(8, 8, q_heads=2, kv_heads=1), spec))
    (flops, length), *_ = seen
    assert isinstance(length, torch.SymInt) and isinstance(flops, torch.SymInt)


@pytest.mark.parametrize("name", ["sinks_softmax_d64", "dropout_causal_d64", "documents_d128"])
def test_gradients_of_meta_tensors_have_their_shapes(name: str) -> None:
    """Of learned tensors too, as the operator gives them."""
    module, spec = shipped_module(name), shipped_specs()[name]
    case = Case(12, 12, batch=2, q_heads=4, kv_heads=2)
    leaves = [x.to("meta").requires_grad_() for x in native_inputs(case, spec)]
    given = case.arguments(spec)
    for key, x in given.items():
        if isinstance(x, torch.Tensor):
            given[key] = x.to("meta")
            if x.is_floating_point():
                leaves.append(given[key].requires_grad_())
    out, lse = module.attention(*leaves[:3], return_lse=True, **given)
    (out.float().sum() + lse.sum()).backward()
    assert [(x.grad.shape, x.grad.dtype) for x in leaves] == [(x.shape, x.dtype) for x in leaves]

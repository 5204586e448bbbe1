"""Linear attention by its definition, a recurrence over keys, and calls to try kernels with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec
from flashgen.normalisers import Linear
from flashgen.plan.pairs import LINEAR_MASKS
from flashgen.plan.runs import Runs, runs_of
from flashgen.symbolic import trace
from support.oracle import error_and_bound

Tensors = tuple[torch.Tensor, ...]


def _standardised(x: torch.Tensor) -> torch.Tensor:
    deviation = (x.var(-1, unbiased=False, keepdim=True) + 0.1).sqrt()
    return torch.exp((x - x.mean(-1, True)) / deviation)


#: The feature maps that ship, and those of `vector_maps` and `matrices`, as torch has them.
MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity()": lambda x: x,
    "relu()": torch.relu,
    "elu_plus_one()": lambda x: torch.nn.functional.elu(x) + 1.0,
    "softmax_features()": lambda x: torch.softmax(x, -1),
    "both_signs": lambda x: torch.cat((x.relu(), (-x).relu()), -1),
    "hedgehog": lambda x: torch.cat((torch.exp(x), torch.exp(-x)), -1),
    "standardised": _standardised,
    "unit_length": lambda x: x / x.norm(dim=-1, keepdim=True),
}


@dataclass(frozen=True)
class LinearCall:
    """One call of a variant of linear attention.

    Attributes:
        strided: whether q, k and v are views into tensors with the heads inside of the rows.
        tma: whether tiles are copied by TMA.
        states: whether it begins with a state and returns the last one.
        steep: whether some decays of tokens are 0 or nearly 0, others 1.
        ids: which ids positions have: ``"rising"`` or ``"falling"`` runs, ``"returning"`` ids in
            every other sequence, or those and ``"padding"`` between, or padding behind most at
            ``"ends"``; ``""`` for masks without.
        run_length: the argument of masks that cut sequences into runs of it.
        nan: whether rows of padding hold NaN, those of the output's gradient, too.
    """

    q_len: int
    kv_len: int
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    strided: bool = False
    tma: bool = True
    states: bool = False
    steep: bool = False
    ids: str = ""
    run_length: int | None = None
    nan: bool = False


def is_causal(spec: AttentionSpec) -> bool:
    """Whether a query sees the keys up to its own position, else all."""
    return runs_in(spec) is not None or bool(trace(spec.mask).expr == LINEAR_MASKS[0])


def runs_in(spec: AttentionSpec) -> Runs | None:
    """The runs that its mask cuts sequences into."""
    return runs_of(trace(spec.mask).expr)


#: Positions of runs: in one chunk and over several, also of one position.
SIZES = (5, 3, 6, 2, 20, 7, 1, 1, 33)


def drawn_ids(spec: AttentionSpec, call: LinearCall) -> torch.Tensor | None:
    """The ids of positions, (batch, kv_len); -1 is of padding where the spec says so."""
    runs, rows = runs_in(spec), []
    if runs is None:
        return None
    for n in range(call.batch if runs.by_batch or not runs.of_ids else 1):
        sizes = torch.tensor(SIZES[n % 3 :] + SIZES).repeat(1 + call.kv_len // sum(SIZES))
        row = torch.arange(len(sizes)).repeat_interleave(sizes)[: call.kv_len]
        if not runs.of_ids:
            length = call.run_length or int(runs.length)
            row = torch.arange(call.kv_len) // length
        elif call.ids != "rising":
            row = 50 - row
        if call.ids in ("returning", "padding") and n % 2:
            row = row % 3
        if call.ids == "padding":
            row[:2], row[30:33], row[-3:] = -1, -1, -1
        if call.ids == "ends" and n % 2:
            row[-20:-10] = -1
        elif call.ids == "ends":
            row[-30:] = -1
        rows.append(row)
    return torch.stack(rows).expand(call.batch, -1)


def in_padding(spec: AttentionSpec, call: LinearCall, x: torch.Tensor, value: float) -> Any:
    """A tensor of rows with a value in those of padding, where the call has NaN there."""
    if not call.nan:
        return x
    ids = drawn_ids(spec, call)
    assert ids is not None and runs_in(spec).padded
    return x.masked_fill((ids == -1)[:, None, :, None], value)


def marks_of(ids: list[int], *, padded: bool) -> tuple[list[int], list[int]]:
    """(1 where a later run starts, 2 of padding; whether ids return, and both ends' ids)."""
    marks, order = [], []
    for own in ids:
        if padded and own == -1:
            marks.append(2)
            continue
        starts = not order or order[-1] != own
        marks.append(int(bool(order) and starts))
        order += [own] * starts
    ends = [order[0], order[-1]] if order else [-1, -1]
    return marks, [int(len(set(order)) < len(order)), *ends]


def shown_of(ids: list[int]) -> int:
    """The first position of padding; where there is none, the largest integer."""
    return ids.index(-1) if -1 in ids else 2**31 - 1


def features_of(spec: AttentionSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The feature map, in torch."""
    normaliser = spec.normaliser
    assert isinstance(normaliser, Linear)
    feature_map = normaliser.feature_map
    return MAPS.get(feature_map.label, feature_map.function)


def recurrence(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    decay: Any = None,
    kv: Any = None,
    z: Any = None,
    ids: Any = None,
) -> Tensors:
    """(out, sums of weights without the scale, last kv, last z) key by key: the definition.

    kv is the sum of features times values, and z that of features, before the first key; a decay
    multiplies both before its key is added. Each id has a state of its own; all of them decay. The
    given one is of the first id, the last one of the last; padding, -1, has none.
    """
    group = q.shape[1] // k.shape[1]
    phi = features_of(spec)
    phi_q, phi_k = phi(q).unflatten(1, (k.shape[1], group)), phi(k)
    decay = decays_of(spec, k) if decay is None else decay
    kv = phi_k.new_zeros(*k.shape[:2], phi_k.shape[3], v.shape[3]) if kv is None else kv
    z = phi_k.new_zeros(*k.shape[:2], phi_k.shape[3]) if z is None else z
    causal = is_causal(spec)
    if ids is not None:
        return _by_ids(spec, phi_q, phi_k, v, torch.exp(decay), kv, z, ids)
    accs, sums = [], []
    for n in range(k.shape[2]):
        factor = torch.exp(decay[:, :, n])
        factor = factor if decay.dim() == 4 else factor[..., None]
        kv = factor[..., None] * kv + phi_k[:, :, n, :, None] * v[:, :, n, None, :]
        z = factor * z + phi_k[:, :, n]
        if causal:
            accs.append(phi_q[:, :, :, n] @ kv)
            sums.append((phi_q[:, :, :, n] @ z[..., None]).squeeze(-1))
    acc = torch.stack(accs, 3) if causal else phi_q @ kv[:, :, None]
    of_weights = torch.stack(sums, 3) if causal else (phi_q @ z[:, :, None, :, None]).squeeze(-1)
    acc, of_weights = acc.flatten(1, 2), of_weights.flatten(1, 2)
    return _finished(spec, acc, of_weights), of_weights, kv, z


def _by_ids(
    spec: AttentionSpec, phi_q: Any, phi_k: Any, v: Any, factor: Any, kv: Any, z: Any, ids: Any
) -> Tensors:
    """The recurrence with a state for each id, sequence by sequence."""
    padded, found = runs_in(spec).padded, []
    for b, row in enumerate(ids.tolist()):
        there = [x for x in row if not (padded and x == -1)] or [None]
        states = {there[0]: (kv[b], z[b])}
        accs, sums = [], []
        for n, own in enumerate(row):
            states = {
                x: (factor[b, :, n, None, None] * s, factor[b, :, n, None] * t)
                for x, (s, t) in states.items()
            }
            of_kv, of_z = states.get(own, (torch.zeros_like(kv[b]), torch.zeros_like(z[b])))
            if padded and own == -1:
                of_kv, of_z = 0.0 * of_kv, 0.0 * of_z
            else:
                of_kv = of_kv + phi_k[b, :, n, :, None] * v[b, :, n, None, :]
                of_z = of_z + phi_k[b, :, n]
                states[own] = (of_kv, of_z)
            accs.append(phi_q[b, :, :, n] @ of_kv)
            sums.append((phi_q[b, :, :, n] @ of_z[..., None]).squeeze(-1))
        found.append((torch.stack(accs, 2), torch.stack(sums, 2), *states[there[-1]]))
    acc, of_weights, kv, z = map(torch.stack, zip(*found, strict=True))
    acc, of_weights = acc.flatten(1, 2), of_weights.flatten(1, 2)
    return _finished(spec, acc, of_weights), of_weights, kv, z


def quadratic(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    decay: Any = None,
    kv: Any = None,
    z: Any = None,
    ids: Any = None,
) -> Tensors:
    """The same by all weights, with features and weights in the inputs' dtype, in float32 sums."""
    dtype = q.dtype
    group = q.shape[1] // k.shape[1]
    phi = features_of(spec)
    phi_q = phi(q.float()).to(dtype).float().unflatten(1, (k.shape[1], group))
    phi_k, v = phi(k.float()).to(dtype).float()[:, :, None], v.float()[:, :, None]
    decay = decays_of(spec, k) if decay is None else decay
    decay = decay if decay.dim() == 4 else decay[..., None]  # of each feature, or of all
    log = decay.double().clamp(min=-500.0).cumsum(2)[:, :, None]
    between = log[..., :, None, :] - log[..., None, :, :]
    from_start, to_end = torch.exp(log).float(), torch.exp(log[..., -1:, :] - log).float()
    whole, seen = from_start[..., -1, :], None
    if ids is not None:
        ids = ids[:, None, None]
        shown = ids != -1 if runs_in(spec).padded else torch.ones_like(ids, dtype=torch.bool)
        seen = (ids[..., :, None] == ids[..., None, :]) & shown[..., None, :]
        at = torch.arange(ids.shape[-1])
        first = ids.gather(-1, torch.where(shown, at, 10**6).amin(-1, True).clamp(max=at[-1]))
        last = ids.gather(-1, torch.where(shown, at, -1).amax(-1, True).clamp(min=0))
        from_start = from_start * ((ids == first) & shown)[..., None]
        to_end = to_end * ((ids == last) & shown)[..., None]
        whole = whole * (first == last)
    if is_causal(spec):
        hidden = torch.ones(between.shape[-3:-1], dtype=torch.bool).triu(1)
        between = torch.exp(between.masked_fill(hidden[..., None], -torch.inf)).float()
    if decay.shape[3] > 1:
        weights = ((phi_k[..., None, :, :] * between) @ phi_q[..., None]).squeeze(-1)
    else:
        weights = phi_q @ phi_k.mT
        weights = weights * between.squeeze(-1) if is_causal(spec) else weights
    weights = weights if seen is None else weights * seen
    acc, sums = weights.to(dtype).float() @ v, weights.sum(-1)
    last_kv, last_z = (to_end * phi_k).mT @ v, (to_end * phi_k).sum(3)
    if kv is not None:
        acc = acc + (from_start * phi_q) @ kv[:, :, None]
        last_kv = last_kv + whole[..., None] * kv[:, :, None]
    if z is not None:
        sums = sums + ((from_start * phi_q) @ z[:, :, None, :, None]).squeeze(-1)
        last_z = last_z + whole * z[:, :, None]
    out = _finished(spec, acc.flatten(1, 2), sums.flatten(1, 2)).to(dtype)
    return out, sums.flatten(1, 2), last_kv.squeeze(2), last_z.squeeze(2)


def decays_of(spec: AttentionSpec, k: torch.Tensor) -> torch.Tensor:
    """The logarithms of the decays of keys where the spec has those of heads, else 0."""
    decay = spec.normaliser.decay
    heads = range(k.shape[1])
    numbers = [0.0] * len(heads)
    if decay is not None:
        numbers = [decay.numbers[h] if decay.numbers else decay.function(h) for h in heads]
    of_heads = torch.tensor(numbers, dtype=torch.float64)
    return of_heads.to(k.dtype)[None, :, None].expand(k.shape[:3])


def _finished(spec: AttentionSpec, acc: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    if not spec.normaliser.normalise:
        return acc * spec.qk_head_dim**-0.5
    empty = (sums == 0)[..., None]
    return (acc / sums[..., None].masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def check_linear(
    module: ModuleType, spec: AttentionSpec, call: LinearCall, device: str = "cpu"
) -> None:
    """Fails unless results and gradients are as near to float64 as torch's, twice over.

    The module runs on the device, and what is right on the CPU.
    """
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["USE_TMA"] = call.tma
    tensors = drawn_inputs(spec, call)
    sums = spec.normaliser.normalise
    has_lse = sums and spec.normaliser.feature_map.never_negative
    given = tensors | {x: in_padding(spec, call, tensors[x], torch.nan) for x in ("q", "k", "v")}
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in given.items()}
    options: dict[str, Any] = {"return_lse": has_lse} | run_arguments(spec, call, device)
    ids = drawn_ids(spec, call)
    if "decay" in leaves:
        options["decay"] = leaves["decay"]
    if call.states:
        options["initial_state"] = (leaves["kv"], leaves["z"]) if sums else leaves["kv"]
        options["return_state"] = True
    got = module.attention(leaves["q"], leaves["k"], leaves["v"], **options)
    results = list(got) if isinstance(got, tuple) else [got]
    names = ["out"] + ["lse"] * has_lse
    if call.states:
        last = results.pop()
        results += last if sums else [last]
        names += ["last kv"] + ["last z"] * sums
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    names += [f"gradient of {name}" for name in leaves]
    exact = _with_gradients(recurrence, spec, tensors, names, grads, torch.float64, ids)
    rough = _with_gradients(quadratic, spec, tensors, names, grads, ids=ids)
    grads[0] = in_padding(spec, call, grads[0], torch.nan)
    of_results = [x.to(device) for x in grads]
    mine = (*results, *torch.autograd.grad(results, list(leaves.values()), of_results))
    mine = tuple(x.detach().cpu() for x in mine)
    for name, x, right, low in zip(names, mine, exact, rough, strict=True):
        assert x.shape == right.shape, f"{name}: {tuple(x.shape)}, not {tuple(right.shape)}"
        if name == "lse":  # -inf of a query that sees no key
            none = right.isinf()
            assert x[none].isinf().all(), f"{name}: error of what has no key"
            x, right, low = (y.masked_fill(none, 0.0) for y in (x, right, low))
        # Gradients of decays are differences of sums of these.
        of, dims = ("k", (2,)) if x.dim() == 4 else ("v", (2, 3))
        size = (tensors[of] * mine[names.index(f"gradient of {of}")]).abs().sum(dims).max().item()
        size = size if name == "gradient of decay" else 0.0
        error, allowed = error_and_bound(x, right.detach(), low.detach(), size)
        allowed *= room_on(device)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    if "decay" in tensors:
        dead = mine[names.index("gradient of decay")][tensors["decay"] < -200.0]
        assert not dead.any(), f"gradient of decays of 0: error {dead.abs().max().item():.3g}"
        for b, row in enumerate([] if ids is None else ids.tolist()):
            marks, (returns, *_) = marks_of(row, padded=runs_in(spec).padded)
            starts = mine[names.index("gradient of decay")][b][:, torch.tensor(marks) == 1]
            wrong = not returns and starts.any()
            assert not wrong, f"gradient of decays of first keys: error {starts.abs().max():.3g}"


def room_on(device: str) -> float:
    """A factor of bounds: a GPU's powers have errors of their own, its sums another order."""
    return 1.0 if device == "cpu" else 2.0


def _with_gradients(
    run: Any,
    spec: AttentionSpec,
    tensors: Any,
    names: Any,
    grads: Any,
    dtype: Any = None,
    ids: Any = None,
) -> Tensors:
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}
    out, sums, kv, z = run(spec, **leaves, **({} if ids is None else {"ids": ids}))
    lse = torch.log(torch.where(sums > 0.0, sums, 1.0) * spec.qk_head_dim**-0.5)
    found = {"out": out, "lse": torch.where(sums > 0.0, lse, -torch.inf), "last kv": kv}
    results = [(found | {"last z": z})[name] for name in names[: len(grads)]]
    given = [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]
    return (*results, *torch.autograd.grad(results, list(leaves.values()), given))


def run_arguments(spec: AttentionSpec, call: LinearCall, device: str = "cpu") -> dict[str, Any]:
    """What a call passes for its mask: ids, or the positions of a run."""
    runs, ids = runs_in(spec), drawn_ids(spec, call)
    if runs is None or not runs.parameter:
        return {}
    if not runs.of_ids:
        return {runs.parameter: call.run_length}
    return {runs.parameter: (ids if runs.by_batch else ids[0]).int().to(device)}


def drawn_inputs(spec: AttentionSpec, call: LinearCall, seed: int = 0) -> dict[str, torch.Tensor]:
    """q, k and v of a call, its decays, and its first state as kv and z."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    qk_dim, v_dim, heads = spec.qk_head_dim, spec.v_head_dim, call.kv_heads

    def drawn(heads: int, length: int, dim: int) -> torch.Tensor:
        shape = (call.batch, heads, length, dim)
        if not call.strided:
            return torch.randn(shape, generator=generator).to(dtype)
        rows = torch.randn(call.batch, length, heads, dim, generator=generator).to(dtype)
        return rows.transpose(1, 2)

    tensors = {
        "q": drawn(call.q_heads, call.q_len, qk_dim),
        "k": drawn(heads, call.kv_len, qk_dim),
        "v": drawn(heads, call.kv_len, v_dim),
    }
    decay = spec.normaliser.decay
    if decay is not None and decay.tensor is not None:
        shape = (call.batch, call.kv_len, heads, *[decay.features] * (decay.features > 0))
        chosen = torch.rand(shape, generator=generator)
        small = -0.2 * torch.rand(shape, generator=generator)
        if call.steep:
            for least, value in ((0.5, 0.0), (0.7, -9.0), (0.8, -80.0), (0.9, -1e4)):
                small = torch.where(chosen > least, value, small)
            small = torch.where(chosen > 0.95, -torch.inf, small)
        tensors["decay"] = small.transpose(1, 2)
    if call.states:
        features = spec.normaliser.feature_map.num_features(qk_dim)
        tensors["kv"] = torch.randn(call.batch, heads, features, v_dim, generator=generator)
        if spec.normaliser.normalise:
            tensors["z"] = torch.rand(call.batch, heads, features, generator=generator)
    return tensors

"""explain_linear: the account of linear attention: its states, its traffic, when it pays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import sympy

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload
from flashgen.config import HOPPER, LONGEST, KernelConfig
from flashgen.errors import FlashgenError, ValidationError
from flashgen.explain.account import Subject, Timed
from flashgen.explain.call import Asked, described, workload
from flashgen.explain.kernels import grounds
from flashgen.explain.limits import bound_of, operand, seconds_of
from flashgen.explain.packed import Packing, Sequences, lengths_of, summary
from flashgen.kernels.linear_triton.occupancy import held_programs
from flashgen.kernels.linear_triton.shared_memory import width_of_features
from flashgen.kernels.registry import kernels_of
from flashgen.loader import Variant
from flashgen.params import Tensor
from flashgen.place import Place
from flashgen.plan import KernelPlan, lower
from flashgen.plan.linear import LinearPlan
from flashgen.plan.pairs import is_linear
from flashgen.plan.typical import DOCUMENT
from flashgen.tuning.choose import choices, digests, search_spaces
from flashgen.tuning.store import TuneResult, load_results
from flashgen.validate import unfit

#: The most segments of a sequence, as modules cut it.
MOST_SEGMENTS = 128


@dataclass(frozen=True)
class Step(Timed):
    """The work of one or several kernels of a forward pass.

    Attributes:
        name: what they make.
        flops: FLOPs of products.
        exponentials: exponentials of a feature map.
        read, written: bytes between L2 and DRAM.
        l2: bytes between the SMs and L2.
        seconds: the time of each unit of the target by itself, at its peak rate.
        bound: the unit that takes longest.
    """

    name: str
    flops: int
    exponentials: int
    read: int
    written: int
    l2: int
    seconds: dict[str, float]
    bound: str


@dataclass(frozen=True)
class Pass:
    """The configuration of the kernels of a pass, and their shared memory.

    Attributes:
        name: ``"forward"`` or ``"backward"``.
        config: the configuration; BLOCK_M rows are a chunk.
        chosen: why it ships, in a few words.
        shared, limit: bytes of shared memory of a block, and the most that the target allows.
        candidates, rejected: the numbers of configurations that fit and that do not.
    """

    name: str
    config: KernelConfig
    chosen: str
    shared: int
    limit: int
    candidates: int
    rejected: int


@dataclass(frozen=True)
class Softmax(Timed):
    """Softmax attention of the same call, without a tile that the mask hides.

    Attributes:
        flops: FLOPs of products.
        seconds: the time of each unit of the target by itself, at its peak rate.
        bound: the unit that takes longest.
    """

    flops: int
    seconds: dict[str, float]
    bound: str


@dataclass(frozen=True)
class PackedChunks:
    """What packed sequences are cut into.

    Attributes:
        sequences: their lengths.
        chunks: of queries of all sequences; each has one at least.
        empty_rows: the share of their rows that hold no query.
        padded: the chunks of a dense call that pads all sequences to the longest.
    """

    sequences: Sequences
    chunks: int
    empty_rows: float
    padded: int


@dataclass(frozen=True)
class LinearAccount(Subject):
    """The account of a call of linear attention.

    Attributes:
        mask, weights, feature_map: the mask, how weights are made, and what a feature is.
        algorithm: which one the kernels have, and why.
        features: the features of a vector.
        state: bytes of a head's state, with its sums of features.
        tiles: of a state, by features, a program each.
        segments: the parts of a sequence, a program each.
        passes: the kernels.
        steps: the work of a forward pass, in order.
        softmax: the work of softmax attention.
        crossover: the length from which softmax attention takes longer, both by their rooflines,
            with as many tokens; None if it does not.
        backward_flops: FLOPs of products of a backward pass.
        run: the positions of a run, each with a state of its own; None where a sequence is one.
        of_ids: whether ids say where runs end.
        pair_flops: FLOPs of products of a forward pass over all pairs, where ids return.
        packed: of a call of packed sequences, what these are cut into.
    """

    mask: str
    weights: str
    feature_map: str
    algorithm: str
    features: int
    state: int
    tiles: int
    segments: int
    passes: tuple[Pass, ...]
    steps: tuple[Step, ...]
    softmax: Softmax
    crossover: int | None
    backward_flops: int
    run: int | None = None
    of_ids: bool = False
    pair_flops: int = 0
    packed: PackedChunks | None = None

    @property
    def roofline(self) -> float:
        """The least time, in seconds: of one step after the other."""
        return sum(step.roofline for step in self.steps)


def explain_linear(
    variants: Iterable[Variant],
    target: str | None,
    asked: Asked,
    packing: Packing | None = None,
    out: Path = Path("generated"),
) -> Iterator[LinearAccount]:
    """The accounts of variants of linear attention, whose specs are valid.

    Args:
        variants: the variants.
        target: the architecture; None is Hopper, or the first that a spec names.
        asked: the known values of the call.
        packing: of a call of packed sequences, their lengths.
        out: the folder of the generated modules, beside which measured results lie.

    Raises:
        FlashgenError: no configuration fits the target, or the variant has no such call or form.
    """
    for variant in variants:
        named = variant.spec.targets
        name = target or (HOPPER if HOPPER in named else named[0])
        spec = replace(variant.spec, targets=(name,))
        variant, plan = replace(variant, spec=spec), lower(spec, variant.name)
        lengths = None if packing is None else lengths_of(variant, plan, packing)
        sms = None if packing is None else packing.sms
        results = load_results(Place(out, variant.name).tuning)
        yield _account(variant, plan, name, asked, lengths, sms, results)


def of_linear_attention(variants: Iterable[Variant]) -> list[Variant]:
    """The variants if all are of linear attention; none if all are of another one, or quadratic.

    Raises:
        FlashgenError: there are both, whose accounts differ.
    """
    variants = list(variants)
    found = [x for x in variants if is_linear(x.spec)]
    if found and len(found) < len(variants):
        raise FlashgenError(
            f"{found[0].file}: {found[0].name}: linear attention has an account of its own; "
            "explain its specs apart from others"
        )
    return found


def _account(
    variant: Variant,
    plan: KernelPlan,
    name: str,
    asked: Asked,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None,
    sms: int | None,
    results: tuple[TuneResult, ...],
) -> LinearAccount:
    linear, target = LinearPlan(plan), get_target(name)
    if lengths is not None:  # all tokens are one batch entry
        q_len, kv_len = (max(1, sum(of_side)) for of_side in lengths)
        asked = replace(asked, batch=1, q_len=q_len, kv_len=kv_len)
        target = replace(target, num_sms=sms or target.num_sms)
    work = workload(plan, asked)
    passes = tuple(_passes(variant, plan, target, results))
    forward, chunk = passes[0], passes[0].config.BLOCK_M
    packed = None if lengths is None else _packed(*lengths, chunk)
    chunks = None if packed is None else work.q_len // chunk + packed.sequences.count + 1
    steps = tuple(_steps(linear, target, work, forward, chunks))
    return LinearAccount(
        variant=variant.name,
        file=variant.file or "",
        target=name,
        gpu=target.gpus[0],
        dtype=plan.torch_dtype,
        head_dims=(plan.spec.qk_head_dim, plan.v_head_dim),
        call=described(plan, work),
        mask=plan.predicate.label,
        weights=plan.spec.normaliser.label,
        feature_map=linear.features_comment,
        algorithm=linear.algorithm,
        features=linear.features,
        state=_state(linear),
        tiles=linear.num_tiles,
        segments=_segments(linear, target, work, forward, chunks),
        passes=passes,
        steps=steps,
        softmax=_softmax(linear, target, work, lengths),
        crossover=None if packed else _crossover(linear, target, work, forward),
        backward_flops=_backward_flops(linear, work),
        run=_run(linear, work),
        of_ids=linear.of_ids,
        pair_flops=_pairs(work, work.q_len) * 2 * (linear.features + plan.v_head_dim),
        packed=packed,
    )


def _backward_flops(linear: LinearPlan, work: Workload) -> int:
    """FLOPs of products of a backward pass; a product with a matrix has two for its gradients."""
    of_kernels = 3 * work.batch * work.num_q_heads * work.q_len * linear.flops_of_row
    return of_kernels + 2 * _product(linear, work, False)[0]


def _product(linear: LinearPlan, work: Workload, packed: bool) -> tuple[int, int, int]:
    """(FLOPs, bytes read, bytes written) of torch's products of q and k with their matrices.

    Where rows may belong to no sequence, copies of q and k have 0 there.
    """
    plan = linear.plan
    head_dim, columns = plan.spec.qk_head_dim, plan.qk_head_dim
    rows, read = 0, 0
    sides = ((work.num_q_heads, work.q_len), (work.num_kv_heads, work.kv_len))
    for (heads, length), matrix in zip(sides, linear.feature_map.matrices, strict=False):
        rows += work.batch * heads * length
        read += plan.itemsize * head_dim * columns * (heads if len(matrix.dims) > 2 else 1)
    vectors, copied = plan.itemsize * head_dim * rows, linear.hides or packed
    written = plan.itemsize * columns * rows + copied * vectors
    return 2 * head_dim * columns * rows, read + (1 + copied) * vectors, written


def _packed(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], chunk: int) -> PackedChunks:
    chunks = sum(max(1, -(-q_len // chunk)) for q_len in q_lens)
    padded = len(q_lens) * max(1, -(-max(q_lens) // chunk))
    empty = 1 - sum(q_lens) / (chunks * chunk)
    return PackedChunks(summary(q_lens, kv_lens), chunks, empty, padded)


def _run(linear: LinearPlan, work: Workload) -> int | None:
    """The positions of a run in the account's call; None where a sequence is one."""
    if linear.runs is None:
        return None
    values = dict(work.params)
    if not linear.of_ids:
        length = linear.runs.length
        return int(length if length.is_Integer else values[length.name])
    [ids] = (p for p in linear.plan.params if p.name == linear.run_argument)
    return DOCUMENT if isinstance(ids, Tensor) and ids.sorted else None


def _pairs(work: Workload, run: int) -> int:
    """The pairs that a causal mask shows within runs."""
    runs, rest = divmod(work.q_len, run)
    pairs = runs * (run * (run + 1) // 2) + rest * (rest + 1) // 2
    return work.batch * work.num_q_heads * pairs


def _passes(
    variant: Variant, plan: KernelPlan, target: Target, results: tuple[TuneResult, ...]
) -> Iterator[Pass]:
    kernels, spaces = kernels_of(plan), search_spaces(plan, (target.name,))
    for key, of_kernel in spaces.items():
        space = of_kernel[target.name]
        if not space.candidates:
            raise ValidationError([unfit(variant, plan, kernels[key], target.name, space.rejected)])
    of_sources = digests(plan, spaces) if results else {}  # kernels are rendered for them
    chosen = choices(plan, of_sources, spaces, results)
    for key, kernel in kernels.items():
        choice, space = chosen[key].configs[target.name], spaces[key][target.name]
        usage = kernel.usage(plan, choice.config, target)
        yield Pass(
            name="backward" if kernel.gradients else "forward",
            config=choice.config,
            chosen=grounds(choice),
            shared=usage.total,
            limit=usage.limit,
            candidates=len(space.candidates),
            rejected=len(space.rejected),
        )


def _state(linear: LinearPlan) -> int:
    """Bytes of a head's state, in float32."""
    return 4 * linear.features * (linear.plan.v_head_dim + linear.normalise)


def _segments(
    linear: LinearPlan, target: Target, work: Workload, by: Pass, chunks: int | None = None
) -> int:
    """The segments of queries, as a module's `_cut` chooses them: they cost what keys cost.

    chunks is how many a packed call has room for, None of a dense one.
    """
    chunks = chunks or -(-work.q_len // by.config.BLOCK_M)
    heads, held = work.batch * work.num_q_heads, held_programs(by.config, target, by.shared)
    together = 1.6 if held > 1 else 1.0

    def rounds(programs: int) -> float:
        full, rest = divmod(programs, target.num_sms * held)
        return full * together + (together if rest > target.num_sms else min(rest, 1))

    def cost(number: int) -> float:
        length = -(-chunks // number)
        beforehand = rounds(heads * (number - 1)) * length / 2
        return rounds(heads * number) * (length + 1) + beforehand + number / 2

    number = min(range(1, min(chunks, MOST_SEGMENTS) + 1), key=cost)
    return -(-chunks // -(-chunks // number))


def _steps(
    linear: LinearPlan, target: Target, work: Workload, by: Pass, chunks: int | None = None
) -> Iterator[Step]:
    plan, features = linear.plan, linear.features
    itemsize, qk_dim, v_dim = plan.itemsize, plan.qk_head_dim, plan.v_head_dim
    queries = work.batch * work.num_q_heads * work.q_len
    keys = work.batch * work.num_kv_heads * work.kv_len
    chunk, segments = by.config.BLOCK_M, _segments(linear, target, work, by, chunks)

    def step(name: str, flops: int, exponentials: int, read: int, written: int, l2: int) -> Step:
        seconds = seconds_of(
            target,
            operand(plan),
            flops=flops,
            exponentials=exponentials,
            dram=read + written,
            l2=l2,
        )
        return Step(name, flops, exponentials, read, written, l2, seconds, bound_of(seconds))

    if linear.matrices:
        flops, read, written = _product(linear, work, chunks is not None)
        yield step("product", flops, 0, read, written, read + written)
    if linear.of_ids:  # read once for where runs start, and once more for the positions before
        ids = work.batch * work.kv_len
        yield step("runs", 0, 0, 4 * ids, ids, 9 * ids)
    # Sums of decays within chunks, in float32: of each key, in one part or two.
    by_keys = linear.decayed and not linear.by_features
    logs = 4 * (1 + linear.splits_logs) * by_keys
    if by_keys:
        read = 4 * keys * linear.learned + work.batch * work.kv_len * linear.of_ids
        yield step("decays", 0, 0, read, logs * keys, read + logs * keys)
    if linear.mapped:
        rows, products = queries + keys, 0
        if linear.random:
            # Twice: before them, for the largest one. Of a query not where a program makes all.
            whole = width_of_features(plan, target) >= features
            rows = (1 if whole else 2) * queries + 2 * keys
            products = 2 * features * qk_dim * rows
        read = itemsize * qk_dim * rows
        written = itemsize * features * (queries + keys)
        exponentials = _exponentials(linear) * (queries + keys)
        yield step("features", products, exponentials, read, written, read + written)
    # Weights within chunks, which decays of features make beforehand.
    weights = itemsize * chunk * queries * linear.by_features
    if linear.by_features:
        # Of features, and sums of their decays, in two parts where operands have 16 bits.
        products = 2 * (3 if itemsize < 4 else 2) * chunk * features * queries
        read = 4 * features * keys + itemsize * features * (queries + keys)
        written = itemsize * features * (queries + keys) + weights + 4 * features * keys // chunk
        l2 = (4 + 2 * itemsize) * features * queries + written
        yield step("decays", products, 2 * features * queries, read, written, l2)
    # Of causal attention the last segment of keys precedes nothing.
    counted = (segments - 1) / segments if linear.causal else 1.0
    states = _state(linear) * work.batch * work.num_kv_heads * segments
    tiles = linear.num_tiles
    read = int(counted * keys * (itemsize * (features + v_dim) + logs))
    of_sms = counted * keys * (itemsize * (features + tiles * v_dim) + tiles * logs)
    of_sms = int(of_sms + counted * states)
    if linear.causal and segments > 1:  # `_linear_scan` reads and writes them once more
        of_sms += 2 * states
    flops = int(counted * keys) * 2 * features * v_dim
    yield step("states", flops, 0, read, int(counted * states), of_sms)
    # All tiles of features but one leave partial sums in float32, and all but one read them.
    partial = 4 * v_dim * queries * (tiles - 1)
    read, written = itemsize * features * queries, itemsize * v_dim * queries
    flops, rows = 2 * features * v_dim * queries, features * queries
    reads = _state(linear) * work.batch * work.num_q_heads * segments
    if linear.causal:  # and keys enter the state, and meet the queries of their chunk
        read += (itemsize * (features + tiles * v_dim) + tiles * logs) * keys
        within = features * (not linear.by_features) + tiles * v_dim
        flops += queries * (2 * features * v_dim + 2 * chunk * within)
        rows += (features + tiles * v_dim) * queries
        reads = reads * (segments - 1) // segments
    else:
        reads *= segments
    of_sms = itemsize * rows + tiles * logs * queries + written + reads + 2 * partial + weights
    read += partial + int(counted * states) + weights
    yield step("output", flops, 0, read, written + partial, of_sms)


def _exponentials(linear: LinearPlan) -> int:
    """Exponentials of a vector's features."""
    if linear.random:
        return linear.features
    traced = linear.feature_map.traced
    found = {e for x in (*traced.pieces, *(s.of for s in traced.sums)) for e in x.atoms(sympy.exp)}
    return len(found) * linear.plan.qk_head_dim


def _softmax(
    linear: LinearPlan,
    target: Target,
    work: Workload,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Softmax:
    plan, heads = linear.plan, work.batch * work.num_q_heads
    pairs = heads * work.q_len * work.kv_len
    if lengths is not None:
        of_each = zip(*lengths, strict=True)
        pairs = heads * sum(n * (n + 1) // 2 if linear.causal else n * m for n, m in of_each)
    elif linear.causal:
        pairs = _pairs(work, _run(linear, work) or work.q_len)
    width = plan.spec.qk_head_dim + plan.v_head_dim
    rows = heads * work.q_len + work.batch * work.num_kv_heads * work.kv_len
    flops, dram = 2 * pairs * width, rows * width * plan.itemsize
    seconds = seconds_of(target, operand(plan), flops=flops, exponentials=pairs, dram=dram, l2=dram)
    return Softmax(flops, seconds, bound_of(seconds))


def _crossover(linear: LinearPlan, target: Target, work: Workload, by: Pass) -> int | None:
    """The first power of two, then the first multiple of 64, from which softmax takes longer."""
    tokens = work.batch * work.q_len

    def pays(length: int) -> bool:
        batch = max(1, tokens // length)
        call = replace(work, batch=batch, q_len=length, kv_len=length)
        mine = sum(step.roofline for step in _steps(linear, target, call, by))
        return mine < _softmax(linear, target, call).roofline

    high = 64
    while not pays(high):
        high *= 2
        if high > LONGEST:
            return None
    low = high // 2
    while high - low > 64:
        middle = (low + high) // 128 * 64
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high

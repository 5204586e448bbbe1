"""The names that generated modules bind, found by rendering modules of every kind."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator

from flashgen.codegen.module import render_module
from flashgen.config import KernelConfig
from flashgen.constants import Constant
from flashgen.feature_maps import elu_plus_one, favor, identity, softmax_features
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.masks import Mask, block_sparse, causal, chosen_blocks, document, sliding_window
from flashgen.normalisers import linear, sigmoid_attention, softmax
from flashgen.params import Float, Int, Tensor
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.pair_decays import OF_REST, OF_WHOLE
from flashgen.scores import Score, additive_bias, softcap
from flashgen.spec import AttentionSpec
from flashgen.tracing.expr import q_len
from support.variants import any_cache, on_hopper

_IMAGES = Tensor("probe", ("batch", "kv_len"), "int32")
_ISLANDS = Mask(
    lambda b, h, q, kv: (kv <= q) | ((_IMAGES[b, q] == _IMAGES[b, kv]) & (_IMAGES[b, q] > h)),
    "islands",
    equal_lengths=True,
)


# Between them these print every line of every template: one run of keys and several in any order,
# heads of one segment and of several, narrow ones and others, a mask that differs between heads and
# batch entries, block tables, tables by query and key, lists of blocks, documents, scores and
# sinks, tensors that learn by query, key and distance, the parameters of each kind and a constant;
# and the backward passes that are split.
_PROBE = Int("probe")
_DEGREES = Float("probe", 1.0, above=0)
_TABLE = Tensor("probe", ("num_q_heads",), "bfloat16")
_TABLE_OF_INTS = Tensor("probe", ("num_q_heads",), "int32")
_NEAR = Tensor("probe", ("num_q_heads", None))
_BLOCKS = Tensor("probe", ("batch", "num_q_heads", None, None), "bool")
_LISTS = Tensor("probe", ("batch", "num_kv_heads", (q_len + 63) // 64, None), "int32")
_LISTS_OF_EACH = Tensor("probe", ("batch", "num_kv_heads", "q_len", None), "int32")
_COUNTS = Tensor("probes", ("batch", "num_kv_heads", "q_len"), "int32")
_KNOWN = Constant("probe", [[True]])
_IDS = Tensor("probe", ("batch", "kv_len"), "int32", sorted=True)
_PAIRS = Tensor("probe", ("batch", "num_q_heads", "q_len", "kv_len"))
_TILTED = Score(lambda score, b, h, q, kv: score + _PROBE * (kv - q), "tilted")
EVERYTHING = (
    AttentionSpec(128, mask=document(_IDS), autocast=True),
    AttentionSpec(128, mask=document(_IDS) & causal(), deterministic=True),
    AttentionSpec(
        64, mask=causal(align="bottom_right") & (lambda b, h, q, kv: (kv < _PROBE) & (q < _PROBE))
    ),
    AttentionSpec(
        72,
        mask=(lambda b, h, q, kv: (kv < 2 * q - b) | (kv > _PROBE + h)) & ~sliding_window(4, 2),
    ),
    AttentionSpec(
        64,
        mask=block_sparse(_BLOCKS, 8)
        & (lambda b, h, q, kv: ~_BLOCKS[b, h, q // 16, kv // 8] | (q % 9 <= kv)),
    ),
    AttentionSpec(64, mask=block_sparse(_KNOWN, 16)),
    AttentionSpec(64, score=softcap(_DEGREES), normaliser=softmax(sink=_DEGREES)),
    AttentionSpec(
        64,
        mask=Mask(lambda b, h, q, kv: q > kv, "later"),
        score=Score(lambda score, b, h, q, kv: score + _TABLE[h] * (kv - q), "tilted"),
        normaliser=sigmoid_attention(),
    ),
    AttentionSpec(
        64,
        score=Score(
            lambda s, b, h, q, kv: s + _NEAR[h, q] + _NEAR[h, kv] + _NEAR[h, kv - q], "near"
        ),
    ),
    AttentionSpec(64, mask=causal(), score=additive_bias(_PAIRS)),
    AttentionSpec(96, mask=causal(), score=additive_bias(_PAIRS)),
    AttentionSpec(64, mask=document(_IDS) & causal()),
    AttentionSpec(80, mask=sliding_window(_PROBE, 0)),
    AttentionSpec(64, mask=sliding_window(_PROBE, 0), score=_TILTED, deterministic=True),
    AttentionSpec(256, mask=sliding_window(_PROBE, 0), score=_TILTED),
    AttentionSpec(96, mask=causal() & (lambda b, h, q, kv: (kv < _PROBE) & (q < _PROBE))),
    AttentionSpec((192, 96), mask=causal() & (lambda b, h, q, kv: (kv < _PROBE) & (q < _PROBE))),
    AttentionSpec(128, mask=_ISLANDS),
    AttentionSpec(128, mask=lambda b, h, q, kv: _BLOCKS[b, h, q, kv] & (kv <= q)),
    AttentionSpec(128, mask=lambda b, h, q, kv: _BLOCKS[b, h, q, kv // 64] & (kv <= q)),
    AttentionSpec(128, mask=chosen_blocks(_LISTS) & causal()),
    AttentionSpec(64, mask=chosen_blocks(_LISTS_OF_EACH, _COUNTS, block=32, query_block=1)),
)

# And what those with dropout print besides.
DROPPING = (AttentionSpec(64, mask=sliding_window(_PROBE, 0), dropout=True),)

# And what those with packed sequences do.
_PACKED = Tensor("probe", ("batch", "num_q_heads", "kv_len"))
PACKED = (
    AttentionSpec(
        64, mask=sliding_window(_PROBE, 0), score=_TILTED, dropout=True, forms=("dense", "varlen")
    ),
    AttentionSpec(
        64,
        score=Score(lambda s, b, h, q, kv: s + _PACKED[b, h, kv], "added"),
        normaliser=softmax(sink=lambda b, h: _PACKED[b, h, 0]),
        align="top_left",
        forms=("dense", "varlen"),
    ),
    AttentionSpec(128, mask=_ISLANDS, forms=("dense", "varlen")),
)
# And what those with a cache do.
_CACHE = ("dense", "cache")
CACHING = (
    AttentionSpec(64, mask=sliding_window(_PROBE, 0, align="bottom_right"), forms=_CACHE),
    AttentionSpec(
        72,
        mask=(lambda b, h, q, kv: (kv < 2 * q - b) | (kv > 9 + h)),
        score=softcap(_DEGREES),
        normaliser=softmax(sink=_DEGREES),
        forms=_CACHE,
    ),
    AttentionSpec(
        64,
        score=Score(lambda score, b, h, q, kv: score + _TABLE[h] * (kv - q), "tilted"),
        forms=_CACHE,
    ),
    AttentionSpec(64, mask=block_sparse(_BLOCKS, 8), forms=_CACHE),
    # Tiles are decided: of a run for all heads, and of several whose ends are extremes over rows.
    AttentionSpec(
        64,
        mask=lambda b, h, q, kv: (kv <= q) & (_IMAGES[b, q] == _IMAGES[b, kv]),
        forms=_CACHE,
    ),
    AttentionSpec(
        72,
        mask=lambda b, h, q, kv: ((kv < 9) | (kv > _IMAGES[b, q])) & (_IMAGES[b, kv] > h),
        forms=_CACHE,
    ),
    AttentionSpec(64, mask=block_sparse(_KNOWN, 16), normaliser=sigmoid_attention(), forms=_CACHE),
)

# And what those of linear attention over all pairs do.
_DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
OVER_PAIRS = (
    AttentionSpec(64, mask=document(_IDS), normaliser=linear(elu_plus_one(), decay=_DECAY)),
    AttentionSpec(64, mask=document(_IDS), normaliser=linear(favor(64)), autocast=True),
    AttentionSpec(
        (40, 24),
        mask=sliding_window(_PROBE, 0),
        normaliser=linear(softmax_features(), decay=lambda h: -0.5, normalise=False),
    ),
    AttentionSpec(64, mask=_ISLANDS, normaliser=linear(identity())),
)

# And what those of parts of a whole do.
_MESH = ("dense", "mesh")
MESHED = (
    AttentionSpec(64, mask=sliding_window(_PROBE, 0), forms=_MESH),
    AttentionSpec(64, mask=document(_IDS) & causal(), normaliser=sigmoid_attention(), forms=_MESH),
    AttentionSpec(
        64,
        mask=lambda b, h, q, kv: (kv < _TABLE_OF_INTS[h]) & (q % 2 == b),
        normaliser=softmax(sink=lambda b, h: _TABLE_OF_INTS[h] / 2),
        forms=_MESH,
    ),
)

# In each module both kernels, and that of the backward pass where there is one.
_CHOICE = on_hopper(KernelConfig(128, 64, 8, 2))


def taken_by(specs: tuple[AttentionSpec, ...]) -> frozenset[str]:
    """What the modules name at their top and in functions that parameters reach."""
    names: set[str] = set()
    for spec in specs:
        lines, body = _module(spec)
        for statement in body:
            names.update(_bound([statement]))
            # To look for the word is quick, to walk is not.
            if any("probe" in line for line in lines[statement.lineno - 1 : statement.end_lineno]):
                inside = set(_bound(ast.walk(statement)))
                names.update(inside if "probe" in inside else ())
    names |= {re.sub(r"_\d+$", "", name) for name in names}
    # What is named after a parameter keeps clear of the others by itself.
    own = re.compile(f"^probe|{OF_WHOLE}|{OF_REST}")
    free = (name for name in names if not own.search(name))
    return frozenset(free) - set(dir(builtins))


def fixed_by(specs: tuple[AttentionSpec, ...]) -> frozenset[str]:
    """What the modules name at their top, and the arguments of the functions that users call."""
    names: set[str] = set()
    for spec in specs:
        for statement in _module(spec)[1]:
            names.update(_bound([statement]))
            if isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
                names.update(_bound(ast.walk(statement.args)))
    free = (name for name in names if not name.startswith(("probe", "_")))
    return frozenset(free) - set(dir(builtins))


def _module(spec: AttentionSpec) -> tuple[list[str], list[ast.stmt]]:
    """The lines of a spec's module, and its statements."""
    if id(spec) in _modules:
        return _modules[id(spec)]
    plan = lower(spec, "everything")
    has_backward = not HopperBackward(backward_plan(plan)).why_not
    held = ("hopper", "hopper_backward") if has_backward else ("hopper",)
    choices = dict.fromkeys(() if plan.products else held, _CHOICE)
    if spec.has_form("cache"):
        choices["cached"] = any_cache(plan)
    text = render_module(plan, choices)
    found = _modules[id(spec)] = text.splitlines(), ast.parse(text).body
    return found


#: By the ids of specs, which live as long as this module.
_modules: dict[int, tuple[list[str], list[ast.stmt]]] = {}


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Assign():
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))

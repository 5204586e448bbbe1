"""flashgen: a compiler for attention kernels. These are the names that a spec file uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.constants import Constant
from flashgen.feature_maps import FeatureMap, elu_plus_one, identity, relu
from flashgen.functions import (
    atan,
    clamp,
    cos,
    erf,
    exp,
    exp2,
    floor,
    gelu,
    log,
    log2,
    maximum,
    minimum,
    sigmoid,
    sin,
    sqrt,
    tanh,
    truncate,
    where,
)
from flashgen.masks import (
    Mask,
    bigbird,
    block_sparse,
    causal,
    chunked,
    dilated,
    document,
    full,
    global_tokens,
    natten_2d,
    prefix_lm,
    random_blocks,
    sink_tokens,
    sliding_window,
    strided,
    tree,
)
from flashgen.normalisers import (
    Normaliser,
    linear,
    sigmoid_attention,
    softmax,
    softmax_off_by_one,
)
from flashgen.params import Float, Int, Tensor
from flashgen.scores import (
    Score,
    additive_bias,
    alibi,
    relative_bias,
    softcap,
    t5_bias,
    temperature,
)
from flashgen.spec import AttentionSpec, Blocks
from flashgen.tracing.expr import kv_len, q_len

if TYPE_CHECKING:
    from types import ModuleType

# `compile` is not among them: ``from flashgen import *`` would hide Python's.
__all__ = [
    "AttentionSpec",
    "Blocks",
    "Constant",
    "FeatureMap",
    "Float",
    "Int",
    "Mask",
    "Normaliser",
    "Score",
    "Tensor",
    "additive_bias",
    "alibi",
    "atan",
    "bigbird",
    "block_sparse",
    "causal",
    "chunked",
    "clamp",
    "cos",
    "dilated",
    "document",
    "elu_plus_one",
    "erf",
    "exp",
    "exp2",
    "floor",
    "full",
    "gelu",
    "global_tokens",
    "identity",
    "kv_len",
    "linear",
    "log",
    "log2",
    "maximum",
    "minimum",
    "natten_2d",
    "prefix_lm",
    "q_len",
    "random_blocks",
    "relative_bias",
    "relu",
    "sigmoid",
    "sigmoid_attention",
    "sin",
    "sink_tokens",
    "sliding_window",
    "softcap",
    "softmax",
    "softmax_off_by_one",
    "sqrt",
    "strided",
    "t5_bias",
    "tanh",
    "temperature",
    "tree",
    "truncate",
    "where",
]


def compile(spec: AttentionSpec, *, tune: bool = False, tune_seconds: float = 60.0) -> ModuleType:
    """The module of a spec, as ``flashgen build`` makes it, from a cache on disk.

    A module that is not in the cache is built into it. The cache is the folder
    ``FLASHGEN_CACHE_DIR``, else ``flashgen`` in the user's folder of caches. Only its owner may
    open it, since its modules are executed. Processes share it: one builds, the others wait.

    Args:
        spec: the variant; without a name its module is called ``attention``.
        tune: whether kernels that were never measured on this machine's GPU are, with a progress
            bar. The cache keeps the results, and later calls use them with or without ``tune``.
        tune_seconds: the time to measure a forward kernel for; each backward kernel gets half.

    Returns:
        The module, the same object for each call with this spec, with ``attention`` and
        ``reference``. torch.compile traces its functions; call `compile` itself before.

    Raises:
        ValidationError: everything wrong with the spec, a line each.
        OutputError: the cache cannot be written, or others than its owner may open it.
        TuneError: with ``tune``, no GPU of the spec's targets.
        RuntimeError: torch.compile traces this call.
    """
    from flashgen.compiling import compiled

    return compiled(spec, tune=tune, tune_seconds=tune_seconds)

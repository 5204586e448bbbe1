"""flashgen: a compiler for attention kernels. These are the names that a spec file uses.

They are imported when they are first used, since deriving takes sympy, which is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from flashgen.constants import Constant
    from flashgen.feature_maps import (
        FeatureMap,
        elu_plus_one,
        favor,
        feature_sum,
        identity,
        relu,
        softmax_features,
    )
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
        chosen_blocks,
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
    "chosen_blocks",
    "chunked",
    "clamp",
    "cos",
    "dilated",
    "document",
    "elu_plus_one",
    "erf",
    "exp",
    "exp2",
    "favor",
    "feature_sum",
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
    "softmax_features",
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

#: Where the names are.
_HOMES = {
    "flashgen.constants": "Constant",
    "flashgen.feature_maps": (
        "FeatureMap elu_plus_one favor feature_sum identity relu softmax_features"
    ),
    "flashgen.functions": (
        "atan clamp cos erf exp exp2 floor gelu log log2 maximum minimum sigmoid sin sqrt tanh "
        "truncate where"
    ),
    "flashgen.masks": (
        "Mask bigbird block_sparse causal chosen_blocks chunked dilated document full "
        "global_tokens natten_2d prefix_lm random_blocks sink_tokens sliding_window strided tree"
    ),
    "flashgen.normalisers": "Normaliser linear sigmoid_attention softmax softmax_off_by_one",
    "flashgen.params": "Float Int Tensor",
    "flashgen.scores": "Score additive_bias alibi relative_bias softcap t5_bias temperature",
    "flashgen.spec": "AttentionSpec Blocks",
    "flashgen.tracing.expr": "kv_len q_len",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # with it, type checkers would take any name for one of flashgen's

    def __getattr__(name: str) -> Any:
        if f"flashgen.{name}" in _HOMES:  # ``flashgen.masks``, as if it had been imported
            return import_module(f"flashgen.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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

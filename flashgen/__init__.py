"""flashgen: a compiler for attention kernels. These are the names that a spec file uses."""

from flashgen.expr import kv_len, q_len
from flashgen.functions import (
    clamp,
    cos,
    exp,
    exp2,
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
from flashgen.masks import Mask, causal, full, sliding_window
from flashgen.normalisers import Normaliser, sigmoid_attention, softmax, softmax_off_by_one
from flashgen.params import Float, Int, Tensor
from flashgen.scores import Score, softcap
from flashgen.spec import AttentionSpec, Blocks

__all__ = [
    "AttentionSpec",
    "Blocks",
    "Float",
    "Int",
    "Mask",
    "Normaliser",
    "Score",
    "Tensor",
    "causal",
    "clamp",
    "cos",
    "exp",
    "exp2",
    "full",
    "kv_len",
    "log",
    "log2",
    "maximum",
    "minimum",
    "q_len",
    "sigmoid",
    "sigmoid_attention",
    "sin",
    "sliding_window",
    "softcap",
    "softmax",
    "softmax_off_by_one",
    "sqrt",
    "tanh",
    "truncate",
    "where",
]

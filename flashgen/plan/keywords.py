"""Other names, inside of a module, for parameters with keywords that it uses itself.

A parameter may be called ``top`` or ``p``, as variables of kernels are. ``attention`` takes it by
this keyword, and everything below by a name that is free.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy

from flashgen.block_lists import BlockLists
from flashgen.codegen.names import is_taken
from flashgen.constants import Constant
from flashgen.decays import Decay
from flashgen.declared import Param
from flashgen.feature_maps import FeatureMap
from flashgen.normalisers import Linear
from flashgen.params import Tensor
from flashgen.plan.runs import runs_of
from flashgen.spec import AttentionSpec
from flashgen.symbolic.trace import trace
from flashgen.tracing.expr import Expr, bound, bound_values

#: The names, inside of a module of linear attention, of a tensor of decays, and of what says where
#: runs of positions end: a tensor of ids, or a number of positions.
OF_DECAY, OF_IDS, OF_LENGTH = "log_decay", "run_ids", "run_length"

#: The same of a feature map's matrix, and of one for q and one for k.
OF_MATRICES = (("matrix_of_both",), ("matrix_of_q", "matrix_of_k"))

#: Pairs of a name inside and a keyword.
Keywords = tuple[tuple[str, str], ...]


def with_free_names(spec: AttentionSpec) -> tuple[AttentionSpec, Keywords]:
    """The spec with a free name for each parameter and constant, and the keywords of those.

    Raises:
        MaskError: a function of the spec cannot be traced.
    """
    declared = spec.declared
    names = {param.name for param in declared}
    found = _of_linear(spec)
    names |= set(found.values())
    for name in (param.name for param in declared if _is_taken(param.name, spec)):
        if name in found:
            continue
        free = f"{name}_"
        while free in names or _is_taken(free, spec):
            free += "_"
        names.add(free)
        found[name] = free
    if not found:
        return spec, ()
    renamed = _Renamed(declared, found)
    changes: dict[str, Any] = {
        "mask": replace(
            spec.mask, mask_mod=renamed.function(spec.mask.mask_mod), along=None, align=spec.align
        )
    }
    if spec.score is not None:
        changes["score"] = replace(
            spec.score,
            score_mod=renamed.function(spec.score.score_mod),
            along=None,
            align=spec.align,
        )
    if spec.normaliser.sink is not None:
        sink = renamed.function(spec.normaliser.sink)
        changes["normaliser"] = replace(spec.normaliser, sink=sink)
    if isinstance(spec.normaliser, Linear):
        decay, feature_map = spec.normaliser.decay, spec.normaliser.feature_map
        decay = None if decay is None else renamed.decay(decay)
        if feature_map.matrices:
            feature_map = renamed.feature_map(feature_map)
        changes["normaliser"] = replace(spec.normaliser, decay=decay, feature_map=feature_map)
    return replace(spec, **changes), tuple((free, name) for name, free in found.items())


def _of_linear(spec: AttentionSpec) -> dict[str, str]:
    """The one name that modules of linear attention have for a parameter of each kind."""
    if not isinstance(spec.normaliser, Linear):
        return {}
    decay, runs = spec.normaliser.decay, runs_of(trace(spec.mask).expr)
    matrices = tuple(dict.fromkeys(x.name for x in spec.normaliser.feature_map.matrices))
    found = dict(zip(matrices, OF_MATRICES[len(matrices) - 1], strict=True)) if matrices else {}
    if decay is not None and decay.tensor is not None:
        found[decay.tensor.name] = OF_DECAY
    if runs is not None and runs.parameter:
        found[runs.parameter] = OF_IDS if runs.of_ids else OF_LENGTH
    return {name: free for name, free in found.items() if name != free}


def _is_taken(name: str, spec: AttentionSpec) -> bool:
    products = spec.normaliser.kind == "products"
    return is_taken(name, dropout=spec.dropout, forms=spec.forms, products=products)


class _Renamed:
    """Parameters with other names.

    Args:
        declared: all parameters.
        names: the new name of each that has one.
    """

    def __init__(self, declared: Iterable[Param], names: Mapping[str, str]) -> None:
        self._keywords = {free: name for name, free in names.items()}
        self._symbols: dict[Any, Any] = {}
        self._params: dict[str, Param] = {}
        declared = tuple(declared)
        for param in declared:
            if param.name in names:
                symbol: Any = param.sym  # type: ignore[attr-defined]
                self._symbols[symbol] = sympy.Symbol(names[param.name], **symbol._assumptions_orig)

        # Numbers first: sizes of tensors mention them. Lists of blocks mention other tensors.
        def depth(param: Param) -> int:
            return isinstance(param, Tensor) + isinstance(param, BlockLists)

        for param in sorted(declared, key=depth):
            self._params[param.name] = self._param(param, names.get(param.name, param.name))

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the new names in what it returns for symbols."""

        def renamed(*arguments: Any) -> Any:
            values = bound_values()
            with bound(values if values is None else self._by_keyword(values)):
                result = function(*arguments)
            if isinstance(result, list | tuple):
                return [self._expr(x) if isinstance(x, Expr) else x for x in result]
            return self._expr(result) if isinstance(result, Expr) else result

        return renamed

    def decay(self, decay: Decay) -> Decay:
        """The decay, with the new name of its tensor."""
        if decay.tensor is None:
            return decay
        tensor = self._params[decay.tensor.name]
        assert isinstance(tensor, Tensor)
        return replace(decay, tensor=tensor)

    def feature_map(self, feature_map: FeatureMap) -> FeatureMap:
        """The map, with the new names of its matrices."""
        keys = None if feature_map.keys is None else self.feature_map(feature_map.keys)
        return replace(feature_map, function=self.function(feature_map.function), keys=keys)

    def _by_keyword(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values, as the function was written with."""
        return {self._keywords.get(name, name): value for name, value in values.items()}

    def _param(self, param: Param, name: str) -> Param:
        other: Any = copy.copy(param)
        other.name = name
        other.sym = self._symbols.get(other.sym, other.sym)
        if isinstance(param, Tensor):
            other.dims = tuple(None if dim is None else self._expr(dim) for dim in param.dims)
            if isinstance(param, BlockLists) and param.counts is not None:
                other.counts = self._params[param.counts.name]
            if isinstance(param, Constant):
                other.limits = tuple((of, self._expr(size)) for of, size in param.limits)
        else:
            other.params = (other,)
        return other  # type: ignore[no-any-return]

    def _expr(self, expr: Expr) -> Expr:
        params = tuple(self._params[param.name] for param in expr.params)
        return Expr(expr.sym.xreplace(self._symbols), params)

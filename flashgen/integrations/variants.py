"""Variants: the modules for functions as they are given to FlexAttention.

A function is traced when its code, or what it captures, is new. Tensors that it captures are
parameters of the module. A number is a constant of the first module; once it has had a second value
it is a run-time `Int` or `Float`, if the function still traces with it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import sympy
import torch

from flashgen.codegen.names import is_taken
from flashgen.compiling import compiled
from flashgen.errors import FlashgenError
from flashgen.integrations.block_table import FULL, LISTED, BlockTables
from flashgen.integrations.captured_tensor import (
    PARAMETER_DTYPES,
    CapturedTensor,
    first_dims,
    lowest,
    named_dims,
    resolved,
)
from flashgen.integrations.captures import Captures
from flashgen.integrations.converted import converted
from flashgen.integrations.replaced import Replaced
from flashgen.masks import Mask, as_mask, full
from flashgen.params import RESERVED_NAMES, Float, Int
from flashgen.scores import Score, as_score
from flashgen.spec import AttentionSpec
from flashgen.symbolic.trace import trace
from flashgen.symbols import KV_IDX, Q_IDX, Load

#: What makes the tensor of a parameter from the captured tensors of a call, and q's device; it may
#: wait for a GPU to refuse numbers.
Maker = Callable[[list[torch.Tensor], torch.device, bool], torch.Tensor]

#: So many families are kept.
MOST_FAMILIES = 1024


@dataclass(frozen=True)
class Form:
    """What a module depends on beside the functions.

    Attributes:
        head_dims: of q and k, and of v: multiples of 8.
        dtype: of q, k and v.
        input_precision: as `AttentionSpec` has it.
        tables: the key of the `BlockTables`.
        targets: the GPU architectures that the module is for.
    """

    head_dims: tuple[int, int]
    dtype: torch.dtype
    input_precision: str | None
    tables: tuple[Any, ...]
    targets: tuple[str, ...]


@dataclass
class Variant:
    """A module, and how a call of it gets its arguments.

    Attributes:
        module: it.
        numbers: the index of each run-time number among the captured ones, by its parameter.
        tensors: what makes each tensor parameter.
        sizes: the sizes that tensors must have: index of the tensor, dimension, and its number.
        exact: the tensors whose sizes must be what they were, with these.
        nonnegative: indices that must not be negative for the sizes of a call.
    """

    module: ModuleType
    numbers: dict[str, int]
    tensors: dict[str, Maker]
    sizes: list[tuple[int, int, Any]]
    exact: list[tuple[int, torch.Size]]
    nonnegative: list[Any]
    _fits: dict[Any, bool] = field(default_factory=dict)

    def fits(self, captures: Captures, sizes: Mapping[Any, int]) -> bool:
        """Whether it serves these tensors and lengths."""
        tensors = captures.tensors
        for at, shape in self.exact:
            if tensors[at].shape != shape:
                return False
        for at, dim, number in self.sizes:
            if tensors[at].shape[dim] != (number if type(number) is int else sizes[number]):
                return False
        if not self.nonnegative:
            return True
        key = tuple(sizes.values())
        if key not in self._fits:
            self._fits[key] = all(lowest(index, sizes) >= 0 for index in self.nonnegative)
        return self._fits[key]

    def arguments(
        self, captures: Captures, device: torch.device, *, waits: bool = False
    ) -> dict[str, Any]:
        """The arguments of the module for what is captured, and for queries on a device.

        With ``waits`` it waits for numbers of a GPU that it may have to refuse.

        Raises:
            MaskError: a captured tensor has numbers that 32 bits do not hold.
        """
        found: dict[str, Any] = {name: captures.numbers[at][0] for name, at in self.numbers.items()}
        for name, make in self.tensors.items():
            found[name] = make(captures.tensors, device, waits)
        return found


class Family:
    """The variants of functions that differ in numbers, and in the sizes of tensors, alone."""

    def __init__(self, kept: tuple[Any, ...]) -> None:
        self._kept = kept  # whose ids are the key of this family
        self._variants: list[tuple[tuple[Any, ...], Variant]] = []
        self._fixed: frozenset[int] = frozenset()  # numbers with which as symbols nothing traces
        self._run_time: frozenset[int] = frozenset()

    def serving(self, captures: Captures, sizes: Mapping[Any, int]) -> Variant | None:
        """The variant that serves a call, if there is one."""
        for constants, variant in self._variants:
            for at, value in constants:
                if captures.numbers[at][0] != value:
                    break
            else:
                if variant.fits(captures, sizes):
                    return variant
        return None

    def make(
        self,
        functions: tuple[Any, Any],
        captures: Captures,
        sizes: Mapping[Any, int],
        form: Form,
        tables: BlockTables | None,
    ) -> Variant:
        """The variant for a call that no other one serves.

        Raises:
            FlashgenError: a function cannot be traced; the message has its line.
        """
        run_time = self._run_time
        for at in sorted(self._changed(captures) - run_time):
            if _traces(functions, captures, sizes, run_time | {at}):
                run_time |= {at}
            else:  # Python decides by it: it stays a constant
                self._fixed |= {at}
        try:
            variant = _traced(functions, captures, sizes, form, tables, run_time)
        except FlashgenError:
            if not run_time:
                raise
            self._fixed |= run_time
            run_time = frozenset()
            variant = _traced(functions, captures, sizes, form, tables, run_time)
        self._run_time = run_time
        arguments = set(variant.numbers.values())  # another number may be in there by its value
        constants = tuple(
            (at, value) for at, (value, _) in enumerate(captures.numbers) if at not in arguments
        )
        self._variants.insert(0, (constants, variant))
        del self._variants[64:]
        return variant

    def _changed(self, captures: Captures) -> frozenset[int]:
        """The numbers that had another value in an earlier call."""
        return frozenset(
            at
            for constants, _ in self._variants
            for at, value in constants
            if captures.numbers[at][0] != value and at not in self._fixed
        )


_families: dict[Any, Family] = {}
_making = threading.RLock()


def variant_of(
    functions: tuple[Any, Any],
    captures: Captures,
    sizes: Mapping[Any, int],
    form: Form,
    tables: BlockTables | None = None,
) -> Variant:
    """The variant for a call, from an earlier one or made for it.

    Args:
        functions: score_mod and mask_mod; None for none.
        captures: what both capture.
        sizes: of the call.
        form: what else the module depends on.
        tables: what is joined to the mask.

    Raises:
        FlashgenError: a function cannot be traced; the message has its line.
    """
    key = (form, captures.key)
    family = None if captures.opaque else _families.get(key)
    if family is not None and (found := family.serving(captures, sizes)) is not None:
        return found
    with _making:
        family = None if captures.opaque else _families.get(key)
        if family is None:
            family = Family(captures.kept)
            if not captures.opaque:
                if len(_families) >= MOST_FAMILIES:
                    _families.clear()
                _families[key] = family
        found = family.serving(captures, sizes)
        return found or family.make(functions, captures, sizes, form, tables)


class _Tracing:
    """Functions with parameters in place of what they capture.

    Args:
        functions: score_mod and mask_mod; None for none.
        captures: what both capture.
        sizes: of the call.
        run_time: the numbers that become parameters.
    """

    def __init__(
        self,
        functions: tuple[Any, Any],
        captures: Captures,
        sizes: Mapping[Any, int],
        run_time: frozenset[int] = frozenset(),
    ) -> None:
        names = _names(captures)
        self._functions, self._captures = functions, captures
        self.numbers = {
            at: _number(names[captures.numbers[at][1]], captures.numbers[at][0]) for at in run_time
        }
        self.tensors = {
            id(x): CapturedTensor(
                names[id(x)], real, first_dims(real), sizes, is_number=x.dim() == 0
            )
            for x in captures.tensors
            if x.dtype in PARAMETER_DTYPES and x.dim() <= 4
            for real in [x.detach().reshape(1) if x.dim() == 0 else x.detach()]
        }
        # What the indices of a tensor are tells what its dimensions mean.
        loads, compared = _loads(*self.functions())
        for at, x in list(self.tensors.items()):
            dims = named_dims(x, loads.get(x.sym, []), sizes)
            in_order = x.sym in compared and dims[-1] == "kv_len" and _is_sorted(x.real)
            self.tensors[at] = CapturedTensor(
                x.name, x.real, dims, sizes, sorted=in_order, is_number=x.is_number
            )
            x.forget()

    def __enter__(self) -> _Tracing:
        return self

    def __exit__(self, *error: object) -> None:
        for x in self.tensors.values():
            x.forget()

    def functions(self) -> tuple[Score | None, Mask | None]:
        """The score and the mask."""
        score, mask = self._functions
        places = {self._captures.numbers[at][1]: symbol for at, symbol in self.numbers.items()}
        values = {at: x[0] if x.is_number else x for at, x in self.tensors.items()}
        replaced = Replaced(values, places)
        return (
            None if score is None else as_score(_labelled(replaced(score), score)),
            None if mask is None else as_mask(_labelled(replaced(mask), mask)),
        )


def _traces(
    functions: tuple[Any, Any],
    captures: Captures,
    sizes: Mapping[Any, int],
    run_time: frozenset[int],
) -> bool:
    """Whether the functions can be traced with these numbers as symbols."""
    try:
        with _Tracing(functions, captures, sizes, run_time):
            return True
    except FlashgenError:
        return False


def symbols_of(mask: Any, captures: Captures, sizes: Mapping[Any, int]) -> set[Any] | None:
    """The symbols that a mask function depends on; None if it shows everything."""
    with _Tracing((None, mask), captures, sizes) as tracing:
        traced = tracing.functions()[1]
        assert traced is not None
        sym = traced.traced.sym
    return None if sym == sympy.true else set(sym.free_symbols)


def _traced(
    functions: tuple[Any, Any],
    captures: Captures,
    sizes: Mapping[Any, int],
    form: Form,
    tables: BlockTables | None,
    run_time: frozenset[int],
) -> Variant:
    """A variant, traced with these numbers as symbols."""
    with _Tracing(functions, captures, sizes, run_time) as tracing:
        score, mask = tracing.functions()
        dtype: Any = form.dtype
        spec = AttentionSpec(
            head_dim=form.head_dims,
            dtype=dtype,
            mask=_showing(_with_tables(mask, tables)),
            score=score,
            input_precision=form.input_precision,
            targets=form.targets,
            name=_name(score, mask),
        )
        module = compiled(spec)
        used = {param.name for param in spec.params}
        makers: dict[str, Maker] = {}
        of_sizes: list[tuple[int, int, Any]] = []
        exact: list[tuple[int, torch.Size]] = []
        nonnegative: list[Any] = []
        for at, real in enumerate(captures.tensors):
            waiting = [tracing.tensors[id(real)]] if id(real) in tracing.tensors else []
            while waiting:
                one = waiting.pop()
                waiting += one.derived.values()
                if one.exact:
                    exact.append((at, real.shape))
                nonnegative += one.nonnegative
                if one.name in used:
                    makers[one.name] = _maker(at, one)
                    of_sizes += _sizes_of(at, one, sizes)
        return Variant(
            module=module,
            numbers={n.name: at for at, n in tracing.numbers.items() if n.name in used},
            tensors=makers,
            sizes=of_sizes,
            exact=exact,
            nonnegative=nonnegative,
        )


def _with_tables(mask: Mask | None, tables: BlockTables | None) -> Mask:
    joined = mask if tables is None else tables.joined(mask)
    return full() if joined is None else joined


def _showing(mask: Mask) -> Mask:
    """The mask; if it hides all keys for these numbers, one that hides them by their positions.

    A spec that shows nothing is a mistake, and a window of 0 in a call of FlexAttention's is not.
    """
    return as_mask(_nothing) if trace(mask).expr == sympy.false else mask


def _nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 0


def _maker(at: int, tensor: CapturedTensor) -> Maker:
    """What makes a parameter's tensor: the captured one, in the parameter's dtype."""
    make, is_number, dtype = tensor.make, tensor.is_number, PARAMETER_DTYPES[tensor.real.dtype]
    name = tensor.name

    def of(tensors: list[torch.Tensor], device: torch.device, waits: bool) -> torch.Tensor:
        x = tensors[at]
        if is_number:
            x = x.reshape(1).to(device)  # as in torch, a number may be on the CPU
        if make is not None:
            x = make(x)
        return x if x.dtype == dtype else converted(name, x, dtype, waits=waits)

    return of


def _sizes_of(
    at: int, tensor: CapturedTensor, sizes: Mapping[Any, int]
) -> list[tuple[int, int, Any]]:
    """The sizes that a captured tensor must have."""
    if tensor.make is not None or tensor.is_number:
        return []  # of the first, all sizes are exact
    found: list[tuple[int, int, Any]] = []
    for dim, size in enumerate(tensor.dims):
        if size is not None:
            symbol = size.sym
            found.append((at, dim, symbol if symbol in sizes else resolved(size, sizes)))
    return found


def _is_sorted(real: torch.Tensor) -> bool:
    """Whether ids never fall along the last dimension, but for padding behind the last."""
    if real.is_meta:
        return True  # calls check the order
    falls = (real[..., 1:] < real[..., :-1]).sum(-1)
    return bool((falls <= 1).all())


def _loads(score: Score | None, mask: Mask | None) -> tuple[dict[Any, list[Load]], set[Any]]:
    """The elements that both functions read by tensor, and the tensors that masks compare."""
    loads: dict[Any, list[Load]] = {}
    compared: set[Any] = set()
    for function in (mask, score):
        if function is not None:
            for load in sorted(function.traced.sym.atoms(Load), key=str):
                loads.setdefault(load.args[0], []).append(load)
    for relation in () if mask is None else mask.traced.sym.atoms(sympy.Eq):
        sides = [side.args for side in relation.args if isinstance(side, Load)]
        if len(sides) == 2 and {sides[0][-1], sides[1][-1]} <= {Q_IDX, KV_IDX}:
            compared |= {side[0] for side in sides}
    return loads, compared


def _number(name: str, value: int | float) -> Int | Float:
    """A captured number as a parameter."""
    if isinstance(value, int):
        return Int(name, min=1 if value > 0 else 0 if value == 0 else -(2**30))
    return Float(name, above=0.0 if value > 0 else None)


def _names(captures: Captures) -> dict[Any, str]:
    """A parameter's name for each number, by its place, and for each tensor, by its id."""
    found: dict[Any, str] = {}
    used = {LISTED, FULL}
    for x in captures.tensors:
        found[id(x)] = _free(captures.names[id(x)], used)
    for _, place in captures.numbers:
        found[place] = _free(place[-1], used)
    return found


def _free(wanted: Any, used: set[str]) -> str:
    """A name that is like the one wanted, and that a parameter can have."""
    name = re.sub(r"\W", "_", str(wanted), flags=re.ASCII)
    if not name.isidentifier() or name.startswith("_"):
        name = f"captured{name}" if name[:1] == "_" else f"captured_{name}"
    number, free = 0, name
    while free in used or free in RESERVED_NAMES or is_taken(free, dropout=True):
        number += 1
        free = f"{name}_{'x' * number}"
    used.add(free)
    return free


def _name(score: Score | None, mask: Mask | None) -> str:
    """The module's name."""
    labels = [function.label for function in (score, mask) if function is not None]
    return re.sub(r"\W+", "_", "_".join(["flex", *labels]), flags=re.ASCII).strip("_")[:80]


def _labelled(function: Any, original: Any) -> Any:
    """The function with the name of the original."""
    if not hasattr(function, "__name__"):
        named = type(original).__name__

        def call(*arguments: Any) -> Any:
            return function(*arguments)

        call.__name__ = call.__qualname__ = named
        return call
    return function


def explained(error: Exception) -> str:
    """A refusal's message, with the way out."""
    return f"{error}; or pass fallback='torch', and torch's FlexAttention computes the call"

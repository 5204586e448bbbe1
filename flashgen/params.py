"""Int, Float and Tensor: what a spec leaves to the call. Each is a keyword of ``attention``."""

from __future__ import annotations

import keyword
import math
from typing import Any, NoReturn

import sympy

from flashgen.declared import Param
from flashgen.errors import MaskError, shown
from flashgen.symbols import (
    BATCH,
    KV_HEADS,
    KV_LEN,
    Q_HEADS,
    Q_LEN,
    SCORE,
    SYMBOLS,
    Load,
    Product,
)
from flashgen.tracing.expr import Expr, apply, concrete, is_bound, merged_params
from flashgen.tracing.kinds import INTEGER
from flashgen.tracing.rows import indexed
from flashgen.tracing.user_code import mistake

#: Names a declared parameter cannot take: flashgen's own symbols and the arguments of `attention`.
RESERVED_NAMES = frozenset(
    ["q", "k", "v", "scale", "return_lse", SCORE.name, *(symbol.name for symbol in SYMBOLS)]
)

#: The names of a tensor's dimensions.
DIMENSIONS = {symbol.name: symbol for symbol in (BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN)}

INTEGER_DTYPES = ("int32", "bool")
FLOAT_DTYPES = ("float32", "float16", "bfloat16")


class Int(Expr, Param):
    """A run-time integer: a keyword argument of the generated ``attention``.

    Args:
        name: the argument's name.
        default: its value when the call leaves it out; None makes it required.
        min: the least value accepted. The generated ``attention`` raises ValueError below it, and
            the derived loop bounds rely on it.
        doc: one line for the generated docstring.
    """

    __slots__ = ("default", "doc", "min", "name")

    def __init__(
        self, name: str, default: int | None = None, *, min: int = 0, doc: str = ""
    ) -> None:
        _check_words("Int", name, doc)
        for field, value in (("min", min), ("default", min if default is None else default)):
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not (is_whole and abs(value) <= 2**30):
                raise MaskError(
                    f"Int({name!r}): {field}={value!r}; give a whole number from -2**30 to 2**30"
                )
        if default is not None and default < min:
            raise MaskError(f"Int({name!r}): default={default} is below min={min}; raise it")
        super().__init__(sympy.Symbol(name, integer=True), (self,))
        self.name, self.default, self.min, self.doc = name, default, min, doc

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        return ("Int", self.name, self.default, self.min)

    def __repr__(self) -> str:
        return f"Int({self.name!r}, {self.default}, min={self.min})"


class Float(Expr, Param):
    """A run-time number: a keyword argument of the generated ``attention``.

    Args:
        name: the argument's name.
        default: its value when the call leaves it out; None makes it required.
        above: a bound that the value has to exceed; None accepts every finite number.
        doc: one line for the generated docstring.
    """

    __slots__ = ("above", "default", "doc", "name")

    def __init__(
        self,
        name: str,
        default: float | None = None,
        *,
        above: float | None = None,
        doc: str = "",
    ) -> None:
        _check_words("Float", name, doc)
        for field, value in (("above", above), ("default", default)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and abs(value) < math.inf):
                raise MaskError(f"Float({name!r}): {field}={value!r}; give a finite number")
        if default is not None and not _exceeds(default, above):
            raise MaskError(
                f"Float({name!r}): default={default} is refused; take a finite number above {above}"
            )
        super().__init__(sympy.Symbol(name, real=True), (self,))
        self.name, self.above, self.doc = name, above, doc
        self.default = None if default is None else float(default)

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        return ("Float", self.name, self.default, self.above)

    def __repr__(self) -> str:
        return f"Float({self.name!r}, {self.default}, above={self.above})"


def dtype_name(dtype: Any) -> Any:
    """The name of one of torch's dtypes, ``"bfloat16"``; anything else as it is."""
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype


class Tensor(Param):
    """A run-time tensor, indexed by mask and score functions: ``doc[b, q_idx]``, ``slopes[h]``.

    Args:
        name: the argument's name.
        dims: the size of each dimension: ``"batch"``, ``"num_q_heads"``, ``"num_kv_heads"``,
            ``"q_len"``, ``"kv_len"``, a number, an expression of ``q_len``, ``kv_len`` and declared
            `Int` parameters, or None for any size.
        dtype: ``"int32"``, ``"bool"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``, or torch's
            of that name. A call may pass 16 bits where float32 is declared.
        sorted: its values never fall along the last dimension, as the ids of packed documents.
            Loop bounds are then derived from comparisons of its elements. Each call checks the
            order: for a tensor that is not sorted, it visits all tiles, which takes longer. If
            elements are only compared for equality, they may also start over behind the largest,
            with values below the first: 1, 2, 3, then padding of 0 or -1.
        doc: one line for the generated docstring.

    An index outside of the tensor reads 0, or False; so does a negative one, which does not count
    from the end.
    """

    __slots__ = ("_names", "dims", "doc", "dtype", "name", "sorted", "sym")

    default = None

    def __init__(
        self,
        name: str,
        dims: tuple[str | int | Expr | None, ...],
        dtype: str = "float32",
        *,
        sorted: bool = False,
        doc: str = "",
    ) -> None:
        kind, dtype = type(self).__name__, dtype_name(dtype)
        _check_words(kind, name, doc)
        if dtype not in INTEGER_DTYPES + FLOAT_DTYPES:
            known = ", ".join(INTEGER_DTYPES + FLOAT_DTYPES)
            raise MaskError(f"{kind}({name!r}): dtype={dtype!r} is unknown; take one of {known}")
        if not isinstance(dims, tuple | list) or not 1 <= len(dims) <= 4:
            raise MaskError(f"{kind}({name!r}): dims={dims!r}; {_sizes(dims)}")
        if sorted and dtype != "int32":
            raise MaskError(f"Tensor({name!r}): sorted=True is for dtype='int32'; leave it out")
        self.name, self.dtype, self.sorted, self.doc = name, dtype, sorted, doc
        self.dims = tuple(_dimension(name, dim) for dim in dims)
        self._names = tuple(map(str, self.dims))
        whole = {"integer": True} if dtype in INTEGER_DTYPES else {"real": True}
        self.sym = sympy.Symbol(name, **whole)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each dimension, such as ``"batch"``, or its size as text."""
        return self._names

    @property
    def is_float(self) -> bool:
        """Whether its elements are floats, which can have a gradient."""
        return self.dtype in FLOAT_DTYPES

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        dims = tuple(None if dim is None else str(dim.sym) for dim in self.dims)
        return ("Tensor", self.name, dims, self.dtype, self.sorted)

    def __getitem__(self, index: Any) -> Any:
        """The element at one index for each dimension; with fewer, a `Row` to index further."""
        return indexed(self, index, self._element)

    def _element(self, indices: tuple[Any, ...]) -> Any:
        if is_bound():
            tensor = concrete(Expr(self.sym))
            return tensor[tuple(map(concrete, indices))]
        exprs = [apply("+", i, 0) for i in indices]
        for expr, size in zip(exprs, self.dims, strict=True):
            if expr.kind != INTEGER:
                raise mistake(f"{self.name} is indexed by `{expr}`", "cut the fraction with .int()")
            if expr.sym.is_Integer and expr.sym < 0:
                raise mistake(
                    f"{self.name} is indexed by {expr}, which does not count from the end",
                    _from_the_start(size, expr.sym),
                )
            if size is None or not (size.sym.is_Integer and expr.sym.is_Integer):
                continue
            if expr.sym >= size.sym:
                raise mistake(
                    f"{self.name} is indexed by {expr} along a dimension of {size}",
                    f"write an index up to {size.sym - 1}",
                )
        element = Load(self.sym, *(expr.sym for expr in exprs))
        if self.dtype == "bool":
            element = sympy.Ne(element, 0, evaluate=False)
        sizes = [dim for dim in self.dims if dim is not None]
        return Expr(element, merged_params([Expr(self.sym, (self,)), *exprs, *sizes]))

    def __rmatmul__(self, vector: Any) -> Any:
        """In a feature map: the product of a head's vector with this matrix, ``x @ M``."""
        if is_bound():
            return vector @ concrete(Expr(self.sym))
        if not isinstance(vector, Expr):
            return NotImplemented
        if vector.sym.free_symbols & {SCORE, *SYMBOLS}:
            raise mistake(
                f"`{vector} @ {self.name}` is a product of numbers: vectors are in feature maps",
                f"index {self.name} instead",
            )
        if not self.is_float or hasattr(self, "elements"):
            raise mistake(
                f"{self.name} is no matrix that a call passes and that can have a gradient",
                f"declare it as Tensor({self.name!r}, (head_dim, columns)), of floats",
            )
        return Expr(Product(vector.sym, self.sym), merged_params([vector, Expr(self.sym, (self,))]))

    def __matmul__(self, vector: Any) -> NoReturn:
        problem = f"`{self.name} @ {vector}` is no product of a vector"
        raise mistake(problem, f"write x @ {self.name}")

    # Without __iter__ Python would iterate by __getitem__, which never ends.
    def __iter__(self) -> NoReturn:
        raise mistake(
            f"{self.name} is iterated over, as by `for`, `in`, sum and list",
            "write out the elements that are meant, each by its index",
        )

    def __bool__(self) -> NoReturn:
        raise mistake(
            f"{self.name} is neither true nor false",
            "compare its elements, and write `is None` to ask whether there is a tensor",
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Torch's attributes and methods, as in ``ids.shape[1]``: there is no tensor yet."""
        raise AttributeError(
            f"a declared {type(self).__name__} is indexed and nothing else: it has no `{name}`; "
            "sizes are q_len, kv_len, numbers and Int parameters"
        )

    def __repr__(self) -> str:
        dims = ", ".join("None" if dim is None else str(dim.sym) for dim in self.dims)
        return f"Tensor({self.name!r}, ({dims}), {self.dtype!r}, sorted={self.sorted})"


def _check_words(kind: str, name: str, doc: str) -> None:
    """Raises MaskError for an invalid name, or a doc that is not one line of text."""
    is_identifier = isinstance(name, str) and name.isidentifier() and name.isascii()
    if not is_identifier or keyword.iskeyword(name) or name in RESERVED_NAMES:
        raise MaskError(
            f"{kind}({name!r}): not usable as an argument's name; "
            f"take an ASCII identifier that is no keyword and none of {sorted(RESERVED_NAMES)}"
        )
    if not isinstance(doc, str) or not doc.isprintable():
        raise MaskError(f"{kind}({name!r}): doc={shown(doc)}; give one line of printable text")


def _from_the_start(size: Expr | None, index: Any) -> str:
    """What to write for a negative index."""
    of_call = size is not None and {BATCH, Q_HEADS, KV_HEADS} & size.sym.free_symbols
    meant = None if size is None or of_call else size.sym + index
    if meant is None or (meant.is_Integer and meant < 0):
        return "write an index from 0 up"
    return f"write an index from 0 up: {meant} for the one meant"


def _sizes(dims: Any) -> str:
    """What to write if the number of dimensions is not allowed."""
    if dims in ((), []):
        return "a single number in a tensor is of (1,), and x[0] where it is read"
    return "give a tuple of 1 to 4 sizes"


def _exceeds(value: float, bound: float | None) -> bool:
    return bound is None or value > bound


def _dimension(name: str, dim: str | int | Expr | None) -> Expr | None:
    """The size of a dimension as an expression; None for any size."""
    if dim is None:
        return None
    if isinstance(dim, str) and dim in DIMENSIONS:
        return Expr(DIMENSIONS[dim])
    if isinstance(dim, int) and not isinstance(dim, bool) and dim > 0:
        return Expr(sympy.Integer(dim))
    if isinstance(dim, Expr) and dim.kind == INTEGER and not dim.sym.has(Load):
        return dim
    raise MaskError(
        f"Tensor({name!r}): a dimension is {dim!r}; write one of "
        f"{', '.join(DIMENSIONS)}, a number, "
        "an expression of q_len, kv_len and Int parameters, or None"
    )

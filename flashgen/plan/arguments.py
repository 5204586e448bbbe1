"""Arguments: a spec's declared parameters as the generated module prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from flashgen.block_lists import BlockLists
from flashgen.constants import Constant
from flashgen.declared import Param
from flashgen.dropout import DropoutP, Seed
from flashgen.params import Float, Int, Tensor
from flashgen.plan.constants import PrintedConstant
from flashgen.plan.int32_overflow import SIZES, LargeInteger
from flashgen.symbolic.printer import torch_source
from flashgen.symbolic.tables import RangeTable, RowTable
from flashgen.tracing.expr import Expr

#: Dtypes that kernels convert to float32 where they load an element.
HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Lists:
    """Lists of blocks that a call passes: `attention` makes the table of them that kernels read.

    Attributes:
        sizes: of each dimension its size as an expression of q and k, or ``"None"``.
        blocks: how many blocks of keys there are, likewise.
        counts: the name of the tensor that says how many entries count; ``""`` for all.
    """

    sizes: tuple[str, ...]
    blocks: str
    counts: str


@dataclass(frozen=True)
class Argument:
    """A keyword of ``attention``, as text.

    Attributes:
        name: of it in the module.
        kind: ``"int"``, ``"float"``, ``"probability"`` or ``"tensor"``.
        default: the text after the name in a signature: ``"=1024"``, or ``""`` if it is required.
        accepts: the accepted values, for the docstring.
        annotation: its type, for the operator's schema.
        doc: the user's own line about it, as it stands in a docstring.
        least: of an int, the smallest value; of a float, an exclusive lower bound, ``""`` for none.
        dtype: of a tensor, torch's name of it.
        sizes: of a tensor, for each dimension its size as an expression of q and k, or ``"None"``.
        keyword: what ``attention`` calls it.
        lists: of a table that is made of lists, what the call passes; None for any other.
        as_passed: of a tensor of float32, whether kernels read one that is passed in 16 bits as it
            is: if it has elements for queries and keys, a copy in float32 would take long.
    """

    name: str
    kind: str
    default: str
    accepts: str
    annotation: str
    doc: str
    least: str = ""
    dtype: str = ""
    sizes: tuple[str, ...] = ()
    keyword: str = ""
    as_passed: bool = False
    lists: Lists | None = None

    @property
    def ndim(self) -> int:
        """Of a tensor, its number of dimensions."""
        return len(self.sizes)

    @property
    def is_float_tensor(self) -> bool:
        """Whether it can have a gradient."""
        return "float" in self.dtype


@dataclass(frozen=True)
class KernelTensor:
    """A tensor that a kernel reads, by pointer, sizes and strides.

    Attributes:
        name: of the variable that holds it.
        ndim: its number of dimensions.
        dtype: torch's name of it.
        halves: whether it may hold 16-bit numbers.
    """

    name: str
    ndim: int
    dtype: str
    halves: bool


@dataclass(frozen=True)
class KernelArguments:
    """A kernel's arguments for parameters, and for tensors that the launcher makes.

    Attributes:
        scalars: names of numbers, in the parameters' order.
        tensors: parameters in their order, then constants, then row tables.
        ints: its arguments whose values never cause a recompile.
    """

    scalars: tuple[str, ...]
    tensors: tuple[KernelTensor, ...]
    ints: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them, one for each tensor."""
        return (*self.scalars, *(tensor.name for tensor in self.tensors))


def sizing_numbers(
    params: Collection[Param],
    constants: Iterable[Constant],
    integers: Iterable[LargeInteger],
) -> tuple[str, ...]:
    """Names of the numbers that sizes are checked with, in the parameters' order."""
    sizes = [size for param in params if isinstance(param, Tensor) for size in param.dims]
    sizes += [limit for constant in constants for _, limit in constant.limits]
    names = {symbol.name for size in sizes if size is not None for symbol in size.sym.free_symbols}
    names |= {name for integer in integers for name in integer.names}
    return tuple(p.name for p in params if not isinstance(p, Tensor) and p.name in names)


def kernel_arguments(
    arguments: Iterable[Argument],
    constants: Iterable[PrintedConstant],
    tables: Iterable[RowTable | RangeTable],
    names: Collection[str],
) -> KernelArguments:
    """Of all parameters, constants and tables that the launcher makes those in ``names``."""
    read = [argument for argument in arguments if argument.name in names]
    scalars = tuple(a.name for a in read if a.kind != "tensor")
    tensors = [
        KernelTensor(a.name, a.ndim, a.dtype, a.as_passed or a.dtype in HALVES)
        for a in read
        if a.kind == "tensor"
    ]
    tensors += [
        KernelTensor(c.name, c.ndim, c.dtype, c.dtype in HALVES)
        for c in constants
        if c.name in names
    ]
    tensors += [
        KernelTensor(t.name, len(t.values.dims), "int32", False) for t in tables if t.name in names
    ]
    ints = [a.name for a in read if a.kind == "int"]
    ints += [f"{t.name}_size_{i}" for t in tensors for i in range(t.ndim)]
    # The last dimension's stride is usually 1, which the compiler should know.
    ints += [f"{t.name}_stride_{i}" for t in tensors for i in range(t.ndim - 1)]
    return KernelArguments(scalars, tuple(tensors), tuple(ints))


def argument(param: Param, keyword: str = "") -> Argument:
    """A declared parameter as text; its keyword is its name, unless another is given."""
    return replace(_argument(param), keyword=keyword or param.name)


def _argument(param: Param) -> Argument:
    """A parameter without its keyword.

    Raises:
        TypeError: a kind that is not known.
    """
    default = "" if param.default is None else f"={param.default}"
    doc = _quoted(param.doc)
    match param:
        case Int():
            accepts = f"an integer of the mask, from {param.min} to 2**30"
            return Argument(param.name, "int", default, accepts, "int", doc, str(param.min))
        case Float():
            least = "" if param.above is None else str(param.above)
            accepts = "a finite number of 32 bits" + (f" above {least}" if least else "")
            return Argument(param.name, "float", default, accepts, "float", doc, least)
        case BlockLists():
            given = _argument(param.index)
            counts = param.counts.name if param.counts is not None else ""
            sizes = tuple(map(_size, param.dims))
            return replace(
                given, dtype=param.dtype, sizes=sizes, lists=Lists(given.sizes, sizes[-1], counts)
            )
        case Tensor():
            shape = ", ".join("any" if dim is None else torch_source(dim.sym) for dim in param.dims)
            order = ", ascending along its last dimension" if param.sorted else ""
            halves = ", or 16 bits" if param.dtype == "float32" else ""
            accepts = f"({shape}{',' if len(param.dims) == 1 else ''}) {param.dtype}{halves}{order}"
            return Argument(
                param.name, "tensor", default, accepts, "torch.Tensor", doc,
                dtype=param.dtype, sizes=tuple(map(_size, param.dims)),
                as_passed=param.dtype == "float32" and {"q_len", "kv_len"} <= set(param.names),
            )  # fmt: skip
        case DropoutP():
            accepts = (
                "a number from 0 to before 1, rounded to a multiple of 2^-16, "
                "by which weights are dropped at random"
            )
            return Argument(
                param.name, "probability", default, accepts, "float",
                "those that are kept are divided by the probability of that",
            )  # fmt: skip
        case Seed():
            accepts = "an int64 tensor of one element, or an int"
            return Argument(
                param.name, "tensor", "=None", accepts, "torch.Tensor",
                "calls of one seed drop the same weights; None draws one by torch's generator",
                dtype="int64", sizes=("1",),
            )  # fmt: skip
    raise TypeError(f"no such parameter: {param!r}")


def _quoted(line: str) -> str:
    """A user's line as it stands in a docstring, which it neither ends nor escapes from."""
    return line.replace("\\", r"\\").replace('"""', r"\"\"\"")


def _size(dim: Expr | None) -> str:
    return "None" if dim is None else torch_source(dim.sym, SIZES)

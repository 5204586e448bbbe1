"""What torch's functions and tensor methods mean for a symbolic value, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.symbols import SCORE
from flashgen.tracing.torch_types import Device, dtype_of, is_device, is_half, kind_of_dtype
from flashgen.tracing.user_code import mistake

Apply = Callable[..., Any]

#: Names that are one of flashgen's operations.
OPERATORS = {
    "mul": "*", "multiply": "*", "div": "/", "true_divide": "/", "divide": "/", "pow": "**",
    "floor_divide": "//", "__floordiv__": "//", "remainder": "%",
    "neg": "neg", "negative": "neg", "abs": "abs", "absolute": "abs",
    "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "__lshift__": "<<", "__rshift__": ">>",
    "minimum": "minimum", "maximum": "maximum", "tanh": "tanh", "exp": "exp", "exp2": "exp2",
    "log": "log", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos",
    "sigmoid": "sigmoid", "special_expit": "sigmoid", "trunc": "truncate", "fix": "truncate",
    "floor": "floor", "ceil": "ceil",
    "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!=",
    "greater_equal": ">=", "greater": ">", "less_equal": "<=", "less": "<", "not_equal": "!=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~",
    "__and__": "&", "__or__": "|", "__xor__": "^",
    "where": "where",
}  # fmt: skip


def _logical(operation: str) -> Apply:
    """On conditions; a number is one where it is not 0."""

    def logical(apply: Apply, *operands: Any) -> Any:
        return apply(operation, *(apply("!=", x, 0) for x in operands))

    return logical


def _sum(operation: str) -> Apply:
    def add(apply: Apply, a: Any, b: Any, *, alpha: Any = 1) -> Any:
        return apply(operation, a, b if _is_one(alpha) else apply("*", alpha, b))

    return add


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int) and alpha == 1


def _clamp(apply: Apply, x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else apply("maximum", x, min)
    return x if max is None else apply("minimum", x, max)


def _extreme(operation: str) -> Apply:
    """Of two; torch's function of one takes the extreme of a whole tensor."""

    def extreme(apply: Apply, x: Any, other: Any = None, **others: Any) -> Any:
        if others or not hasattr(other, "__torch_function__"):
            raise mistake(
                f"torch's `{operation[:3]}` with one value looks through a tensor",
                f"give it two values, or write torch.clamp(x, {_OTHER[operation]}=0)",
            )
        return apply(operation, x, other)

    return extreme


_OTHER = {"minimum": "max", "maximum": "min"}


def _div(apply: Apply, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc":
        return apply("truncate", apply("/", a, b))
    if rounding_mode not in (None, "floor"):
        raise mistake(
            f"rounding_mode={rounding_mode!r} is unknown to torch", "write 'floor', 'trunc' or None"
        )
    return apply("/" if rounding_mode is None else "//", a, b)


def _cast(apply: Apply, x: Any, kind: str) -> Any:
    """To a float type it changes nothing but a condition: numbers are real until printed."""
    if kind == "condition":
        return apply("!=", x, 0)
    return apply("+", x, 0) if kind == "number" else apply("truncate", x)


def _to(
    apply: Apply,
    x: Any,
    *arguments: Any,
    dtype: Any = None,
    other: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Any:
    """``.to(dtype)``, ``.to(device)``, ``.to(device, dtype)`` or ``.to(other)``."""
    dtypes = [dtype, other, *(a for a in arguments if not (isinstance(a, bool) or is_device(a)))]
    for target in dtypes:
        if target is not None:
            return _cast(apply, _unrounded(x, target), kind_of_dtype(target))
    return x


def _unrounded(x: Any, dtype: Any) -> Any:
    """x, of which a cast to this dtype changes nothing that a kernel would keep.

    Raises:
        MaskError: it rounds to 16 bits, which kernels, in float32 throughout, do not.
    """
    if is_half(dtype) and getattr(x, "kind", None) != "condition":
        raise mistake(
            f"a cast to {dtype} rounds to 16 bits, and kernels compute scores in float32",
            "leave the cast out, or declare the tensor with that dtype",
        )
    return x


def _same(apply: Apply, x: Any, *arguments: Any, **options: Any) -> Any:
    """What changes how a tensor lies in memory, and none of its values."""
    return x


def _detach(apply: Apply, x: Any) -> Any:
    """Nothing, of what has no gradient."""
    tensors = (param for param in x.params if not hasattr(param, "elements"))  # but for constants
    learns = any(getattr(tensor, "is_float", False) for tensor in tensors)
    if learns or SCORE in x.sym.free_symbols:
        raise mistake(
            "`detach` cuts a gradient off, and gradients are derived of whole score functions",
            "leave it out; of positions and whole numbers it does nothing",
        )
    return x


def _like(
    apply: Apply, x: Any, value: Any, *, dtype: Any = None, size: Any = (), **placed: Any
) -> Any:
    """One value, of x's own type unless there is another.

    ``placed`` is of no matter here: device, layout, requires_grad and the like.
    """
    shape = tuple(size) if hasattr(size, "__iter__") else (size,)
    if shape:
        raise mistake(f"a tensor of shape {shape} is not traced", "a scalar is, of shape ()")
    kind = getattr(x, "kind", "number") if dtype is None else kind_of_dtype(dtype)
    return _cast(apply, apply("+", value, 0) if kind == "number" else value, kind)


def _new(value: int) -> Apply:
    """A scalar of one value, as FlexAttention's `and_masks` and `or_masks` begin with."""

    def new(apply: Apply, x: Any, size: Any = (), **options: Any) -> Any:
        return _like(apply, x, value, size=size, **options)

    return new


def _filled(value: int) -> Apply:
    return lambda apply, x, **options: _like(apply, x, value, **options)


def _masked_fill(apply: Apply, x: Any, mask: Any, value: Any) -> Any:
    of_conditions = getattr(x, "kind", "") == "condition"
    return apply("where", mask, apply("!=", value, 0) if of_conditions else value, x)


def _sign(apply: Apply, x: Any) -> Any:
    negative = apply("where", apply("<", x, 0), -1, 0)
    return apply("where", apply(">", x, 0), 1, negative)


def _log1p(apply: Apply, x: Any) -> Any:
    return apply("log", apply("+", 1, x))


def _softplus(apply: Apply, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """As torch does, ``x`` itself above the threshold."""
    scaled = x if _is_one(beta) else apply("*", x, beta)
    soft = _log1p(apply, apply("exp", apply("minimum", scaled, threshold)))
    soft = soft if _is_one(beta) else apply("/", soft, beta)
    return apply("where", apply(">", scaled, threshold), x, soft)


def _logaddexp(apply: Apply, a: Any, b: Any) -> Any:
    """``a`` and what b adds to it; where that much is b, b: a may be -inf."""
    rise = apply("-", b, a)
    sum_of = apply("+", a, _log1p(apply, apply("exp", apply("minimum", rise, 20))))
    return apply("where", apply(">", rise, 20), b, sum_of)


def _log_sigmoid(apply: Apply, x: Any) -> Any:
    return apply("neg", _softplus(apply, apply("neg", x)))


def _narrow(name: str) -> Apply:
    return lambda apply, x: _cast(apply, x, kind_of_dtype(name))


#: Names with arguments of their own: functions of (apply, *args, **kwargs).
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _sum("+"),
    "sub": _sum("-"),
    "subtract": _sum("-"),
    "rsub": lambda apply, a, b, alpha=1: _sum("-")(apply, b, a, alpha=alpha),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda apply, x, max: apply("minimum", x, max),
    "min": _extreme("minimum"),
    "max": _extreme("maximum"),
    "relu": lambda apply, x, inplace=False: apply("maximum", x, 0),
    "silu": lambda apply, x, inplace=False: apply("*", x, apply("sigmoid", x)),
    "softplus": _softplus,
    "logsigmoid": _log_sigmoid,
    "log_sigmoid": _log_sigmoid,
    "logaddexp": _logaddexp,
    "log1p": _log1p,
    "special_log1p": _log1p,
    "square": lambda apply, x: apply("*", x, x),
    "reciprocal": lambda apply, x: apply("/", 1, x),
    "sign": _sign,
    "sgn": _sign,
    "div": _div,
    "masked_fill": _masked_fill,
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "logical_not": _logical("~"),
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "new_full": lambda apply, x, size, fill_value, **options: _like(
        apply, x, fill_value, size=size, **options
    ),
    "new_tensor": lambda apply, x, data, **options: _like(apply, x, data, **options),
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "full_like": lambda apply, x, fill_value, **options: _like(apply, x, fill_value, **options),
    "to": _to,
    "type": lambda apply, x, dtype, non_blocking=False: _to(apply, x, dtype=dtype),
    "type_as": lambda apply, x, other: _cast(apply, x, kind_of_dtype(other)),
    "float": lambda apply, x: apply("+", x, 0),
    "double": lambda apply, x: apply("+", x, 0),
    "half": lambda apply, x: _to(apply, x, dtype="half"),
    "bfloat16": lambda apply, x: _to(apply, x, dtype="bfloat16"),
    "int": lambda apply, x: apply("truncate", x),
    "long": lambda apply, x: apply("truncate", x),
    "bool": lambda apply, x: apply("!=", x, 0),
    "short": _narrow("short"),
    "char": _narrow("char"),
    "byte": _narrow("byte"),
    "detach": _detach,
    **dict.fromkeys(("contiguous", "clone", "cpu", "cuda"), _same),
}

KNOWN = OPERATORS.keys() | FUNCTIONS.keys()

#: A tensor's attributes that are no methods.
ATTRIBUTES: dict[str, Callable[[str], Any]] = {"device": lambda kind: Device(), "dtype": dtype_of}


def call(name: str, apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of that name, by ``apply(operation, *operands)``; KeyError if it is unknown.

    Raises:
        TypeError: arguments that this function is not known to take.
        MaskError: arguments of which it means nothing for a symbolic value.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name](apply, *args, **kwargs)
    operation = OPERATORS[name]
    if name == "where" and kwargs.keys() == {"other"}:
        args, kwargs = (*args, kwargs["other"]), {}
    if kwargs:
        raise TypeError(f"{name} is not traced with {', '.join(f'{key}=' for key in kwargs)}")
    return apply(operation, *args)

"""torch's functions and tensor methods for symbolic values, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy

from flashgen.symbols import SCORE
from flashgen.tracing.torch_types import Device, Shape, dtype_of, is_device, is_half, kind_of_dtype
from flashgen.tracing.user_code import mistake

Apply = Callable[..., Any]

#: Names of torch for flashgen's operations.
OPERATORS = {
    "mul": "*", "multiply": "*", "div": "/", "true_divide": "/", "divide": "/", "pow": "**",
    "floor_divide": "//", "__floordiv__": "//", "remainder": "%",
    "neg": "neg", "negative": "neg", "abs": "abs", "absolute": "abs",
    "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "__lshift__": "<<", "__rshift__": ">>",
    "minimum": "minimum", "maximum": "maximum", "tanh": "tanh", "exp": "exp", "exp2": "exp2",
    "log": "log", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos",
    "sigmoid": "sigmoid", "special_expit": "sigmoid", "trunc": "truncate", "fix": "truncate",
    "floor": "floor", "ceil": "ceil", "erf": "erf", "special_erf": "erf",
    "atan": "atan", "arctan": "atan",
    "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!=",
    "greater_equal": ">=", "greater": ">", "less_equal": "<=", "less": "<", "not_equal": "!=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~",
    "__and__": "&", "__or__": "|", "__xor__": "^",
    "where": "where",
}  # fmt: skip


def _logical(operation: str) -> Apply:
    """An operation on conditions; a number counts as the condition that it is not 0."""

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
    """The extreme of two values; torch's function of one argument is for a whole tensor."""

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
    """A cast. To a float type it changes conditions only: numbers are real until printed."""
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
    """x, unchanged by a cast to this dtype.

    Raises:
        MaskError: the cast rounds to 16 bits, but kernels compute in float32 throughout.
    """
    if is_half(dtype) and getattr(x, "kind", None) != "condition":
        raise mistake(
            f"a cast to {dtype} rounds to 16 bits, and kernels compute scores in float32",
            "leave the cast out, or declare the tensor with that dtype",
        )
    return x


def _same(apply: Apply, x: Any, *arguments: Any, **options: Any) -> Any:
    """X itself: the function changes a tensor's layout in memory, not its values."""
    return x


def _broadcast(apply: Apply, x: Any, *sizes: Any, **named: Any) -> Any:
    """X itself: the function gives a single value another shape, as ``view(-1, 1)`` does."""
    flat = [n for size in (*sizes, *named.values()) for n in _numbers(size)]
    if any(n not in (1, -1) for n in flat):
        raise mistake(
            f"a symbolic value, which is a single one, is given the sizes {tuple(flat)}",
            "leave it out: it meets whatever it is joined with",
        )
    return x


def _numbers(size: Any) -> tuple[Any, ...]:
    return tuple(size) if isinstance(size, tuple | list) else (size,)


def _along(apply: Apply, x: Any, *dims: Any, **named: Any) -> Any:
    """X itself: the function adds or removes an axis of one element."""
    return x


def _as_other(apply: Apply, x: Any, other: Any) -> Any:
    """X itself: the function takes the shape of another single value."""
    return _broadcast(apply, x, other.shape)


def _detach(apply: Apply, x: Any) -> Any:
    """X itself, if x has no gradient."""
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
    """One value, of x's own type unless ``dtype`` names another.

    ``placed`` has no effect: device, layout, requires_grad and the like.
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
    """Softplus, which as in torch is ``x`` itself above the threshold."""
    scaled = x if _is_one(beta) else apply("*", x, beta)
    soft = _log1p(apply, apply("exp", apply("minimum", scaled, threshold)))
    soft = soft if _is_one(beta) else apply("/", soft, beta)
    return apply("where", apply(">", scaled, threshold), x, soft)


def _logaddexp(apply: Apply, a: Any, b: Any) -> Any:
    """``a + log1p(exp(b - a))``; b if b - a exceeds 20, because a may be -inf."""
    rise = apply("-", b, a)
    sum_of = apply("+", a, _log1p(apply, apply("exp", apply("minimum", rise, 20))))
    return apply("where", apply(">", rise, 20), b, sum_of)


def _gelu(apply: Apply, x: Any, *, approximate: str = "none") -> Any:
    """``x`` times the normal distribution's share below x, or the approximation by tanh."""
    if approximate not in ("none", "tanh"):
        raise mistake(f"approximate={approximate!r} is unknown to torch", "write 'none' or 'tanh'")
    if approximate == "tanh":
        cube = apply("*", apply("*", x, x), apply("*", x, 0.044715))
        inner = apply("tanh", apply("*", apply("+", x, cube), math.sqrt(2 / math.pi)))
    else:
        inner = apply("erf", apply("*", x, math.sqrt(0.5)))
    return apply("*", apply("*", x, 0.5), apply("+", 1, inner))


def _mish(apply: Apply, x: Any, inplace: bool = False) -> Any:
    """``x * tanh(softplus(x))``, in a form whose exponentials lose no digits."""
    power = apply("exp", apply("minimum", x, 20))
    twice = apply("*", power, apply("+", power, 2))
    return apply(
        "where", apply(">", x, 20), x, apply("*", x, apply("/", twice, apply("+", twice, 2)))
    )


def _hard(scale: Callable[[Apply, Any, Any], Any]) -> Apply:
    """A function of ``x`` made from relu6 of ``x + 3``."""

    def hard(apply: Apply, x: Any, inplace: bool = False) -> Any:
        return scale(apply, x, apply("/", _clamp(apply, apply("+", x, 3), 0, 6), 6))

    return hard


def _half_sum(sign: str) -> Apply:
    """``(exp(x) + exp(-x)) / 2``, or the difference."""

    def half_sum(apply: Apply, x: Any) -> Any:
        return apply("/", apply(sign, apply("exp", x), apply("exp", apply("neg", x))), 2)

    return half_sum


def _sinc(apply: Apply, x: Any) -> Any:
    """``sin(pi * x) / (pi * x)``; near 0, where it and its slope lose digits, its series."""
    angle = apply("*", x, math.pi)
    square = apply("*", angle, angle)
    near: Any = 1
    for product in (72, 42, 20, 6):
        near = apply("-", 1, apply("/", apply("*", square, near), product))
    is_near = apply("<", square, 0.25)
    far = apply("where", is_near, 1, angle)  # autograd would make NaN of an untaken 0 / 0
    return apply("where", is_near, near, apply("/", apply("sin", far), far))


def _heaviside(apply: Apply, x: Any, values: Any) -> Any:
    step = apply("where", apply(">", x, 0), 1, 0)
    return apply("where", apply("==", x, 0), values, step)


def _elu(
    apply: Apply, x: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0,
    inplace: bool = False,
) -> Any:  # fmt: skip
    below = apply("exp", apply("*", apply("minimum", x, 0), input_scale))
    bent = apply("where", apply(">", x, 0), x, apply("*", alpha, apply("-", below, 1)))
    return bent if scale == 1 else apply("*", bent, scale)


def _leaky(apply: Apply, x: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    return apply("where", apply(">", x, 0), x, apply("*", x, negative_slope))


def _lerp(apply: Apply, a: Any, b: Any, weight: Any) -> Any:
    return apply("+", a, apply("*", weight, apply("-", b, a)))


def _fmod(apply: Apply, a: Any, b: Any) -> Any:
    """The remainder with the sign of ``a``, for a quotient truncated towards zero."""
    down = apply("floor", apply("/", apply("abs", a), apply("abs", b)))
    left = apply("-", apply("abs", a), apply("*", apply("abs", b), down))
    return apply("where", apply("<", a, 0), apply("neg", left), left)


def _frac(apply: Apply, x: Any) -> Any:
    return _fmod(apply, x, 1)


_GREATEST = 3.4028234663852886e38
#: The number for infinity: as large for a softmax, and not so low that it hides a key.
_LARGE = 9e19


def _nan_to_num(
    apply: Apply, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Any:
    """X with numbers in place of NaN and infinities of float32."""
    if getattr(x, "kind", "number") != "number":
        return x
    above, below = (_finite(given, large) for given, large in ((posinf, _LARGE), (neginf, -_LARGE)))
    sym = getattr(x, "sym", None)
    if isinstance(sym, sympy.Piecewise) and sym.args[-1][1] == sympy.true:
        # What a choice hides by -inf, as where(condition, score, -inf), is a number by itself.
        known = {sympy.oo: above, -sympy.oo: below, sympy.nan: 0 if nan is None else nan}
        *earlier, whole = (
            known[value] if value in known
            else _nan_to_num(apply, type(x)(value, x.params), nan, above, below)
            for value, _ in sym.args
        )  # fmt: skip
        for value, (_, when) in zip(reversed(earlier), reversed(sym.args[:-1]), strict=True):
            whole = apply("where", type(x)(when, x.params), value, whole)
        return whole
    rest = apply("where", apply("<", x, 0), below, 0 if nan is None else nan)
    infinite = apply("where", apply(">", x, 0), above, rest)
    return apply("where", _is_finite(apply, x), x, infinite)


def _finite(given: Any, large: float) -> Any:
    """What stands for infinity: a given number, but none beyond ``large`` that is finite."""
    if given is None or (isinstance(given, int | float) and abs(large) < abs(given) < math.inf):
        return large
    return given


def _is_finite(apply: Apply, x: Any) -> Any:
    """Whether x is a number of float32; NaN compares as false."""
    return apply("&", apply("<=", x, _GREATEST), apply(">=", x, -_GREATEST))


def _is_infinite(apply: Apply, x: Any) -> Any:
    return apply("|", apply(">", x, _GREATEST), apply("<", x, -_GREATEST))


def _added(operation: str) -> Apply:
    """``x + value * a * b``, or the quotient of a and b."""

    def added(apply: Apply, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
        return apply("+", x, apply("*", value, apply(operation, a, b)))

    return added


def _threshold(apply: Apply, x: Any, threshold: Any, value: Any, inplace: bool = False) -> Any:
    return apply("where", apply(">", x, threshold), x, value)


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
    "gelu": _gelu,
    "mish": _mish,
    "relu6": lambda apply, x, inplace=False: _clamp(apply, x, 0, 6),
    "hardtanh": lambda apply, x, min_val=-1.0, max_val=1.0, inplace=False: _clamp(
        apply, x, min_val, max_val
    ),
    "hardswish": _hard(lambda apply, x, share: apply("*", x, share)),
    "hardsigmoid": _hard(lambda apply, x, share: share),
    "elu": _elu,
    "leaky_relu": _leaky,
    "softsign": lambda apply, x: apply("/", x, apply("+", 1, apply("abs", x))),
    "cosh": _half_sum("+"),
    "sinh": _half_sum("-"),
    "tan": lambda apply, x: apply("/", apply("sin", x), apply("cos", x)),
    "expm1": lambda apply, x: apply("-", apply("exp", x), 1),
    "log10": lambda apply, x: apply("*", apply("log", x), 1 / math.log(10)),
    "sinc": _sinc,
    "special_sinc": _sinc,
    "heaviside": _heaviside,
    "lerp": _lerp,
    "fmod": _fmod,
    "frac": _frac,
    "nan_to_num": _nan_to_num,
    "isfinite": _is_finite,
    "isinf": _is_infinite,
    "addcmul": _added("*"),
    "addcdiv": _added("/"),
    "threshold": _threshold,
    "_threshold": _threshold,
    "tanhshrink": lambda apply, x: apply("-", x, apply("tanh", x)),
    "hypot": lambda apply, x, y: apply("sqrt", apply("+", apply("*", x, x), apply("*", y, y))),
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
    "_to_copy": lambda apply, x, dtype=None, **options: _to(apply, x, dtype=dtype),
    "size": lambda apply, x, dim=None: Shape() if dim is None else Shape()[dim],
    "dim": lambda apply, x: 0,
    "numel": lambda apply, x: 1,
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), _broadcast),
    **dict.fromkeys(("squeeze", "unsqueeze", "flatten", "ravel"), _along),
    **dict.fromkeys(("view_as", "reshape_as", "expand_as"), _as_other),
    **dict.fromkeys(("contiguous", "clone", "cpu", "cuda"), _same),
}

KNOWN = OPERATORS.keys() | FUNCTIONS.keys()

#: A tensor's attributes that are not methods.
ATTRIBUTES: dict[str, Callable[[str], Any]] = {
    "device": lambda kind: Device(),
    "dtype": dtype_of,
    "shape": lambda kind: Shape(),
    "ndim": lambda kind: 0,
}


def call(name: str, apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of that name, by ``apply(operation, *operands)``; KeyError if it is unknown.

    Raises:
        TypeError: arguments that the function is not known to take.
        MaskError: arguments for which the function has no meaning on a symbolic value.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name](apply, *args, **kwargs)
    operation = OPERATORS[name]
    if name == "where" and kwargs.keys() == {"other"}:
        args, kwargs = (*args, kwargs["other"]), {}
    if kwargs:
        raise TypeError(f"{name} is not traced with {', '.join(f'{key}=' for key in kwargs)}")
    return apply(operation, *args)

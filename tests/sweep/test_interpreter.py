"""What is quick in Triton's interpreter gives what Triton's own operations give."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton.ir import ROUNDING_MODE
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import ScanOps, TensorHandle, interpreter_semantic

from support.variants import import_file
from sweep.interpreter import KNOWN
from sweep.quick import QUICK
from sweep.quick_operands import PLAIN
from sweep.quick_rewriting import _compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:tl.where"),
    pytest.mark.skipif(not KNOWN, reason="this Triton computes its own way"),
]

SHAPES = ((), (8,), (1, 8), (4, 1), (4, 8), (16,))
TYPES = (tl.int1, tl.int32, tl.int64, tl.uint8, tl.float16, tl.bfloat16, tl.float32)
NUMBERS = (0, 1, -1, 3, 2**31 - 1, 2**31, 2**40, True, 0.0, -0.0, 0.3, 1e-40, float("inf"))

_NUMPY = {**PLAIN, tl.uint8: np.uint8}  # and bfloat16 as 16 bits

BINARY = sorted(set(QUICK) - {"where", "expand_dims", "cast", "load"})
MORE: dict[str, tuple[Any, ...]] = {
    **{name: (True,) for name in ("add", "sub", "mul")},
    **{name: (tl.PropagateNan.NONE,) for name in ("minimum", "maximum")},
}


def _tensor(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> tl.tensor:
    """Numbers of either sign, zeros and the greatest among them; of floats also what is none."""
    rng = np.random.default_rng([seed, *shape])
    of_numpy = _NUMPY.get(dtype, np.uint16)
    values = rng.integers(-4, 5, shape or (1,))
    if dtype.is_int_unsigned() or dtype is tl.bfloat16:
        values = abs(values)
    data = values.astype(of_numpy)
    if data.size > 1 and dtype.is_floating() and dtype is not tl.bfloat16:
        data.flat[0], data.flat[-1] = np.nan, np.inf
    return tl.tensor(
        TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype
    )


def _outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """The type and the numbers of a result, or which error there is."""
    try:
        x = function(*arguments)
    except Exception as error:
        return type(error), str(error)
    kind = _NUMPY.get(x.dtype, np.uint16) if not x.dtype.is_ptr() else np.uint64
    # Triton holds some booleans as integers.
    return str(x.type), [size.value for size in x.shape], x.handle.data.astype(kind).tobytes()


def _agree(name: str, *arguments: Any) -> None:
    triton_s = getattr(TritonSemantic(interpreter_semantic.builder), name)
    quick = getattr(interpreter_semantic, name)
    assert quick.__wrapped__.__func__ is triton_s.__func__
    ours, theirs = _outcome(quick, *arguments), _outcome(triton_s, *arguments)
    assert ours == theirs, (name, ours, theirs, [getattr(x, "type", x) for x in arguments])


@pytest.mark.parametrize("name", BINARY)
def test_two_tensors(name: str) -> None:
    """Of all types, of shapes that go together; and of all shapes."""
    kinds = itertools.product(TYPES, TYPES, ((), (8,)), ((), (8,)))
    shapes = ((tl.float32, tl.int32, *pair) for pair in itertools.product(SHAPES, SHAPES))
    for a, b, of_a, of_b in itertools.chain(kinds, shapes):
        _agree(name, _tensor(a, of_a), _tensor(b, of_b, seed=1), *MORE.get(name, ()))


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor_"]
)
def test_a_tensor_and_a_number(name: str) -> None:
    """Other operations get no numbers of Python's."""
    for dtype, shape, number in itertools.product(TYPES, ((), (8,)), NUMBERS):
        _agree(name, _tensor(dtype, shape), number, *MORE.get(name, ()))
        _agree(name, number, _tensor(dtype, shape), *MORE.get(name, ()))


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_what_leaves_its_type_is_found(name: str) -> None:
    """Of one number and of many."""
    for shape in ((), (8,)):
        x = _tensor(tl.int32, shape)
        x.handle.data[...] = {"add": 2, "sub": -2, "mul": 2}[name]
        y = tl.tensor(TensorHandle(np.array([2**31 - 1], np.int32), tl.int32), tl.int32)
        _agree(name, x, y, True)
        _agree(name, x, y, False)
        with pytest.raises(AssertionError, match="overflow"):
            getattr(interpreter_semantic, name)(x, y, True)


def test_offsets_of_pointers() -> None:
    for element, offset, shape in itertools.product(
        (tl.int1, tl.int8, tl.float16, tl.float32), (tl.int32, tl.int64, tl.uint8), SHAPES
    ):
        pointer = tl.pointer_type(element)
        for of_pointer in ((), (4, 1)):
            data = np.arange(2**20, 2**20 + int(np.prod(of_pointer)), dtype=np.uint64)
            kind = tl.block_type(pointer, list(of_pointer)) if of_pointer else pointer
            x = tl.tensor(TensorHandle(data.reshape(of_pointer or (1,)), pointer), kind)
            _agree("add", x, _tensor(offset, shape), True)
            _agree("add", _tensor(offset, shape), x, True)
            _agree("add", x, 3, True)


def test_where() -> None:
    for condition, a, b in itertools.product(SHAPES, SHAPES, SHAPES):
        for x, y in (("float32", "float32"), ("float16", "float32"), ("int32", "int1")):
            types = getattr(tl, x), getattr(tl, y)
            _agree("where", _tensor(tl.int1, condition), _tensor(types[0], a), _tensor(types[1], b))
        _agree("where", _tensor(tl.int1, condition), _tensor(tl.float32, a), float("-inf"))
        _agree("where", _tensor(tl.int32, condition), _tensor(tl.float32, a), 0.0)


def test_casts_and_dimensions() -> None:
    for before, after, shape in itertools.product(TYPES, TYPES, SHAPES):
        _agree("cast", _tensor(before, shape), after)
    for shape, axis in itertools.product(SHAPES, range(3)):
        _agree("expand_dims", _tensor(tl.float32, shape), axis)


def test_bfloat16() -> None:
    """Every number of 16 bits, and those of 32 around them, with subnormal ones and without."""
    every = np.arange(1 << 16, dtype=np.uint16)
    quick = interpreter._convert_float
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        wide = (every.astype(np.uint32) << 16 | low).view(np.float32)
        for data, *kinds in (every, tl.bfloat16, tl.float32), (wide, tl.float32, tl.bfloat16):
            for some in (
                data,
                data[(every & 0x7F80) != 0].reshape(4, -1).T,
                data[:1],
                data[-0x7FFF:-0x7FF0],
            ):
                for rounding in (None, ROUNDING_MODE.RTNE):
                    ours = quick(some, *kinds, rounding)
                    theirs = quick.__wrapped__(some, *kinds, rounding)
                    assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), kinds


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8]
)
def test_loads(dtype: torch.dtype) -> None:
    memory = torch.arange(64).to(dtype)
    element = getattr(tl, str(dtype).removeprefix("torch."))
    at = np.arange(32, dtype=np.uint64).reshape(4, 8) * memory.element_size() + memory.data_ptr()
    pointer = tl.pointer_type(element)
    x = tl.tensor(TensorHandle(at, pointer), tl.block_type(pointer, [4, 8]))
    masks = [None, *(_tensor(tl.int1, shape) for shape in SHAPES if shape != (16,))]
    others = [
        None,
        *(_tensor(kind, shape) for kind in (tl.int32, element) for shape in ((), (4, 8))),
    ]
    for mask, other in itertools.product(masks, others):
        _agree("load", x, mask, other, (), "", "", "", False)


def _larger(a: Any, b: Any) -> Any:
    return interpreter_semantic.maximum(a, b, tl.PropagateNan.NONE)


def _last_positive(*given: Any) -> Any:
    """The second of the two pairs if its number is positive: an order matters."""
    a, a_place, b, b_place = given
    own = interpreter_semantic.greater_than(b, _tensor(tl.int32, ()))
    where = interpreter_semantic.where
    return where(own, b, a), where(own, b_place, a_place)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((1,), 0), ((16,), 0), ((4, 8), 0), ((4, 8), 1)])
def test_scans(shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    numbers, places = _tensor(tl.int32, shape), _tensor(tl.float32, shape, seed=2)
    places.handle.data[...] = np.arange(places.handle.data.size).reshape(shape)
    for combine, given in ((_larger, (numbers,)), (_last_positive, (numbers, places))):
        found = []
        for scan in (ScanOps.generic_scan, ScanOps.generic_scan.__wrapped__):
            ops = ScanOps(axis, SimpleNamespace(fn=combine), reverse)
            ops.generic_scan = scan.__get__(ops)
            found.append([(str(x.type), x.handle.data.tolist()) for x in ops.apply(given)])
        assert found[0] == found[1]


@triton.jit
def _first(x_ptr, n: tl.constexpr = 4):  # type: ignore[no-untyped-def]
    """A default, a docstring."""
    at = tl.arange(0, n)

    # A comment that is not indented as code is.
    return tl.load(x_ptr + at, mask=at < 3, other=0.0)


@triton.jit
def _fails(
    x_ptr,
    n: tl.constexpr,
):  # type: ignore[no-untyped-def]
    x = _first(x_ptr, n)
    tl.store(x_ptr + tl.arange(0, n), x[:, None])


def test_an_error_says_its_line() -> None:
    """That of the file, though the function was compiled alone."""
    with pytest.raises(InterpreterError) as failure:
        _fails[(1,)](torch.ones(4), 4)
    here = [
        one for one in extract_tb(failure.value.__cause__.__traceback__) if one.name == "_fails"
    ]
    assert [one.line for one in here] == ["tl.store(x_ptr + tl.arange(0, n), x[:, None])"]


SHIFTED = """import triton
import triton.language as tl


@triton.jit
def shift(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + SHIFT)


SHIFT = {}
"""


def test_functions_of_one_text_are_compiled_once(tmp_path: Path) -> None:
    """And each reads the numbers of its own module."""
    before = _compiled.cache_info()
    for number in (1, 2):
        path = tmp_path / f"shifted_by_{number}.py"
        path.write_text(SHIFTED.format(number))
        x = torch.zeros(4)
        import_file(path).shift[(1,)](x, 4)
        assert x.tolist() == [number] * 4
    after = _compiled.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)

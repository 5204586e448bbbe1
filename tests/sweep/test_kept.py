"""Launches that are made once: one that differs in anything is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from support.slip import with_slip
from support.variants import import_file
from sweep.kept import Kept, code_of

SOURCE = """import triton
import triton.language as tl

STEP = 1


@triton.jit
def _raised(x, BY: tl.constexpr = 2):
    return x * BY + STEP


@triton.jit
def raises(x_ptr):
    tl.store(x_ptr, _raised(tl.load(x_ptr)))
"""


def _kernel(path: Path, edit: Callable[[str], str] = str) -> FunctionType:
    path.write_text(edit(SOURCE))
    kernel: FunctionType = import_file(path).raises.fn
    return kernel


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("STEP = 1", "STEP = 2"), ("x * BY", "x + BY"), ("= 2)", "= 3)"), ("tl.load(x_ptr)", "1")],
    ids=["a constant", "a function that it calls", "a default", "its own text"],
)
def test_a_kernel_is_known_by_all_that_it_says(right: str, wrong: str, tmp_path: Path) -> None:
    code = code_of(_kernel(tmp_path / "first.py"))
    elsewhere = with_slip("STEP = 1", "\n\nUNUSED = 3\nSTEP = 1")
    assert code_of(_kernel(tmp_path / "second.py", elsewhere)) == code
    assert code_of(_kernel(tmp_path / "third.py", with_slip(right, wrong))) != code


def _twice(first: tuple[Any, ...], second: tuple[Any, ...], tmp_path: Path) -> int:
    """How often something is launched that adds 1 to the first element of its first argument."""
    kept, kernel, launched = Kept(), _kernel(tmp_path / "kernel.py"), 0
    for args in (first, second):

        def launch(x: torch.Tensor = args[0]) -> None:
            nonlocal launched
            launched += 1
            x[(0,) * x.ndim] += 1

        before = args[0].clone()
        kept.run(launch, kernel, args)
        before[(0,) * before.ndim] += 1
        assert torch.equal(args[0], before)
    return launched


def test_the_same_launch_is_made_once(tmp_path: Path) -> None:
    """Also with memory elsewhere; one that raises is made again."""
    args = [(torch.arange(6.0).view(2, 3), 1, {"N": 2.0}) for _ in range(2)]
    assert _twice(*args, tmp_path) == 1

    def fails() -> None:
        raise AssertionError

    kept, kernel = Kept(), _kernel(tmp_path / "kernel.py")
    for _ in range(2):
        with pytest.raises(AssertionError):
            kept.run(fails, kernel, args[0])


NUMBERS = torch.arange(12.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((NUMBERS[:6].clone(),), (NUMBERS[1:7].clone(),)),
        ((NUMBERS.clone()[:6],), (NUMBERS.clone()[6:],)),
        ((NUMBERS.clone().view(3, 4),), (NUMBERS.clone().view(4, 3),)),
        ((NUMBERS.clone().view(3, 4),), (NUMBERS.clone().as_strided((3, 4), (1, 3)),)),
        ((torch.zeros(2),), (torch.zeros(2, dtype=torch.int32),)),
        ((NUMBERS.clone(), 1), (NUMBERS.clone(), 1.0)),
        ((NUMBERS.clone(), 0.0), (NUMBERS.clone(), -0.0)),
        ((NUMBERS.clone(), {"N": 1}), (NUMBERS.clone(), {"M": 1})),
        ((NUMBERS.clone(), object()), (NUMBERS.clone(), object())),
    ],
    ids=[
        "numbers", "place", "shape", "strides", "dtype", "type of a number", "sign of a zero",
        "name of a constant", "something unknown",
    ],
)  # fmt: skip
def test_what_differs_is_another_launch(
    first: tuple[Any, ...], second: tuple[Any, ...], tmp_path: Path
) -> None:
    assert _twice(first, second, tmp_path) == 2
    both = NUMBERS.clone()
    apart, shared = (both[:6], NUMBERS.clone()[:6]), (both[:6], both[:6])
    assert _twice(apart, shared, tmp_path) == 2


def test_no_more_is_kept_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The oldest goes."""
    monkeypatch.setattr("sweep.kept.ROOM", 100)
    kept, kernel, launched = Kept(), _kernel(tmp_path / "kernel.py"), []
    for number in (1, 2, 3, 3, 1):
        x = torch.full((10,), float(number))
        kept.run(lambda x=x, number=number: (x.add_(1), launched.append(number)), kernel, (x,))
        assert x[0] == number + 1
    assert launched == [1, 2, 3, 1]

"""Matrix units: a product runs beside its role until that waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from support.gluon.machine import program, role
from support.gluon.memory import Shared, seen
from support.gluon.values import Block


class Product:
    """acc + a @ b, of 16-bit operands: not to be read before it has been waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Block | None = None
        self.done = False

    @property
    def shape(self) -> list[int]:
        """Of the result."""
        return [self.a.shape[0], self.b.shape[1]]

    def compute(self) -> None:
        """Reads the operands as they are now."""
        if self.result is not None:
            return
        if isinstance(self.acc, Product):
            self.acc.compute()
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        assert acc is not None
        a = self.a.data if isinstance(self.a, Block) else seen(self.a)
        product = a.float() @ seen(self.b).float()
        assert product.shape == acc.data.shape, f"{product.shape} onto {acc.shape}"
        self.result = Block(product + acc.data if self.use_acc else product)


def multiply(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False
) -> Product | Block:
    """Starts a product; its operands may not change before it has been waited for."""
    kinds = {a.data.dtype, b.data.dtype}
    assert kinds in ({torch.bfloat16}, {torch.float16}), kinds
    product = Product(a, b, acc, bool(use_acc))
    if program().late():
        for operand in (a, b):
            if isinstance(operand, Shared):
                seen(operand)  # written, and fenced, before it starts
    else:
        product.compute()
    role().products.append(product)
    return product if is_async else wait_for_products(0, (product,))


def wait_for_products(pendings: int = 0, deps: Sequence[Any] = ()) -> Any:
    """Until so many at most still run; the values of those that are asked for."""
    running = role().products
    while len(running) > pendings:
        one = running.pop(0)
        one.compute()
        one.done = True
    values = [_value(x) for x in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _value(x: Any) -> Any:
    if not isinstance(x, Product):
        return x
    assert x.done and x.result is not None, "read while it is being computed"
    return x.result

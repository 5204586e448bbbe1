"""A mutant: a module of flashgen's with one small slip in it, which the sweeps have to find."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from flashgen.plan import KernelPlan
from support.gluon import interpreted
from support.trials import PLANS, Kernel
from support.variants import any_hopper, any_hopper_backward, imported, rendered


@dataclass(frozen=True)
class Mutant:
    """One slip, in the plan or in the rendered source, of any variant that it can be made in.

    Attributes:
        name: what is wrong, in a few words; with the kernel, unique.
        kernel: whose trials have to find it.
        spec: the shipped variant whose kernel is made wrong.
        function: the function of the module that it is in; empty for one in the plan.
        right: the text that stands there.
        wrong: what stands there instead.
        occurrence: which of several, from 0 on; None for all of them.
        edit_plan: what becomes of the plan.
    """

    name: str
    kernel: Kernel
    spec: str = "window_d128"
    function: str = ""
    right: str = ""
    wrong: str = ""
    occurrence: int | None = None
    edit_plan: Callable[[KernelPlan], KernelPlan] = lambda plan: plan

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def module(self) -> ModuleType:
        """The variant's module with the slip, its Gluon kernels on the CPU."""
        hopper = self.kernel.endswith("hopper")
        if self.function:
            source = self.edited(source_of(self.spec, hopper=hopper))
        else:
            source = rendered(self.edit_plan(PLANS[self.spec]))
        return imported(self.spec, interpreted(source) if hopper else source)

    def edited(self, source: str) -> str:
        """The source with the slip.

        Raises:
            ValueError: it cannot be made: the kernel no longer reads so.
        """
        first, last = function_lines(source, self.function)
        lines = source.splitlines(keepends=True)
        body = "".join(lines[first:last])
        if (found := body.count(self.right)) <= (self.occurrence or 0):
            raise ValueError(
                f"{self}: {self.function} of {self.spec} has {self.right!r} {found} times: "
                "the kernel no longer reads so"
            )
        if self.occurrence is None:
            body = body.replace(self.right, self.wrong)
        else:
            parts = body.split(self.right)
            before, after = parts[: self.occurrence + 1], parts[self.occurrence + 1 :]
            body = self.right.join(before) + self.wrong + self.right.join(after)
        return "".join([*lines[:first], body, *lines[last:]])


@functools.cache
def source_of(spec: str, *, hopper: bool) -> str:
    """A shipped variant's module without a slip, as rendered now."""
    plan = PLANS[spec]
    return rendered(plan, *((any_hopper(plan), any_hopper_backward(plan)) if hopper else ()))


def function_lines(source: str, name: str) -> tuple[int, int]:
    """[first, last) lines of a function at the top of a module, from 0 on, decorators included."""
    try:
        return _functions(source)[name]
    except KeyError:
        raise ValueError(f"no function {name} in the module") from None


@functools.cache
def _functions(source: str) -> dict[str, tuple[int, int]]:
    """Those lines of each function: of a source with many slips, which is parsed once."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            assert node.end_lineno is not None
            found.setdefault(node.name, (first - 1, node.end_lineno))
    return found


def slips(
    kernel: Kernel, function: str, *texts: tuple[str, str], spec: str = "window_d128"
) -> list[Mutant]:
    """Mutants of one function, each with a text of it replaced everywhere."""
    return [
        Mutant(
            f"{function}: {right.strip()} -> {wrong.strip()}", kernel, spec, function, right, wrong
        )
        for right, wrong in texts
    ]

"""A kernel in rendered source, and the call that it is compiled for."""

from __future__ import annotations

import ast
import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from flashgen.plan import TRITON_DTYPES, KernelPlan
from flashgen.plan.arguments import KernelArguments
from support.source_lines import quick_inspect

# Arguments that a call usually aligns to 16: what Triton's launcher would find out about them.
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Call:
    """What the launcher makes known of a call: arguments by name, their types and alignment.

    Attributes:
        signature: Triton's types, ``"constexpr"`` for constants.
        constants: their values.
        attributes: of arguments by position, what is known of their values.
    """

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], Any]


def call_of(
    plan: KernelPlan,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: bool = True,
    arguments: KernelArguments | None = None,
) -> Call:
    """A call of a kernel with the plan's parameters.

    Args:
        plan: whose parameters the kernel takes.
        kernel: the function.
        types: of its other arguments that are no integers.
        constants: its constants.
        aligned: every stride is a multiple of 16, as the compiler likes it.
        arguments: what it takes of the parameters; None is what the forward kernel does.
    """
    arguments = plan.kernel_arguments if arguments is None else arguments
    # A tensor's last dimension is usually contiguous, which the launcher makes a constant.
    constants = {**constants} | {f"{x.name}_stride_{x.ndim - 1}": 1 for x in arguments.tensors}
    types = {**types} | {x.name: "fp32" for x in plan.arguments if x.kind == "float"}
    types |= {f"{x.name}_ptr": f"*{TRITON_DTYPES[x.dtype]}" for x in arguments.tensors}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # The launcher looks at no number whose value may change without a recompile.
    divisible = {name for name, kind in signature.items() if aligned and kind == "i32"}
    divisible = {name for name in divisible - set(arguments.ints) if "stride_" in name}
    attributes = {
        (i,): ALIGNED
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in divisible
    }
    return Call(signature, constants, attributes)


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the call that it is compiled for.

    Attributes:
        text: what it stands in, with the imports.
        name: of its function.
        call: what a launcher makes known of it.
        gluon: whether it is in Gluon.
    """

    text: str
    name: str
    call: Call
    gluon: bool

    def source(self, function: Any = None) -> Any:
        """What Triton compiles.

        Args:
            function: that of a module, in the place of the text's.
        """
        function = function_in(self.text, self.name) if function is None else function
        call = self.call
        if self.gluon:
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(function, call.signature, call.constants, call.attributes)
        from triton.compiler import ASTSource

        return ASTSource(function, call.signature, constexprs=call.constants, attrs=call.attributes)

    def digest(self, target: str, options: Mapping[str, Any]) -> str:
        """Of all that the compiler's figures follow from, but for the compiler."""
        call = (sorted(self.call.signature.items()), sorted(self.call.constants.items()))
        call = (*call, sorted(self.call.attributes.items()), sorted(options.items()))
        whole = repr((code_of(self.text), self.name, call, target))
        return sha256(whole.encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def code_of(text: str) -> str:
    """A source without comments and docstrings, which no compiler sees."""
    tree, documented = ast.parse(text), ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@lru_cache(maxsize=32)
def function_in(source: str, name: str) -> Any:
    """A kernel in rendered source. Triton reads its file while that is imported, then never."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("flashgen_compiled_kernel", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with quick_inspect(path):
            spec.loader.exec_module(module)
    return getattr(module, name)

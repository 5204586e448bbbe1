"""Who knows whom: no module knows two kernels, and a plan reaches its search spaces in one walk.

The walk is every call that is made between a spec and the configurations to choose from.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.kernels.base import ForwardKernel, GradientKernel
from flashgen.kernels.registry import KERNELS
from flashgen.paths import PACKAGE
from unit.test_imports import MODULES, layer

ROOT = Path(__file__).parents[2]

#: What a kernel may be known by: its folder, its key, its class. Two kernels share a key.
NAMES = {
    word: kernel.name
    for kernel in reversed(KERNELS)
    for word in (kernel.name, kernel.key, type(kernel).__name__)
}
#: For these "hopper" is an architecture.
ARCHITECTURES = {
    "budget.targets", "budget.matrix_units",
    "kernels.backward_triton.rank", "kernels.backward_triton.space",
}  # fmt: skip
#: For these "cached" and "linear" are kinds of accounts.
OF_ACCOUNTS = {"cli.explain", "explain.document"}
#: Folders whose kernels share functions with those of another, or run in their place.
SHARING = {
    "backward_hopper": {"forward_hopper", "backward_triton"},
    "backward_hopper_split": {"forward_hopper", "backward_hopper"},
    "backward_triton": {"forward_triton"},
    "cache_triton": {"forward_triton"},
    "forward_hopper": {"forward_triton"},
}
#: What the stages ask a kernel for; `flashgen.kernels.base` has the methods.
PROTOCOL = {name for cls in (ForwardKernel, GradientKernel) for name in dir(cls)}


def kernels_named(source: str) -> set[str]:
    """The kernels, by their folders, that a module's code names: imports, names, whole strings."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                found |= {*module.split("."), *(alias.name for alias in aliases)}
            case ast.Name(id=word) | ast.Attribute(attr=word):
                found.add(word)
            case ast.Constant(value=str(text)):
                found |= {text, *(text.split("/")[:1] if text.endswith(".jinja") else ())}
    return {NAMES[word] for word in found & NAMES.keys()}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"kernels.registry"}))
def test_no_module_knows_two_kernels(module: str) -> None:
    """A kernel's own modules may know those that it shares functions with; the others know one."""
    source = MODULES[module].read_text(encoding="utf-8")
    named = kernels_named(source.replace('"hopper"', '""') if module in ARCHITECTURES else source)
    if module in OF_ACCOUNTS:
        named -= {"cache_triton", "linear_triton"}
    match module.split("."):
        case ["kernels", folder, _]:
            assert named <= {folder} | SHARING.get(folder, set())
        case _:
            assert len(named) <= 1, "ask the kernel: see flashgen/kernels/base.py"


@pytest.mark.parametrize(
    "code",
    [
        'if kernel.key in ("hopper", "portable"): pass',
        "from flashgen.kernels.forward_hopper.kernel import ForwardHopper; BackwardHopper",
        'render("forward_triton/kernel.py.jinja"), render("forward_hopper/kernel.py.jinja")',
    ],
)
def test_who_knows_two_is_found(code: str) -> None:
    assert len(kernels_named(code)) == 2


#: Prints the calls between modules of flashgen of which the callee is still at work further down
#: the stack: [caller, callee, function]. A generator is resumed by whoever reads it, and called by
#: the module that made it.
TRACED = """
import json, sys
from pathlib import Path
from flashgen.loader import load
from flashgen.paths import PACKAGE
from flashgen.plan import lower
from flashgen.tuning.choose import search_spaces

(variant,) = (v for v in load([Path("specs")]) if v.name == sys.argv[1])
root, stack, calls = f"{PACKAGE}/", [], {}

def note(frame, event, _):
    code = frame.f_code
    if code.co_filename.startswith(root):
        module = code.co_filename[len(root):-3].replace("/", ".").removesuffix(".__init__")
        if event == "call":
            if stack and stack[-1] != module and not code.co_flags & 0x20:
                calls[stack[-1], module, code.co_name] = module in stack
            stack.append(module)
        elif event == "return":
            stack.pop()

sys.setprofile(note)
spaces = search_spaces(lower(variant.spec, variant.name))
sys.setprofile(None)
assert any(space.candidates for of in spaces.values() for space in of.values())
print(json.dumps([[*call, again] for call, again in calls.items()]))
"""


@pytest.mark.parametrize("name", ["causal_d128", "documents_d128", "softcap_d128"])
def test_a_plans_walk_does_not_return(name: str) -> None:
    """No call enters a module that is waiting for it, nor one of a later layer, but the protocol's.

    Inside of `symbolic` some return: rules of the printer print their arguments by the printer, and
    proofs and signs ask for what is declared of a term.
    """
    done = subprocess.run(
        [sys.executable, "-c", TRACED, name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    calls = json.loads(done.stdout)
    assert len({callee for _, callee, _, _ in calls}) > 50
    # Tracing calls what the user wrote, and reads what was declared with it.
    declared = ("masks", "scores", "params", "spec", "constants", "functions", "normalisers")
    calls = [
        call
        for call in calls
        if not (call[0].startswith("tracing.") and call[1].split(".")[0] in declared)
    ]
    derived = [all(m.split(".")[0] in ("symbolic", "tracing") for m in call[:2]) for call in calls]
    again = [call for call, inside in zip(calls, derived, strict=True) if call[3] and not inside]
    later = [call for call in calls if layer(call[1]) > layer(call[0])]
    assert not again
    assert not [call for call in later if call[2] not in PROTOCOL and not call[3]]

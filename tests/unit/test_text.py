"""An expression stays one until a template prints it: nobody but codegen/ looks into kernels' text.

Layouts, shared memory, captures and costs are questions to expressions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from flashgen.budget.targets import get_target
from flashgen.kernels.registry import KERNELS
from flashgen.paths import PACKAGE
from flashgen.plan import lower
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.printer.dialects import Dialect, Triton
from support.variants import gluon_specs

#: What lays kernels' text out, and so has to look into it.
LAYOUT = "codegen"

#: Ways to look into a string, as modules and as methods.
MODULES = {
    "ast",
    "difflib",
    "fnmatch",
    "inspect",
    "keyword",
    "re",
    "string",
    "textwrap",
    "tokenize",
}
METHODS = {
    "capitalize", "casefold", "count", "endswith", "expandtabs", "find", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isspace",
    "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "translate", "upper",
}  # fmt: skip

#: Where else they are used, and on what: text that is no kernel's, or no text.
ON_OTHERS = {
    "__init__.py": ({"split"}, "names of flashgen"),
    "bench.py": ({"lower", "removesuffix"}, "torch's names of its backends"),
    "block_lists.py": ({"index"}, "an attribute, and where a name is among others"),
    "cache.py": ({"rpartition"}, "names of files"),
    "cli/app.py": ({"splitlines"}, "messages"),
    "cli/lines.py": ({"textwrap"}, "lines in a terminal"),
    "cli/options.py": ({"startswith"}, "words that a shell completes"),
    "console.py": ({"rpartition", "split"}, "names of files and packages"),
    "decays.py": ({"isdecimal"}, "a declared size"),
    "distributed/costs.py": ({"count"}, "ranks of a host"),
    "distributed/forecast.py": ({"rstrip"}, "lines of a picture"),
    "distributed/ring.py": ({"split"}, "a tensor's"),
    "distributed/shares.py": ({"split"}, "a tensor's"),
    "distributed/style.py": ({"inspect"}, "what a module's forward takes"),
    "errors.py": ({"split", "splitlines", "strip"}, "messages"),
    "export.py": (
        {
            "isascii",
            "isdecimal",
            "isidentifier",
            "keyword",
            "replace",
            "splitlines",
            "startswith",
            "strip",
        },
        "a package's name, hatchling's errors, requirements",
    ),
    "explain/call.py": ({"partition", "strip"}, "arguments of the command line"),
    "explain/packed.py": ({"re", "split"}, "lengths on the command line"),
    "explain/letters.py": ({"split", "strip"}, "drawn letters"),
    "explain/page.py": ({"replace"}, "times for a reader"),
    "explain/picture.py": ({"count"}, "rows of tiles"),
    "explain/png.py": ({"removeprefix"}, "colours"),
    "explain/svg.py": ({"removeprefix"}, "numbers"),
    "explain/terminal.py": (
        {"lower", "rstrip", "splitlines", "startswith", "upper"},
        "what was captured; a sentence's first letter",
    ),
    "explain/visible.py": ({"count"}, "rows of tiles"),
    "feature_maps.py": ({"isdecimal"}, "a declared size"),
    "files.py": ({"replace"}, "paths"),
    "integrations/call_tensors.py": ({"split"}, "names of architectures"),
    "inputs.py": (
        {"ast", "endswith", "find", "partition", "rpartition", "split", "startswith"},
        "the user's spec files, names of modules",
    ),
    "integrations/captured_tensor.py": ({"endswith", "startswith"}, "names of methods"),
    "integrations/small_integer.py": ({"startswith"}, "names of methods"),
    "integrations/captures.py": ({"partition", "startswith"}, "names of modules"),
    "integrations/diffusers.py": ({"split"}, "a version"),
    "integrations/layers/described.py": ({"ast"}, "the text of a kind"),
    "integrations/replaced.py": ({"inspect"}, "the class of an object"),
    "integrations/variants.py": (
        {"isidentifier", "re", "startswith", "strip"},
        "names of parameters and modules",
    ),
    "loader.py": ({"partition", "re", "split", "startswith"}, "messages; names of modules"),
    "masks/chosen.py": ({"isidentifier"}, "a dimension, in a message"),
    "params.py": (
        {"isascii", "isidentifier", "keyword", "removeprefix"},
        "names of parameters, dtypes",
    ),
    "place.py": ({"isidentifier", "keyword", "split"}, "the name of a package"),
    "plan/arguments.py": ({"replace"}, "the user's line about a parameter"),
    "plan/constants.py": ({"textwrap"}, "elements of a constant"),
    "plan/vectors.py": ({"replace"}, "parts of an expression"),
    "publish.py": ({"re", "split", "splitlines", "startswith"}, "a published module's first lines"),
    "stamp.py": ({"endswith", "removeprefix"}, "names of files"),
    "symbolic/by_distance.py": ({"count"}, "numbers without end"),
    "symbolic/gradient.py": ({"replace"}, "parts of an expression"),
    "symbolic/hoisting.py": ({"index"}, "symbols"),
    "symbolic/printer/text.py": ({"index", "replace"}, "symbols; Python's text of a float"),
    "symbolic/projection.py": ({"count"}, "signs"),
    "symbolic/reassociate.py": ({"count"}, "numbers without end"),
    "tracing/calls.py": ({"inspect", "isidentifier", "partition", "startswith"}, "labels, modules"),
    "tracing/captured.py": ({"index"}, "Python's integers"),
    "tracing/expr.py": ({"startswith"}, "names of methods"),
    "tracing/rows.py": ({"startswith"}, "names of methods"),
    "tracing/torch_types.py": ({"lower", "removesuffix", "rpartition"}, "names of types"),
    "tracing/user_code.py": ({"startswith"}, "names of modules"),
    "tuning/device.py": ({"split"}, "names of architectures"),
    "tuning/linear_bench.py": ({"inspect"}, "what a module's launchers take"),
    "tuning/store.py": ({"isdigit", "split"}, "versions; messages"),
    "validate.py": (
        {"isascii", "isidentifier", "keyword", "rpartition", "split", "startswith"},
        "messages; names",
    ),
    "validate_matrices.py": ({"isdecimal"}, "a declared size"),
}

#: What prints an expression or a kernel: methods, functions, and what begins with `render`.
#: Who has one printed hands the text on unread: to templates, to a file or to a reader.
PRINTING = {"text", "source"}
SOURCES = {"triton_source", "torch_source", "plain_source", "module_text"}
PRINTED_BY = {
    "build.py",
    "check.py",
    "explain/cached.py",
    "explain/decided.py",
    "explain/kernels.py",
    "explain/numbers.py",
    "explain/packed.py",
    "explain/variant.py",
    "forms/many_queries.py",
    "forms/mesh.py",
    "forms/varlen.py",
    "forms/varlen_linear.py",
    "kernels/backward_hopper/kernel.py",
    "kernels/backward_hopper/work.py",
    "kernels/backward_hopper_split/kernel.py",
    "kernels/backward_triton/kernel.py",
    "forms/cache.py",
    "kernels/cache_triton/kernel.py",
    "kernels/forward_hopper/kernel.py",
    "kernels/forward_triton/kernel.py",
    "plan/arguments.py",
    "plan/backward.py",
    "plan/listing.py",
    "plan/code.py",
    "plan/constants.py",
    "plan/hidden.py",
    "plan/kernel.py",
    "plan/score_gradient.py",
    "plan/int32_overflow.py",
    "symbolic/bounds.py",
    "tuning/forward_bench.py",
    "kernels/linear_triton/kernel.py",
    "kernels/linear_triton/maps.py",
    "plan/linear.py",
    "plan/vectors.py",
}
PRINTER = "symbolic/printer/"


def is_layout(path: str) -> bool:
    """Whether a module may look into kernels' text."""
    return path.startswith(f"{LAYOUT}/")


def trees() -> Iterator[tuple[str, ast.Module]]:
    """The modules by their path in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def searches(tree: ast.AST) -> set[str]:
    """The ways to look into a string that a module takes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module).partition(".")[0]} & MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {node.func.attr} & METHODS
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "str":
            found |= {node.attr} & METHODS  # as in map(str.strip, ...)
    return found


def is_printing(node: ast.AST) -> bool:
    """Whether a call prints an expression, or a kernel."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in PRINTING
    named = [node.func, *node.args]  # or hands a function that does to `map`
    names = {part.id for part in named if isinstance(part, ast.Name)}
    return not names.isdisjoint(SOURCES) or getattr(node.func, "id", "").startswith("render")


def is_text(node: ast.AST) -> bool:
    """Whether an expression is what was printed, or a string with it."""
    if isinstance(node, ast.IfExp | ast.BinOp | ast.JoinedStr | ast.FormattedValue):
        return any(map(is_text, ast.iter_child_nodes(node)))
    return is_printing(node)


def read_again(tree: ast.AST) -> Iterator[ast.AST]:
    """Where a printed text, or a name that one was given, is compared, cut up or gone through."""
    given = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_text(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def printed(node: ast.AST) -> bool:
        return is_text(node) or (isinstance(node, ast.Name) and node.id in given)

    for node in ast.walk(tree):
        looked_at: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            looked_at = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript | ast.Attribute):
            looked_at = [node.value]
        elif isinstance(node, ast.For | ast.comprehension):
            looked_at = [node.iter]
        yield from (node for part in looked_at if printed(part))


def test_kernels_text_is_searched_by_what_lays_it_out_alone() -> None:
    found = {path: searches(tree) for path, tree in trees() if not is_layout(path)}
    assert {path: ways for path, ways in found.items() if ways} == {
        path: ways for path, (ways, _) in ON_OTHERS.items()
    }


def test_who_has_something_printed() -> None:
    found = {path for path, tree in trees() if any(map(is_printing, ast.walk(tree)))}
    others = {path for path in found if not (path.startswith(PRINTER) or is_layout(path))}
    assert others == PRINTED_BY


@pytest.mark.parametrize("path", sorted(PRINTED_BY))
def test_what_is_printed_is_not_read_again(path: str) -> None:
    found = [node.lineno for node in read_again(ast.parse((PACKAGE / path).read_text()))]
    assert not found, f"{path}, lines {found}"


@pytest.mark.parametrize(
    "code",
    [
        "import re",
        "from ast import parse",
        'names = source.split(".")',
        "lines = map(str.strip, lines)",
        'found = "kv_idx" in code.text()',
        'text = triton_source(expr)\nfound = "kv_idx" in text',
        'found = "kv_idx" in render_kernel(plan)',
        "text = code.text(GLUON)\nfirst = text[:2]",
        "for letter in torch_source(expr):\n    print(letter)",
        "loads = code.text().find('_at_')",
    ],
)
def test_such_a_search_is_noticed(code: str) -> None:
    tree = ast.parse(code)
    assert searches(tree) or list(read_again(tree))


@pytest.mark.parametrize("name", ["alibi_d128", "causal_d256", "documents_d128", "softcap_d128"])
def test_what_kernels_need_is_known_without_their_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces, shared memory and the order of candidates; nothing is printed for them."""

    printed = Code.text

    def text(code: Code, *dialect: Dialect) -> str:
        assert not isinstance(code.printer.dialect, Triton), f"{code!r} was printed"
        return printed(code, *dialect)

    monkeypatch.setattr(Code, "text", text)
    plan = lower(gluon_specs()[name], name)
    for kernel in KERNELS:
        if kernel.linear or kernel.why_not(plan):
            continue
        target = next(t for t in reversed(plan.targets) if kernel.runs_on(t))
        some = kernel.space(plan, target).candidates[:2]
        for config in kernel.rank(plan, target, some):
            assert kernel.worst_usage(plan, config, get_target(target)).total

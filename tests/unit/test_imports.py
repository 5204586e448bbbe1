"""Imports point one way, and what has to start fast imports neither torch nor triton."""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flashgen
from flashgen.paths import PACKAGE
from flashgen.publish import NOT_IN_MODULES

REPOSITORY = Path(__file__).parents[2]

# A module imports its own layer and those above it. Every module has a layer: the first that fits.
LAYERS = """
    errors version paths files place inputs config declared dropout philox symbols budget.targets
    tracing tracing.user_code tracing.shown tracing.indicators tracing.signs
    tracing.kinds tracing.relations tracing.rows tracing.captured tracing.torch_*
    tracing.operations
    tracing.expr
    functions params block_lists constants tracing.calls feature_maps
    arguments
    decays
    masks masks.* scores scores.* normalisers
    offsets
    spec loader
    symbolic symbolic.*
    codegen codegen.names
    plan plan.* reference
    budget budget.*
    codegen.layout codegen.folding codegen.unpacking codegen.digest codegen.merging codegen.compiled
    codegen.beside codegen.environment codegen.functions codegen.operator
    kernels kernels.*
    forms forms.*
    validate_matrices validate_linear validate codegen.module
    tuning tuning.* publish inventory stamp
    build cache check export
    explain explain.*
    bench_linear
    bench
    console
    compiling
    distributed.layout distributed.plan distributed.exchange distributed.agreement
    distributed.wholes distributed.seeds distributed.dtensors
    distributed.lanes distributed.work distributed.rows distributed.gather distributed.ring
    distributed.shares distributed.heads distributed.grid distributed.costs distributed.forecast
    distributed.passes distributed.strategies distributed.attend distributed.style distributed
    ranks
    integrations integrations.captures integrations.small_integer
    integrations.captured_tensor integrations.block_table
    integrations.replaced integrations.converted
    integrations.variants integrations.call_tensors
    integrations.flex flex
    integrations.layers integrations.layers.recorded
    integrations.layers.described
    integrations.layers.padding integrations.layers.modules
    integrations.layers.rows
    integrations.layers.calls
    integrations.transformers.ordered integrations.transformers.remembered
    integrations.transformers.masks integrations.transformers.attention
    integrations.transformers integrations.diffusers
    __init__
    cli.app cli.lines cli.options
    cli.bench cli.build cli.cache cli.check cli.explain cli.export cli.modules
    cli __main__
"""


def flashgen_imports(path: Path) -> set[str]:
    """The flashgen modules that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        name.removeprefix("flashgen.") if name != "flashgen" else "__init__"
        for name in names
        if name.split(".")[0] == "flashgen"
    }


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


MODULES = {
    module_name(path).removesuffix(".__init__"): path for path in sorted(PACKAGE.rglob("*.py"))
}
GRAPH = {name: (flashgen_imports(path) & MODULES.keys()) - {name} for name, path in MODULES.items()}


def layer(module: str) -> int:
    layers = [line.split() for line in LAYERS.strip().splitlines()]
    fitting = [i for i, layer in enumerate(layers) if any(fnmatch(module, p) for p in layer)]
    assert fitting, f"{module} has no layer: give it one in LAYERS"
    return fitting[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    wrong = {imported for imported in GRAPH[module] if layer(imported) > layer(module)}
    assert not wrong, f"{module} imports {wrong}, which lie below it"


def test_no_import_is_circular():
    TopologicalSorter(GRAPH).prepare()


def test_folders_of_kernels_import_one_way():
    folders = {}
    for module, imported in GRAPH.items():
        match module.split("."):
            case ["kernels", folder, _]:
                others = {name.split(".")[1] for name in imported if name.count(".") == 2}
                folders.setdefault(folder, set()).update(others - {folder})
    assert len(folders) == 7
    TopologicalSorter(folders).prepare()


def test_what_renders_a_module_is_part_of_its_build_digest():
    """And nothing else is, so that a change elsewhere makes no module stale."""
    reached, waiting = set(), ["codegen.module", "tuning.choose", "plan"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting.extend(GRAPH[module])
    files = {MODULES[module].relative_to(PACKAGE).as_posix() for module in reached}
    assert "codegen/module.py" in files
    files |= {f"{file.rpartition('/')[0]}/__init__.py" for file in files if "/" in file}
    every = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert every - files - {"version.py"} == NOT_IN_MODULES  # the version is in the digest itself


@pytest.mark.parametrize(
    "code",
    [
        "import flashgen",
        "from flashgen import *; AttentionSpec(head_dim=64, mask=causal() & full()).digest",
        "from pathlib import Path; from flashgen.loader import load; load([Path('specs')])",
        "import flashgen.cli",
    ],
)
def test_neither_torch_nor_triton_is_imported(code):
    check = "import sys; assert not {'torch', 'triton'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", f"{code}\n{check}"], cwd=REPOSITORY, check=True)


@pytest.mark.parametrize("module", ["flashgen", "flashgen.cli", "flashgen.stamp"])
def test_what_starts_a_command_takes_nothing_slow(module):
    """sympy takes a fifth of torch's time to import; a build with nothing to do needs none."""
    slow = "{'sympy', 'jinja2', 'rich', 'numpy', 'torch', 'triton'}"
    check = f"import sys, {module}; assert not (found := {slow} & sys.modules.keys()), found"
    subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, check=True)


def test_the_names_of_a_spec_are_those_that_type_checkers_see():
    """The names are imported when they are used, by a table; a type checker reads the imports."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [seen] = [node for node in tree.body if isinstance(node, ast.If) and not node.orelse][:1]
    imported = {
        alias.name: node.module
        for node in seen.body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("flashgen")
        for alias in node.names
    }
    assert imported == flashgen._HOME_OF
    assert sorted(imported) == flashgen.__all__ == sorted(set(flashgen.__all__))
    assert set(imported) <= set(dir(flashgen))
    for name, home in imported.items():
        assert getattr(flashgen, name) is getattr(sys.modules[home], name)
    first = "import flashgen; assert flashgen.masks.causal is flashgen.causal"
    subprocess.run([sys.executable, "-c", first], cwd=REPOSITORY, check=True)
    with pytest.raises(AttributeError, match="module 'flashgen' has no attribute 'casual'"):
        flashgen.casual  # noqa: B018


def test_generated_modules_import_torch_triton_and_pythons_own():
    modules = sorted((REPOSITORY / "generated").glob("*.py"))
    assert len(modules) > 1, "nothing is generated: run flashgen build specs"
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in allowed, path

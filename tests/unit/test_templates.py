"""Templates say at their top what they read: every name that they are given, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import meta, nodes

from flashgen.codegen.environment import environment
from flashgen.forms.base import PARTS
from flashgen.kernels.forward_hopper.plan import DIALECT
from flashgen.paths import template_dir

ROOT = Path(__file__).parents[2]
ENVIRONMENT = environment(DIALECT)
BUILT_IN = {"range", "loop", "caller"}
FILTERS = {
    "fields",
    "fold",
    "printed",
    "plain",
    "unpacking",
    "wrap",
    "indented",
    "dedent",
    "prefix",
    "beside",
}
TESTS = {"read_in"}

# What names another template.
OTHERS = (nodes.Include, nodes.Import, nodes.FromImport)

# What the module's templates call those that each kernel and each form brings.
BROUGHT = {
    "configuration": "configuration",
    "launcher": "launch",
    "dispatch": "dispatch",
    **{f"of_{part}": part for part in PARTS},
}


def source(name: str) -> str:
    return (template_dir() / name).read_text(encoding="utf-8")


def explaining() -> list[str]:
    """The templates that are rendered by themselves, and the parts that explain their own names."""
    every = {
        path.relative_to(template_dir()).as_posix() for path in template_dir().rglob("*.jinja")
    }
    trees = map(ENVIRONMENT.parse, map(source, every))
    parts = [part for tree in trees for part in tree.find_all(OTHERS)]
    rendered = every.difference(*map(named, parts))
    return sorted(rendered | {name for name in every if "\n  Names\n" in source(name)})


def parts(name: str) -> Iterator[nodes.Template]:
    """A template, and what it is made of: what sees the names that it is given."""
    tree = ENVIRONMENT.parse(source(name))
    yield tree
    for part in tree.find_all(OTHERS):
        if isinstance(part, nodes.Include) or part.with_context:
            for included in named(part):
                yield from parts(included)


def named(part: nodes.Include | nodes.Import | nodes.FromImport) -> list[str]:
    """The templates that one includes or imports: by its name, or one of every kernel's."""
    if isinstance(part.template, nodes.Const):
        return [part.template.value]
    assert isinstance(part.template, nodes.Name)
    found = template_dir().glob(f"*/{BROUGHT[part.template.name]}.py.jinja")
    # The module's own launch template is what includes them.
    return [f"{x.parent.name}/{x.name}" for x in sorted(found) if x.parent.name != "module"]


def made(tree: nodes.Template) -> set[str]:
    """The names that a template gives to what it makes."""
    targets = [part.target for part in tree.find_all((nodes.Assign, nodes.AssignBlock))]
    names = {x.name for target in targets for x in (target, *target.find_all(nodes.Name))
             if isinstance(x, nodes.Name)}  # fmt: skip
    names |= {part.target for part in tree.find_all(nodes.Import)}
    names |= {name for part in tree.find_all(nodes.FromImport) for name in part.names}
    return names | {part.name for part in tree.find_all(nodes.Macro)}


def glossary(name: str) -> list[list[str]]:
    """The names that each line of it explains: the first, and others behind a semicolon."""
    found = re.match(r"\{#-.*?\n  Names\n(.*?)-#\}", source(name), re.DOTALL)
    text = found.group(1) if found else ""
    entries = re.findall(r"^ {2,4}([\w.]+) {2,}(\S.*)$", text, re.MULTILINE)
    return [[first, *re.findall(r"; (\w+) ", rest)] for first, rest in entries]


def filters_of(tree: nodes.Template) -> set[str]:
    """The house's own filters, also those that are handed to `map`, and its tests."""
    filters = list(tree.find_all(nodes.Filter))
    names = {part.name for part in filters}
    tests = {part.name for part in tree.find_all(nodes.Test)}
    for part in filters:
        names |= {arg.value for arg in part.args if isinstance(arg, nodes.Const)} & FILTERS
    return (names & FILTERS) | (tests & TESTS)


@pytest.mark.parametrize("name", explaining())
def test_a_template_explains_what_it_reads(name: str) -> None:
    trees = list(parts(name))
    read = {x for tree in trees for x in meta.find_undeclared_variables(tree)}
    read -= BUILT_IN.union(*map(made, trees))
    filters = set().union(*map(filters_of, trees))
    explained = {word for entry in glossary(name) for word in entry}
    assert read | filters <= explained, "not explained"
    names = {part.name for tree in trees for part in tree.find_all(nodes.Name)}
    firsts = {entry[0].split(".")[0] for entry in glossary(name)}
    assert firsts <= names | filters | BUILT_IN.union(*map(made, trees)), "explained in vain"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "generated").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_a_module_opens_with_its_contents(path: Path) -> None:
    """Each part that they list has a heading, in their order, and no other part has one."""
    text = path.read_text(encoding="utf-8")
    (block,) = re.findall(r'^"""\n\n# Contents: .*\n((?:#   .*\n)+)\n', text, re.M)
    listed = re.findall(r"^#   (\w+) ", block, re.M)
    headings = re.findall(r"^# --- (\w+)(?: in \w+)? -+$", text, re.M)
    assert listed == list(dict.fromkeys(headings))

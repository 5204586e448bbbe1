"""inputs: the spec files, and all that their variants depend on, told without running them.

A file is followed as far as its text tells: it uses modules that compute alone, names of torch
that compute alone, and helpers of which the same holds. Of any other file, such as one that reads
a table, an environment variable, the time or a random number, nobody knows what it depends on
without running it.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flashgen.errors import SpecFileError
from flashgen.paths import PACKAGE


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules of Python that compute alone, and those of their names that do; None is all.
_PYTHON: dict[str, frozenset[str] | None] = {
    "json": frozenset({"loads", "dumps"}),
    **dict.fromkeys(
        ("__future__", "abc", "cmath", "collections", "collections.abc", "dataclasses", "enum",
         "fractions", "functools", "itertools", "math", "numbers", "operator", "typing")
    ),
}  # fmt: skip

#: Names of torch whose results are decided by their arguments.
_OF_TORCH = _words(
    """
    abs absolute add addcdiv addcmul all any arange arctan as_tensor atan bfloat16 bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool broadcast_to
    bucketize cat ceil clamp clamp_max clamp_min clip clone cos cosh cumsum detach diag div divide
    dot double elu eq erf exp exp2 expm1 eye fix flatten float float16 float32 float64 floor
    floor_divide fmod frac full full_like ge gelu greater greater_equal gt half hardsigmoid
    hardswish hardtanh heaviside hypot int int16 int32 int64 int8 isfinite isin isinf le leaky_relu
    lerp less less_equal linspace log log10 log1p log2 logaddexp logical_and logical_not logical_or
    logical_xor logsigmoid logspace long lt masked_fill max maximum mean min minimum mish mul
    multiply nan_to_num ne neg negative not_equal numel ones ones_like outer pow prod ravel
    reciprocal relu relu6 remainder reshape round rsqrt rsub searchsorted sgn short sigmoid sign
    silu sin sinc sinh softplus softsign sort sqrt square squeeze stack sub subtract sum tan tanh
    tanhshrink Tensor tensor threshold tril triu true_divide trunc uint8 unsqueeze where zeros
    zeros_like
    """
)

#: The one of them that is a type.
_TYPE = "Tensor"

#: The modules of which a spec file's text tells all.
_LIBRARIES: dict[str, frozenset[str] | None] = {
    **_PYTHON,
    "flashgen": None,
    "torch": _OF_TORCH,
    "torch.nn.functional": _OF_TORCH,
    "torch.special": _OF_TORCH,
    "torch.nn.attention.flex_attention": frozenset({"and_masks", "or_masks", "noop_mask"}),
}

#: Functions of Python whose results depend on more than their arguments, that run text, or that
#: reach what is not named.
_OUTSIDE = _words(
    "__import__ breakpoint compile delattr dir eval exec getattr globals hash help id input locals "
    "open setattr vars"
)

#: Names that are refused wherever they are an attribute: draws of random numbers, memory that
#: nobody wrote, and ways to what is not named.
_REFUSED = _words(
    "attrgetter bernoulli_ cauchy_ compile exponential_ geometric_ log_normal_ methodcaller "
    "new_empty normal_ random_ random_blocks uniform_"
)

#: Names with two underscores that are no way around the others.
_SPECIAL = _words(
    "__annotations__ __call__ __debug__ __doc__ __file__ __getitem__ __init__ __name__ __new__ "
    "__post_init__"
)


class UnknownInputError(Exception):
    """What a spec file depends on is not in its text; the message names the line."""


@dataclass(frozen=True)
class Source:
    """A file that is read: its place, its content, and what changes when it is written.

    Attributes:
        path: where Python finds it.
        real: the same without links.
        digest: sha256 of its content; empty for a library, which counts by what follows.
        size: bytes.
        modified: when it was written, in ns.
        entry: its inode, and when that changed.
    """

    path: str
    real: str
    digest: str
    size: int
    modified: int
    entry: tuple[int, int]

    @property
    def meaning(self) -> tuple[object, ...]:
        """The part of it that a spec may depend on."""
        return (self.path, self.real, self.digest or (self.size, self.modified))


def source(path: Path, content: bytes | None = None) -> Source:
    """A file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    found = path.stat()
    digest = "" if content is None else sha256(content).hexdigest()
    entry = (found.st_ino, found.st_ctime_ns)
    return Source(str(path), str(path.resolve()), digest, found.st_size, found.st_mtime_ns, entry)


def spec_files(path: Path) -> list[Path]:
    """The spec files that a path names: itself, or those directly in a folder.

    Raises:
        SpecFileError: there is none.
    """
    if path.is_dir():
        files = sorted(file for file in path.glob("*.py") if not file.name.startswith("_"))
        if not files:
            raise SpecFileError(
                f"{path}: no spec files in this folder; name a folder of *.py specs"
            )
        return files
    if not path.exists():
        raise SpecFileError(f"{path}: no such file; name a spec file or a folder of them")
    if path.suffix != ".py":
        raise SpecFileError(
            f"{path}: not a Python file; name a spec file (*.py) or a folder of them"
        )
    return [path]


def spec_inputs(file: Path) -> list[Source]:
    """The file itself, its helpers and theirs, and the places of the libraries that they use.

    Raises:
        UnknownInputError: its variants may depend on something else.
    """
    try:
        return _Reader(file).read()
    except (OSError, SyntaxError, ValueError, KeyError, RecursionError) as error:
        # KeyError: a folder without __init__.py inside of a package that is not imported.
        raise UnknownInputError(f"{file}: {error}") from error


class _Reader:
    """Follows the imports of a spec file, then looks at what the files do."""

    def __init__(self, file: Path) -> None:
        self.file = file.absolute()
        # As `flashgen.loader` has it: the folder of the file, without links, comes first.
        self.folder = self.file.resolve().parent
        self.places = [str(self.folder), *sys.path]
        self.trees: dict[Path, ast.Module] = {}
        self.sources: list[Source] = []
        #: For each file, the names that stand for libraries.
        self.libraries: dict[Path, dict[str, str]] = {}
        #: What is imported by name from helpers.
        self.taken: list[tuple[Path, ast.stmt, str]] = []

    def read(self) -> list[Source]:
        """All sources, each once, in the order in which they are imported."""
        PathFinder.invalidate_caches()
        self.follow(self.file, package="")
        everywhere = {name for names in self.libraries.values() for name in names}
        for path, node, name in self.taken:
            if name in everywhere:
                raise _unknown(path, node, f"takes {name}, a library, from a helper")
        for path, tree in self.trees.items():
            _Looker(path, self.libraries[path], everywhere).visit(tree)
        return list(dict.fromkeys(self.sources))

    def follow(self, path: Path, package: str) -> None:
        """Reads a file, and those that it imports."""
        if path in self.trees:
            return
        if not path.is_file():
            raise UnknownInputError(f"{path}: not a regular file")
        content = path.read_bytes()
        self.sources.append(source(path, content))
        tree = self.trees[path] = ast.parse(content)
        names = self.libraries[path] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.resolve(path, node, alias.name)
                    top = alias.name.partition(".")[0]
                    if _leads_to_library(top):
                        names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                home = _home(path, node, package)
                self.resolve(path, node, home)
                for alias in node.names:
                    self.take(path, node, home, alias, names)

    def take(
        self, path: Path, node: ast.stmt, home: str, alias: ast.alias, names: dict[str, str]
    ) -> None:
        """A name that is imported from a module, or a module from its package."""
        dotted = f"{home}.{alias.name}"
        if alias.name == "*":
            if home != "flashgen":  # whose names are all known
                raise _unknown(path, node, f"imports all of {home}")
        elif not _leads_to_library(home):
            self.taken.append((path, node, alias.name))
            if self.is_package(home):
                self.resolve(path, node, dotted, optional=True)
        elif _leads_to_library(dotted):
            names[alias.asname or alias.name] = dotted
        elif dotted == f"torch.{_TYPE}":
            raise _unknown(path, node, f"uses {dotted}, perhaps to call it")
        else:
            _check_library(path, node, dotted)

    def resolve(self, path: Path, node: ast.stmt, dotted: str, *, optional: bool = False) -> None:
        """Notes where a module is, and follows it if it is a helper."""
        top = dotted.partition(".")[0]
        if _leads_to_library(dotted):
            return self.note_library(path, node, top)
        if _leads_to_library(top) or top in {*sys.stdlib_module_names, *sys.builtin_module_names}:
            raise _unknown(path, node, f"imports {dotted}")
        parts = dotted.split(".")
        for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
            spec = self.find(name)
            if spec is not None:
                self.follow_helper(path, node, name, spec)
            elif not (optional and name == dotted):
                raise _unknown(path, node, f"imports {name}, which is not found")
        return None

    def note_library(self, path: Path, node: ast.stmt, top: str) -> None:
        """Notes the place of a library, which no module beside the file may hide."""
        if top in sys.builtin_module_names:
            return
        if PathFinder.find_spec(top, [str(self.folder)]) is not None:
            raise _unknown(path, node, f"imports {top}, and a module beside it is called so")
        spec = find_top(top, sys.path)
        if spec is None or spec.origin is None:
            raise _unknown(path, node, f"imports {top}, which is not found")
        self.sources.append(source(Path(spec.origin)))

    def follow_helper(self, path: Path, node: ast.stmt, name: str, spec: ModuleSpec) -> None:
        """Reads a module of the user's own."""
        loaded = sys.modules.get(name)
        if loaded is not None and getattr(loaded, "__file__", None) != spec.origin:
            raise _unknown(path, node, f"imports {name}, and another module is called so")
        if spec.origin is None:  # a folder without __init__.py
            return
        if not spec.origin.endswith(".py"):
            raise _unknown(path, node, f"imports {name}, which is not a Python file")
        is_package = spec.submodule_search_locations is not None
        self.follow(Path(spec.origin), name if is_package else name.rpartition(".")[0])

    def is_package(self, dotted: str) -> bool:
        """Whether a module may hold modules."""
        spec = self.find(dotted)
        return spec is not None and spec.submodule_search_locations is not None

    def find(self, dotted: str) -> ModuleSpec | None:
        """Where Python would find a module, which this does not import."""
        home, _, _ = dotted.rpartition(".")
        if not home:
            return find_top(dotted, self.places)
        package = self.find(home)
        if package is None or package.submodule_search_locations is None:
            return None
        return PathFinder.find_spec(dotted, list(package.submodule_search_locations))


def find_top(name: str, places: list[str]) -> ModuleSpec | None:
    """Where Python would find a module without a package, if ``sys.path`` were these places.

    Editable installs have finders of their own.
    """
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(name, places)
        else:
            spec = finder.find_spec(name, None, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


class _Looker(ast.NodeVisitor):
    """Raises `UnknownInputError` where a file uses what its text does not decide."""

    def __init__(self, path: Path, libraries: dict[str, str], everywhere: set[str]) -> None:
        self.path = path
        self.libraries = libraries
        #: The names of libraries in all files, which no file may reach by way of another.
        self.everywhere = everywhere

    def visit_Name(self, node: ast.Name) -> None:
        """A name by itself: no library, and no function that looks outside."""
        if node.id in self.libraries:
            raise _unknown(self.path, node, f"hands {node.id} on")
        if node.id in _OUTSIDE | _REFUSED or _is_way_around(node.id):
            raise _unknown(self.path, node, f"uses {node.id}")

    def visit_Call(self, node: ast.Call) -> None:
        """``torch.Tensor`` is a type to annotate with: a call of it may read unwritten memory."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == _TYPE:
            _, root = _chain(node.func)
            if isinstance(root, ast.Name) and self.libraries.get(root.id) == "torch":
                raise _unknown(self.path, node, f"calls {root.id}.{_TYPE}")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``torch.where``, or a method, or a name of a helper."""
        names, root = _chain(node)
        refused = [name for name in names if name in _REFUSED or _is_way_around(name)]
        if refused:
            raise _unknown(self.path, node, f"uses {refused[0]}")
        if isinstance(root, ast.Name) and root.id in self.libraries:
            _check_library(self.path, node, ".".join([self.libraries[root.id], *names]))
            return
        if reached := self.everywhere.intersection(names):
            raise _unknown(self.path, node, f"reaches {reached.pop()}, as a library is called")
        self.visit(root)


def _chain(node: ast.Attribute) -> tuple[list[str], ast.expr]:
    """The names of ``a.b.c`` after the first, and the expression that they begin with."""
    names, value = [node.attr], node.value
    while isinstance(value, ast.Attribute):
        names.insert(0, value.attr)
        value = value.value
    return names, value


def _is_way_around(name: str) -> bool:
    return name.startswith("__") and name not in _SPECIAL


def _home(path: Path, node: ast.ImportFrom, package: str) -> str:
    """The full name of the module that names are imported from."""
    if not node.level:
        assert node.module is not None
        return node.module
    parents = package.split(".") if package else []
    if node.level > len(parents):
        raise _unknown(path, node, "imports beyond its package")
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)


@cache
def _leads_to_library(dotted: str) -> bool:
    """Whether this is a library, or a package of one."""
    return any(name == dotted or name.startswith(f"{dotted}.") for name in _LIBRARIES)


def _check_library(path: Path, node: ast.AST, dotted: str) -> None:
    """Raises `UnknownInputError` where the results of a library's function tell nothing."""
    parts = dotted.split(".")
    count = max(i for i in range(len(parts) + 1) if ".".join(parts[:i]) in (*_LIBRARIES, ""))
    library, names = ".".join(parts[:count]), parts[count:]
    known = _LIBRARIES.get(library, frozenset())
    is_known = bool(names) and names[0] not in _REFUSED
    if is_known and library == "flashgen":
        is_known = not any((PACKAGE / f"{names[0]}{end}").exists() for end in ("", ".py"))
    elif is_known and known is None:
        is_known = names[0] not in sys.stdlib_module_names and names[0][0] != "_"
    elif is_known:
        is_known = known is not None and names[0] in known
    if not is_known:
        raise _unknown(path, node, f"uses {dotted}")


def _unknown(path: Path, node: ast.AST, what: str) -> UnknownInputError:
    return UnknownInputError(f"{path}:{getattr(node, 'lineno', 0)}: {what}")

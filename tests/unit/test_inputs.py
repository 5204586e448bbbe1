"""What a spec file depends on, told from its text: what is followed, and what is refused."""

import builtins
import sys
from importlib.util import spec_from_file_location

import pytest
import torch

from flashgen.inputs import _OF_TORCH, _OUTSIDE, UnknownInputError, spec_files, spec_inputs
from flashgen.loader import load
from flashgen.paths import PACKAGE
from flashgen.tracing.torch_names import KNOWN
from support.variants import ROOT

SPEC = "from flashgen import AttentionSpec, causal\nspec = AttentionSpec(64, mask=causal())\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of specs, and one of the user's packages, which is on sys.path."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "lib" / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "mine" / "__init__.py").write_text("from .masks import near\n")
    (tmp_path / "lib" / "mine" / "masks.py").write_text("from . import wide\nnear = wide.near\n")
    (tmp_path / "lib" / "mine" / "wide.py").write_text("near = 3\nfrom math import pi\n")
    (tmp_path / "lib" / "mine" / "deep" / "__init__.py").write_text("")
    (tmp_path / "lib" / "mine" / "deep" / "more.py").write_text("from ..wide import near\n")
    (tmp_path / "specs" / "_shared.py").write_text("import torch\nimport _more\nWIDTH = 5\n")
    (tmp_path / "specs" / "_more.py").write_text("MORE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    yield tmp_path / "specs"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def files(folder, text):
    """The names of the files that a spec with this text depends on, below its folder or lib."""
    spec = folder / "spec.py"
    spec.write_text(text + SPEC)
    root = folder.parent
    found = [source.path.removeprefix(f"{root}/") for source in spec_inputs(spec)]
    return {name for name in found if not name.startswith("/")}


@pytest.mark.parametrize(
    ("text", "helpers"),
    [
        ("", []),
        ("import math, functools\nfrom dataclasses import dataclass\n", []),
        ("import torch\nx = torch.where(torch.tensor([1, 2]) > 1, 1, 2).to(torch.int8)\n", []),
        ("import torch.nn.functional as F\nf = lambda x: F.gelu(x)\n", []),
        ("import torch.nn.functional\nf = lambda x: torch.nn.functional.gelu(x)\n", []),
        ("from torch.nn import functional\nf = functional.gelu\n", []),
        ("from torch.nn.attention.flex_attention import and_masks\n", []),
        ("import json\nx = json.loads('[1]')\n", []),
        ("from flashgen import *\n", []),
        ("import torch\ndef f(x: torch.Tensor) -> torch.Tensor: return x\n", []),
        ("import flashgen as fg\nx = fg.full()\n", []),
        ("from _shared import WIDTH\n", ["specs/_shared.py", "specs/_more.py"]),
        ("def f():\n    import _more\n", ["specs/_more.py"]),
        (
            "from mine.masks import near\n",
            ["lib/mine/__init__.py", "lib/mine/masks.py", "lib/mine/wide.py"],
        ),
        (
            "import mine.deep.more\nx = mine.deep.more.near\n",
            [
                f"lib/mine/{name}.py"
                for name in ("__init__", "masks", "wide", "deep/__init__", "deep/more")
            ],
        ),
        (
            "from mine import wide, near\n",
            ["lib/mine/__init__.py", "lib/mine/masks.py", "lib/mine/wide.py"],
        ),
    ],
)
def test_helpers_are_followed_through_their_imports(folder, text, helpers):
    assert files(folder, text) == {"specs/spec.py", *helpers}
    assert load([folder / "spec.py"])  # the text is one that works


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\n", "imports os"),
        ("import time\n", "imports time"),
        ("from random import random\n", "imports random"),
        ("from pathlib import Path\n", "imports pathlib"),
        ("import os.path\n", "imports os.path"),
        ("def f():\n    import os\n", "imports os"),
        ("try:\n    import fancy\nexcept ImportError: pass\n", "imports fancy, which is not found"),
        ("open('table')\n", "uses open"),
        ("x = id(3)\n", "uses id"),
        ("import torch\ng = [torch]\n", "hands torch on"),
        ("x = getattr(3, 'real')\n", "uses getattr"),
        ("import torch as t\nu = t\n", "hands t on"),
        ("import torch\nx = torch.rand(3)\n", "uses torch.rand"),
        ("from torch import randn\n", "uses torch.randn"),
        ("import torch\nx = torch.tensor([1.0]).normal_()\n", "uses normal_"),
        ("import torch\nx = torch.cuda.is_available()\n", "uses torch.cuda.is_available"),
        ("import torch\nx = torch.nn.functional.dropout\n", "uses torch.nn.functional.dropout"),
        ("import torch.cuda\n", "imports torch.cuda"),
        ("import torch\nx = torch.Tensor(3)\n", "calls torch.Tensor"),
        ("from torch import Tensor\n", "uses torch.Tensor, perhaps to call it"),
        ("from flashgen import *\nx = random_blocks(1, 64)\n", "uses random_blocks"),
        ("from torch import *\n", "imports all of torch"),
        ("import json\nx = json.load(0)\n", "uses json.load"),
        ("import functools\nx = functools.sys\n", "uses functools.sys"),
        ("from flashgen import random_blocks\n", "uses flashgen.random_blocks"),
        ("import flashgen\nx = flashgen.compile\n", "uses compile"),
        ("from flashgen import cache\n", "uses flashgen.cache"),
        ("from flashgen.cache import os\n", "imports flashgen.cache"),
        ("import _shared\nx = _shared.torch.rand(3)\n", "reaches torch, as a library is called"),
        ("from _shared import torch\n", "takes torch, a library, from a helper"),
        ("from _shared import *\n", "imports all of _shared"),
        ("x = (lambda: 0).__globals__\n", "uses __globals__"),
        ("x = __builtins__\n", "uses __builtins__"),
        ("import _reads\n", "_reads.py:1: imports os"),
        ("from . import _more\n", "imports beyond its package"),
    ],
)
def test_what_the_text_does_not_tell_is_refused_with_its_line(folder, text, why):
    (folder / "_reads.py").write_text("import os\n")
    with pytest.raises(UnknownInputError) as refused:
        files(folder, text)
    where, _, _ = str(refused.value).partition(": ")
    assert why in str(refused.value)
    assert where.rpartition(":")[2] in ("1", "2")


def test_an_editable_install_is_found_as_python_finds_it(folder, monkeypatch):
    """flashgen itself, or the user's package: by a finder, from outside of sys.path."""
    hidden = folder.parent / "checkout" / "edited.py"
    hidden.parent.mkdir()
    hidden.write_text("near = 3\n")
    known = {"edited": hidden, "flashgen": PACKAGE / "__init__.py"}

    class Redirecting:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_file_location(name, known[name]) if name in known else None

    monkeypatch.setattr(sys, "path", [str(folder.parent / "lib")])
    with pytest.raises(UnknownInputError, match="imports edited, which is not found"):
        files(folder, "from edited import near\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Redirecting])
    assert files(folder, "from edited import near\n") == {"specs/spec.py", "checkout/edited.py"}


def test_a_module_beside_the_spec_does_not_stand_for_a_library(folder):
    (folder / "functools.py").write_text("")
    with pytest.raises(UnknownInputError, match="and a module beside it is called so"):
        files(folder, "import functools\n")


def test_a_helper_that_python_has_already_imported_from_elsewhere(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "_more", sys)
    with pytest.raises(UnknownInputError, match="another module is called so"):
        files(folder, "import _more\n")


@pytest.mark.parametrize("text", ["def", "\0", "x = '" + "\\N{no such}'"])
def test_what_python_cannot_read(folder, text):
    with pytest.raises(UnknownInputError):
        files(folder, text)


def test_the_text_of_every_shipped_spec_tells_all():
    """But for the example that draws its blocks."""
    refused = []
    for path in (*spec_files(ROOT / "specs"), *spec_files(ROOT / "examples" / "specs")):
        try:
            spec_inputs(path)
        except UnknownInputError:
            refused.append(path.name)
    assert refused == ["bigbird_drawn.py"]


def test_the_names_of_torch_exist_and_hold_all_that_trace():
    exist = {name for name in _OF_TORCH if hasattr(torch, name)}
    functional = {name for name in _OF_TORCH - exist if hasattr(torch.nn.functional, name)}
    methods = {name for name in _OF_TORCH - exist - functional if hasattr(torch.Tensor, name)}
    assert exist | functional | methods == _OF_TORCH
    of_modules = {n for n in KNOWN if hasattr(torch, n) or hasattr(torch.nn.functional, n)}
    left_out = of_modules - _OF_TORCH
    assert {n for n in left_out if not n.startswith(("_", "special_"))} == {"cpu", "cuda"}
    assert not {name for name in _OF_TORCH if "rand" in name or "seed" in name}


def test_pythons_functions_that_look_outside_are_refused():
    """Every other builtin is a type, an exception, or computes from its arguments alone."""
    computing = {
        "abs", "aiter", "all", "anext", "any", "ascii", "bin", "callable", "chr", "copyright",
        "credits", "divmod", "exit", "format", "hasattr", "hex", "isinstance", "issubclass",
        "iter", "len", "license", "max", "min", "next", "oct", "ord", "pow", "print", "quit",
        "repr", "round", "sorted", "sum",
    }  # fmt: skip
    functions = {
        name
        for name, value in vars(builtins).items()
        if not isinstance(value, type | bool) and value not in (None, NotImplemented, ...)
        and not (name.startswith("__") and name != "__import__")
    }  # fmt: skip
    assert functions - {"_"} == computing | _OUTSIDE

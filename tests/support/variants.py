"""The modules under test: those of generated/, and variants that are rendered for one test."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from flashgen import AttentionSpec
from flashgen.codegen.environment import render
from flashgen.codegen.module import render_module
from flashgen.config import HOPPER, ChosenConfig, KernelChoice, KernelConfig
from flashgen.kernels.backward_hopper.kernel import BackwardHopper
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.backward_hopper_split.kernel import BackwardHopperSplit
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper, without_form
from flashgen.kernels.registry import kernels_of
from flashgen.loader import load
from flashgen.normalisers import Linear
from flashgen.plan import KernelPlan, lower
from flashgen.plan.backward import BackwardPlan, backward_plan
from support.quick_compile import compiled
from support.source_lines import quick_inspect

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "generated"

#: What the Gluon kernels of a backward pass can consist of.
HOPPER_BACKWARD_FUNCTIONS = tuple(
    dict.fromkeys((*BackwardHopper.functions, *BackwardHopperSplit.functions))
)

_serial = itertools.count()


@functools.cache
def all_specs() -> dict[str, AttentionSpec]:
    """Every variant of specs/ by name, as the folder lists them.

    Raises:
        SpecFileError: the folder holds none.
    """
    return {variant.name: variant.spec for variant in load([ROOT / "specs"])}


def shipped_specs() -> dict[str, AttentionSpec]:
    """Those of them that have scores: all but linear attention, which has kernels of its own."""
    return {x: spec for x, spec in all_specs().items() if not isinstance(spec.normaliser, Linear)}


def linear_specs() -> dict[str, AttentionSpec]:
    """The others: of linear attention."""
    return {x: spec for x, spec in all_specs().items() if isinstance(spec.normaliser, Linear)}


@functools.cache
def shipped_plan(name: str) -> KernelPlan:
    """A shipped variant's plan, made once: what it derives is kept with it."""
    return lower(all_specs()[name], name)


def gluon_specs() -> dict[str, AttentionSpec]:
    """Those of them that have Gluon kernels: the ones of 16 bits."""
    return {name: spec for name, spec in shipped_specs().items() if spec.dtype != "float32"}


@functools.cache
def shipped_module(name: str) -> ModuleType:
    """The committed module of a shipped variant, the one that anything else imports too."""
    with quick_inspect(GENERATED / f"{name}.py", f"generated.{name}"):
        return importlib.import_module(f"generated.{name}")


def shipped_module_anew(name: str) -> ModuleType:
    """The same once more, as if nothing had been called yet, and with an operator of its own.

    Of two modules whose operators have one name, the first one's is that of both.
    """
    return imported(name, (GENERATED / f"{name}.py").read_text())


def _as_it_is(plan: KernelPlan) -> KernelPlan:
    return plan


def rendered_module(
    spec: AttentionSpec,
    *,
    name: str = "rendered",
    hopper: bool = False,
    edit_plan: Callable[[KernelPlan], KernelPlan] = _as_it_is,
    edit_source: Callable[[str], str] = lambda source: source,
) -> ModuleType:
    """A spec's module as flashgen renders it now, with the Gluon kernels where they are asked for.

    It has an operator of its own. The edits are for mutants.
    """
    if edit_plan is not _as_it_is:
        return imported(name, edit_source(_rendered(edit_plan(lower(spec, name)), hopper)))
    key = (id(spec), name, hopper)
    if key not in _sources:
        _sources[key] = _rendered(lowered(spec, name), hopper)
    return imported(name, edit_source(_sources[key]))


def lowered(spec: AttentionSpec, name: str = "rendered") -> KernelPlan:
    """A spec's plan, the one that `rendered_module` renders: what it derives is kept with it."""
    key = (id(spec), name)
    if key not in _plans:
        _plans[key] = spec, lower(spec, name)
    return _plans[key][1]


def _rendered(plan: KernelPlan, hopper: bool) -> str:
    return rendered(plan, *((any_hopper(plan), any_hopper_backward(plan)) if hopper else ()))


def first_on_hopper(spec: AttentionSpec) -> KernelConfig:
    """The configuration of the Gluon forward kernel that a build without measurements chooses."""
    if id(spec) not in _firsts:
        plan = lowered(spec)
        _firsts[id(spec)] = rank_hopper(plan, hopper_space(plan).candidates)[0]
    return _firsts[id(spec)]


#: Of specs by their ids, which stay their own: a spec is kept with its plan, that may have another.
_plans: dict[tuple[int, str], tuple[AttentionSpec, KernelPlan]] = {}
_firsts: dict[int, KernelConfig] = {}
#: What they render to, which is the same each time.
_sources: dict[tuple[int, str, bool], str] = {}


def imported(name: str, source: str) -> ModuleType:
    """A module's source as a module, with an operator of its own."""
    number = next(_serial)
    path = _scratch() / f"{name}_{number}.py"
    path.write_text(source.replace('"flashgen::', f'"flashgen::anew_{number}_'))
    return import_file(path)


def any_configs(plan: KernelPlan) -> dict[str, ChosenConfig]:
    """Some configuration for each target: for tests that pass their own, or look at the text."""
    config = KernelConfig(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=2)
    return {target: ChosenConfig(config, "model", shared=4096) for target in plan.targets}


def rendered(plan: KernelPlan, *gluon: dict[str, KernelChoice]) -> str:
    """A plan's module with some configuration of each kernel in Triton, and of these in Gluon."""
    if plan.linear:
        return render_module(plan, any_linear(plan))
    choices = {"portable": KernelChoice(any_configs(plan))} | any_backward(plan)
    if plan.spec.has_form("cache"):
        choices["cached"] = any_cache(plan)
    for more in gluon:
        choices |= more
    return render_module(plan, choices)


def any_backward(plan: KernelPlan) -> dict[str, KernelChoice]:
    """Some configurations of the portable backward kernels for each target."""
    keys = KernelConfig(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2)
    queries = KernelConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    return {
        key: KernelChoice(dict.fromkeys(plan.targets, ChosenConfig(config, "model", shared=4096)))
        for key, config in (("backward_keys", keys), ("backward_queries", queries))
    }


def any_linear(plan: KernelPlan) -> dict[str, KernelChoice]:
    """Some configurations of the kernels of linear attention, whose chunks have few rows."""
    config = KernelConfig(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=2)
    choice = KernelChoice(dict.fromkeys(plan.targets, ChosenConfig(config, "model", shared=4096)))
    return {"linear": choice, "linear_gradients": choice}


def any_cache(plan: KernelPlan) -> KernelChoice:
    """Some configuration of the cache kernel for each target."""
    config = KernelConfig(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=2)
    return KernelChoice(dict.fromkeys(plan.targets, ChosenConfig(config, "model", shared=4096)))


def any_hopper(plan: KernelPlan) -> dict[str, KernelChoice]:
    """Some configuration of the Gluon kernel, where the plan can have one."""
    if reason := without_form(plan):
        return {"hopper": KernelChoice(why_not=reason)}
    return {"hopper": on_hopper(KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2))}


def any_hopper_backward(plan: KernelPlan) -> dict[str, KernelChoice]:
    """The same of the Gluon kernel of the backward pass, whose tiles are as they are."""
    names = HopperBackward(backward_plan(plan))
    if HOPPER not in plan.targets or names.why_not:
        return {"hopper_backward": KernelChoice(why_not=names.why_not)}
    config = KernelConfig(names.block_m, names.block_n, num_warps=8, num_stages=2)
    return {"hopper_backward": on_hopper(config)}


def on_hopper(config: KernelConfig) -> KernelChoice:
    """A configuration of a Gluon kernel."""
    return KernelChoice({HOPPER: ChosenConfig(config, "model", shared=4096)})


def names_of_gluon(*, adds: bool, clears: bool) -> str:
    """What stands before Gluon kernels: under one name each what Tritons call differently.

    Args:
        adds: whether one of them has TMA add tiles, and takes memory as another type.
        clears: whether they clear hidden rows.
    """
    return render("module/names.py.jinja", adds=adds, clears=clears, reinterprets=adds)


def kernel_digest(plan: KernelPlan, key: str = "portable") -> str:
    """The digest of a kernel's source."""
    return kernels_of(plan)[key].digest(plan)


def why_no_backward(names: HopperBackward) -> str:
    """Why a backward pass has no Gluon kernel; ``""`` where it has one."""
    plan = names.backward.plan
    return kernels_of(plan)["hopper_backward"].space(plan, HOPPER).why_not


def render_backward_hopper(backward: BackwardPlan) -> str:
    """The source of the Gluon kernels of a backward pass."""
    kernel = BackwardHopperSplit() if HopperBackward(backward).split else BackwardHopper()
    return kernel.source(backward.plan)


def import_file(path: Path) -> ModuleType:
    """A Python file as a module of its own, in no package."""
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None, path
    module = importlib.util.module_from_spec(module_spec)
    with quick_inspect(path):
        for code in compiled(path.read_text(), str(path)):
            exec(code, vars(module))
    return module


@functools.cache
def _scratch() -> Path:
    # Triton reads a kernel's source back from its file, for as long as the process lives.
    folder = tempfile.TemporaryDirectory(prefix="flashgen-tests-")
    _scratch.__dict__["folder"] = folder
    return Path(folder.name)

"""Renders a plan through the Jinja templates. Pure: no clock, no device, no output folder."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256

import jinja2

from flashgen.budget.targets import get_target
from flashgen.codegen.folding import fold, indented, wrap
from flashgen.codegen.unpacking import unpacking
from flashgen.config import (
    BACKWARD_FORMS,
    BACKWARD_KERNELS,
    HOPPER,
    BackwardConfigs,
    BackwardKernel,
    ChosenConfig,
    Form,
    HopperChoice,
)
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.shared_memory import queries_usage
from flashgen.kernels.forward_hopper.plan import OUT_COLUMNS, RANGES, HopperNames
from flashgen.kernels.forward_hopper.segment_tiles import cut_makes
from flashgen.kernels.forward_hopper.shape import hopper_shape
from flashgen.paths import template_dir
from flashgen.plan import KernelPlan
from flashgen.plan.backward import BackwardPlan, backward_plan
from flashgen.plan.mask_code import Seen
from flashgen.plan.text import mentioned

#: Of a module that holds the portable kernel alone.
NO_HOPPER = HopperChoice()

#: Of a module whose gradients are the reference's.
NO_BACKWARD: Mapping[str, BackwardConfigs] = {}

#: The backward kernels' functions.
BACKWARD_FUNCTIONS: Mapping[BackwardKernel, str] = {
    "keys": "_backward_of_keys",
    "queries": "_backward_of_queries",
}

#: Those of its Gluon form, in the order that they run in: the first, then one of the others.
HOPPER_BACKWARD_FUNCTIONS = ("_backward_hopper", "_place_sums", "_backward_queries_hopper")

# What scores read most: kernels have functions for it, cheaper than converting every position.
_DISTANCES = "gl.cast(kv_idx - q_first, gl.float32)"
_STEPS_BACK = "gl.cast(q_first - offs_m, gl.float32)"


def render_kernel(plan: KernelPlan) -> str:
    """The Triton functions of the forward kernel, `_attention_forward` last."""
    return _environment().get_template("forward_triton/kernel.py.jinja").render(plan=plan)


def render_backward(backward: BackwardPlan) -> str:
    """The Triton functions of the backward pass, which call those of `render_kernel`."""
    template = _environment().get_template("backward_triton/kernel.py.jinja")
    return template.render(plan=backward.plan, backward=backward).strip("\n") + "\n"


def render_hopper(plan: KernelPlan) -> str:
    """The functions of the forward kernel for Hopper: those in Gluon, `_attention_hopper` last.

    Where tiles of queries start at segments, `_cut_queries` comes before them, in Triton.
    """
    shape = hopper_shape(plan)
    names = HopperNames(plan)
    template = _environment(gluons=gluon).get_template("forward_hopper/kernel.py.jinja")
    text = template.render(
        plan=plan,
        shape=shape,
        names=names,
        weights=RANGES[plan.torch_dtype],
    )
    template = _environment().get_template("forward_hopper/segment_tiles.py.jinja")
    cuts = template.render(cut_by=names.cut_by) if names.cut_by else ""
    return (cuts + "\n\n" + text.strip("\n")).strip("\n") + "\n"


def render_names(*, adds: bool) -> str:
    """Under one name each what Tritons call differently: it stands before the Gluon kernels.

    Args:
        adds: whether one of them computes all three gradients.
    """
    return _environment().get_template("module/names.py.jinja").render(adds=adds)


def render_backward_hopper(backward: BackwardPlan, *, after_forward: bool) -> str:
    """The functions of the backward kernels for Hopper: `_backward_hopper`, then `_place_sums`.

    Where the pass is divided, `_backward_queries_hopper` comes last instead, unless the portable
    kernel over tiles of queries is the other one.

    Args:
        backward: the plan.
        after_forward: whether those of `render_hopper` stand before them, which they share.
    """
    names = HopperBackwardSplit(backward)
    given = {"plan": backward.plan, "backward": backward, "names": names}
    used = {*names.gathers, *(names.of_queries.gathers if names.both_in_gluon else ())}
    gathers = sorted(used.difference(backward.plan.gathers if after_forward else ()))
    over_keys = f"backward_hopper{'_split/keys' if names.divided else '/kernel'}.py.jinja"
    template = _environment(gluons=gluon_backward).get_template(over_keys)
    before = HopperNames(backward.plan).of_octets if after_forward else Seen(())
    parts = [template.render(after_forward=after_forward, before=before, gathers=gathers, **given)]
    if names.both_in_gluon:
        over_queries = "backward_hopper_split/queries.py.jinja"
        template = _environment(gluons=gluon_queries).get_template(over_queries)
        parts.append(template.render(queries=names.of_queries, **given))
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def gluon(text: str) -> str:
    """Triton source as Gluon's, for expressions and for functions without layouts of their own."""
    return _gluon(text).replace(_DISTANCES, "_columns(scores, start_n - q_first, gl.float32)")


def gluon_backward(text: str) -> str:
    """Triton source as Gluon's, in the backward kernel, where keys are rows."""
    return _gluon(text).replace(_STEPS_BACK, "-_query_columns(scores, 0, gl.float32)")


def gluon_queries(text: str) -> str:
    """Triton source as Gluon's, in the kernel for the gradient of q, where queries are rows."""
    return _gluon(text).replace(_DISTANCES, "_key_columns(scores, start_n - q_first, gl.float32)")


def _gluon(text: str) -> str:
    text = re.sub(r"\btl\.(?:math\.)?", "gl.", text).replace("@triton.jit", "@gluon.jit")
    text = re.sub(r"\b(_at_\d+d|_tanh|_swap_if)\(", r"\1_hopper(", text)
    return text.replace(", APPROX)", ", True)")


def kernel_digest(plan: KernelPlan, form: Form = "portable") -> str:
    """sha256 over a kernel's code without comments and docstrings: what a measurement is of.

    That of a backward kernel is over the functions that it calls, and over no others.
    """
    called: tuple[str, ...] = ()
    if form == "hopper":
        text = render_hopper(plan)
    elif form == "hopper_backward":
        text = render_backward_hopper(backward_plan(plan), after_forward=False)
        called = HOPPER_BACKWARD_FUNCTIONS
    else:
        text = render_kernel(plan)
    for kernel, name in BACKWARD_FORMS.items():
        if form == name:
            text += "\n\n" + render_backward(backward_plan(plan))
            called = (BACKWARD_FUNCTIONS[kernel],)
    tree = ast.parse(text)
    if called:
        tree.body = _called_by(called, tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function):
            function.body = function.body[1:]
    return sha256(ast.unparse(_Quoted(text).visit(tree)).encode()).hexdigest()


def _called_by(names: Iterable[str], tree: ast.Module) -> list[ast.stmt]:
    """Functions of a source with the others of it that they call, in the source's order."""
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    called, waiting = set(), list(names)
    while waiting:
        at = waiting.pop()
        if at in functions and at not in called:
            called.add(at)
            waiting += [n.id for n in ast.walk(functions[at]) if isinstance(n, ast.Name)]
    return [function for at, function in functions.items() if at in called]


class _Quoted(ast.NodeTransformer):
    """F-strings as strings of their own source: Pythons do not unparse them alike."""

    def __init__(self, text: str) -> None:
        self.text = text

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        """The source of one."""
        return ast.Constant(ast.get_source_segment(self.text, node))


def render_module(
    plan: KernelPlan,
    chosen: Mapping[str, ChosenConfig],
    hopper: HopperChoice = NO_HOPPER,
    package: str = "generated",
    backward: Mapping[str, BackwardConfigs] = NO_BACKWARD,
    hopper_backward: HopperChoice = NO_HOPPER,
) -> str:
    """The published module's source.

    Args:
        plan: the kernel.
        chosen: the portable kernel's configuration for each target, in the order that the module
            lists them.
        hopper: whether the Gluon kernel is in the module too.
        package: the folder that users import the module from.
        backward: the backward kernels' configurations for each target; without one, gradients are
            those of the reference.
        hopper_backward: whether the Gluon kernels of the backward pass are in the module too.
    """
    template = _environment().get_template("module/module.py.jinja")
    of_backward = backward_plan(plan)
    names = HopperBackwardSplit(of_backward)
    cut_by = HopperNames(plan).cut_by if hopper.config else None
    two = hopper_backward.config is not None and names.both_in_gluon
    kernels = {
        "kernel": render_kernel(plan),
        "backward_kernels": render_backward(of_backward),
        "hopper_kernel": render_hopper(plan) if hopper.config else "",
        "hopper_backward_kernel": (
            render_backward_hopper(of_backward, after_forward=hopper.config is not None)
            if hopper_backward.config
            else ""
        ),
    }
    # How they were chosen changes nothing of what runs.
    of_targets = [(name, one.config) for name, one in chosen.items()]
    of_gradients = [(name, one.keys.config, one.queries.config) for name, one in backward.items()]
    of_gluon = [one.config and one.config.config for one in (hopper, hopper_backward)]
    return template.render(
        plan=plan,
        chosen=chosen,
        targets={name: get_target(name) for name in chosen},
        sizing=plan.sizing_numbers,
        op_digest=_op_digest(plan, kernels, (of_targets, of_gradients, of_gluon)),
        **kernels,
        backward=of_backward,
        backward_configs={
            name: {kernel: getattr(backward[name], kernel) for kernel in BACKWARD_KERNELS}
            for name in chosen
            if name in backward
        },
        hopper=hopper,
        hopper_backward=hopper_backward,
        hopper_backward_names=names,
        queries_shared=queries_usage(names).total if two else 0,
        hopper_limit=get_target(HOPPER).max_shared,
        out_columns=OUT_COLUMNS,
        cut_by=cut_by,
        cut_makes=cut_makes(plan, cut_by) if cut_by is not None else (),
        counts=hopper.config is not None and HopperNames(plan).counts,
        packs=hopper.config is not None and HopperNames(plan).packs,
        package=package,
    )


def _op_digest(plan: KernelPlan, kernels: Mapping[str, str], configs: object) -> str:
    """Of all that an op runs: modules of one name that run anything else have ops of their own.

    torch has one op of a name, and runs that of the module that was imported last.
    """
    elements = [constant.elements.digest for constant in plan.spec.constants]
    text = repr((kernels, configs, plan.torch_dtype, elements))
    return sha256(text.encode()).hexdigest()


@functools.cache
def _environment(*, gluons: Callable[[str], str] | None = None) -> jinja2.Environment:
    """The templates; those of Gluon break lines by the width that they have as Gluon's."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Python that is rendered
    )
    environment.filters["fold"] = (lambda line: fold(gluons(line))) if gluons else fold
    environment.filters["indented"] = indented
    environment.filters["wrap"] = wrap
    environment.filters["gluon"] = gluons
    environment.filters["unpacking"] = unpacking
    environment.filters["dedent"] = lambda text: re.sub(r"^ {4}", "", text, flags=re.MULTILINE)
    environment.filters["prefix"] = lambda text, prefix: prefix + text
    environment.tests["read_in"] = lambda name, text: bool(mentioned([name], [text]))
    return environment

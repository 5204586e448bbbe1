"""validate: all mistakes in a spec, found before anything is derived from it."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from traceback import extract_tb

import sympy

from flashgen.arguments import ALIGNMENTS
from flashgen.budget.targets import TARGETS, get_target
from flashgen.budget.usage import SramUsage, largest_fitting
from flashgen.codegen.names import is_fixed, is_taken
from flashgen.config import FORMS, KernelConfig
from flashgen.constants import Constant
from flashgen.errors import MaskError, SramViolation, Violation, one_of, shown
from flashgen.forms.registry import why_no_form
from flashgen.kernels.base import Kernel
from flashgen.loader import Variant
from flashgen.masks import Mask
from flashgen.normalisers import Linear, Normaliser
from flashgen.params import Tensor
from flashgen.plan import KernelPlan
from flashgen.plan.code import finite_score
from flashgen.plan.linear import ARGUMENTS
from flashgen.plan.pairs import LINEAR_MASKS
from flashgen.plan.score_gradient import meeting_tensors
from flashgen.scores import Score
from flashgen.spec import DTYPES, INPUT_PRECISIONS, AttentionSpec, Blocks
from flashgen.symbolic.trace import Predicate, trace
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN, Load
from flashgen.tracing.user_code import users_line
from flashgen.validate_linear import feature_findings, linear_findings
from flashgen.validate_matrices import Finding

HEAD_DIMS = range(16, 513, 8)
TILE_SIDES = (16, 32, 64, 128, 256)
BLOCK_CHOICES: dict[str, tuple[str, tuple[int, ...]]] = {
    "BLOCK_M": ("a power of two from 16 to 256", TILE_SIDES),
    "BLOCK_N": ("a power of two from 16 to 256", TILE_SIDES),
    "num_warps": ("a power of two from 1 to 16", (1, 2, 4, 8, 16)),
    "num_stages": ("a number from 1 to 5", (1, 2, 3, 4, 5)),
}


def validate(variant: Variant) -> list[Violation]:
    """All mistakes in the fields of a spec; `unfit` tells whether its blocks fit."""
    checks = (
        _name, _head_dim, _dtype, _input_precision, _scale,
        _mask, _score, _align, _normaliser, _params, _dropout, _deterministic, _autocast,
        _linformer, _forms, _blocks,
        _targets,
    )  # fmt: skip
    return [
        Violation(variant.name, field, shown(value), problem, remedy, variant.file)
        for check in checks
        for field, value, problem, remedy in check(variant.name, variant.spec)
    ]


def unfit(
    variant: Variant,
    plan: KernelPlan,
    kernel: Kernel,
    target: str,
    rejected: Sequence[tuple[KernelConfig, str]],
) -> Violation:
    """The error for a target without a candidate: about the one that is nearest to fitting.

    Args:
        variant: the variant, with its blocks.
        plan: the variant's plan.
        kernel: the kernel that the module needs.
        target: the target without a candidate.
        rejected: all candidates that were tried, each with the reason.
    """

    def usage_of(config: KernelConfig) -> SramUsage:
        return kernel.worst_usage(plan, config, get_target(target))

    usages = {config: usage_of(config) for config, _ in rejected}
    config, reason = min(rejected, key=lambda entry: usages[entry[0]].total)
    usage = usages[config]
    if usage.fits:
        remedy = f"allow other blocks, or leave {target} out of targets"
        return Violation(variant.name, "blocks", _tiles(config), reason, remedy, variant.file)
    return SramViolation(
        variant.name,
        "blocks",
        f"{_tiles(config)}: {usage.breakdown}",
        f"SRAM budget exceeded on {target}: needs {usage.total:,} B, has {usage.limit:,} B",
        _what_fits(config, usage_of) or f"No smaller blocks fit: leave {target} out of targets",
        variant.file,
    )


def without_forms(variant: Variant, plan: KernelPlan) -> Iterator[Violation]:
    """The violation of each declared form that the variant cannot have."""
    for form in variant.spec.forms:
        if why_not := why_no_form(form, plan):
            remedy = f"leave {form!r} out of forms"
            yield Violation(
                variant.name, "forms", shown(variant.spec.forms), why_not, remedy, variant.file
            )


def _what_fits(config: KernelConfig, usage: Callable[[KernelConfig], SramUsage]) -> str:
    for block_n in reversed(TILE_SIDES):
        if block_n < config.BLOCK_N and usage(replace(config, BLOCK_N=block_n)).fits:
            return f"Largest BLOCK_N that fits: {block_n}"
    nearest = largest_fitting(config, usage)
    return "" if nearest is None else f"Nearest blocks that fit: {_tiles(nearest)}"


def _tiles(config: KernelConfig) -> str:
    return f"BLOCK_M={config.BLOCK_M} BLOCK_N={config.BLOCK_N} num_stages={config.num_stages}"


def _name(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    remedy = "rename the spec file, or give the spec another name"
    if not name.isidentifier() or not name.isascii():
        yield "name", name, "not an identifier that Python can import", remedy
    elif keyword.iskeyword(name):
        yield "name", name, "a keyword of Python", remedy
    elif name.startswith("__"):
        yield "name", name, "a name that Python keeps for itself", remedy


def _head_dim(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    accepted = f"a multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    head_dim = spec.head_dim
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim,)
    wrong = [dim for dim in dims if not (_is_int(dim) and dim in HEAD_DIMS)]
    if isinstance(head_dim, tuple) and len(head_dim) != 2:
        yield "head_dim", head_dim, "not a pair", f"write {accepted}, or (qk, v) of two"
    elif isinstance(head_dim, tuple) and wrong:
        yield "head_dim", head_dim, f"{shown(wrong[0])} is not {accepted}", "write two that are"
    elif wrong:
        yield "head_dim", head_dim, f"not {accepted}", "write one that is, or (qk, v) of two"


def _dtype(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    if spec.dtype not in DTYPES:
        yield "dtype", spec.dtype, "not a dtype that flashgen supports", one_of(DTYPES)


def _input_precision(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    precision = spec.input_precision
    if precision is None:
        return
    if precision not in INPUT_PRECISIONS:
        remedy = one_of((*INPUT_PRECISIONS, None))
        yield "input_precision", precision, "not a precision of float32 products", remedy
    elif spec.dtype != "float32" and spec.dtype in DTYPES:
        problem = f"applies to float32, and dtype is {spec.dtype!r}"
        yield "input_precision", precision, problem, "leave it out"


def _scale(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    scale = spec.scale
    if scale is None:
        return
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not 2.0**-126 <= scale < 2.0**127:  # a normal float32, also times log2(e)
        problem = "not a positive number of 32 bits, below 2**127"
        yield "scale", scale, problem, "write one, or leave it out"


def _mask(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    if not isinstance(spec.mask, Mask):
        remedy = "give a mask of flashgen's, or a function (b, h, q_idx, kv_idx) -> bool"
        yield "mask", spec.mask, "not a mask", remedy
        return
    yield from _untraceable("mask", spec.mask, lambda: _seen_by(spec.mask))


def _seen_by(mask: Mask) -> Predicate:
    """What a mask shows.

    Raises:
        MaskError: the mask cannot be traced, or shows nothing.
    """
    predicate = trace(mask)
    if predicate.expr == sympy.false:
        raise MaskError("no query sees a key; fix its conditions, which exclude each other")
    return predicate


def _score(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    score = spec.score
    if score is None:
        return
    if not isinstance(score, Score):
        remedy = "give one of flashgen's, or a function (score, b, h, q_idx, kv_idx) -> number"
        yield "score", score, "not a score function", remedy
        return
    yield from _untraceable("score", score, lambda: finite_score(score))


def _align(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    align = spec.align
    if align is None:
        return
    if align not in ALIGNMENTS:
        yield "align", align, "not an alignment of queries and keys", one_of(ALIGNMENTS)
        return
    checks = {"mask": (spec.mask, _mask), "score": (spec.score, _score)}
    for field, (function, check) in checks.items():
        if isinstance(function, Mask | Score) and not any(check(name, spec)):
            found = list(_untraceable(field, function, partial(function.aligned, align)))
            yield from found or _moved_out(field, function, align)


def _moved_out(field: str, function: Mask | Score, align: str) -> Iterator[Finding]:
    """Findings on tensors that a moved q_idx can leave: it counts keys, and they hold queries."""
    try:
        traced = function.traced
    except (MaskError, SystemExit):
        return  # which has its own finding
    tensors = {param.sym: param for param in traced.params if isinstance(param, Tensor)}
    for load in sorted(traced.sym.atoms(Load), key=str):
        dims = tensors[load.args[0]].dims if load.args[0] in tensors else ()
        for index, dim in zip(load.args[1:], dims, strict=False):
            if dim is not None and dim.sym == Q_LEN and {Q_IDX, KV_LEN} <= index.free_symbols:
                tensor = tensors[load.args[0]]
                problem = (
                    f"with align={align!r} q_idx counts keys, and {tensor.name} has q_len of them"
                )
                yield field, function, problem, f"declare that dimension of {tensor.name} as kv_len"
                return


def _normaliser(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    normaliser = spec.normaliser
    if not isinstance(normaliser, Normaliser):
        remedy = (
            "write softmax(), softmax(sink=...), softmax_off_by_one(), sigmoid_attention() or "
            "linear(...)"
        )
        yield "normaliser", normaliser, "not a normaliser", remedy
        return
    findings = list(_untraceable("normaliser", normaliser, lambda: normaliser.params))
    yield from findings
    if isinstance(normaliser, Linear) and not findings:
        traced = None
        if isinstance(spec.mask, Mask) and not any(_mask(name, spec)):
            traced = trace(spec.mask).expr
        yield from linear_findings(spec, normaliser, traced)
        if not any(_head_dim(name, spec)):
            yield from feature_findings(spec, normaliser, traced)


def _params(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    """The mistakes in the parameters of functions that can be traced."""
    try:
        declared = spec.declared
    except (MaskError, SystemExit) as error:
        if not any(chain(_mask(name, spec), _score(name, spec), _normaliser(name, spec))):
            problem, _, remedy = str(error).rpartition("; ")
            yield "params", name, problem, remedy
        return
    except AttributeError:
        return  # a field that is no mask, score or normaliser, which has its own finding
    forms = spec.forms if isinstance(spec.forms, tuple) else ()
    own = ARGUMENTS if isinstance(spec.normaliser, Linear) else frozenset()
    for param in declared:
        if param.name in own or is_fixed(param.name, dropout=spec.dropout is True, forms=forms):
            kind = "constant" if isinstance(param, Constant) else "parameter"
            problem = f"{kind} {param.name!r} is a name that the generated module uses"
            others = (f"{param.name}_", f"the_{param.name}", f"{param.name}_value")
            free = next(name for name in others if not is_taken(name, dropout=True, forms=FORMS))
            yield "params", param, problem, f"rename the {kind}, to {free} for one"


def _dropout(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    if not isinstance(spec.dropout, bool):
        problem, remedy = "neither True nor False", "write dropout=True; calls choose dropout_p"
        yield "dropout", spec.dropout, problem, remedy


def _deterministic(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    if not isinstance(spec.deterministic, bool):
        problem, remedy = "neither True nor False", "write deterministic=True, or leave it out"
        yield "deterministic", spec.deterministic, problem, remedy
    elif spec.deterministic and not any(_score(name, spec)):
        for tensor in meeting_tensors(spec):
            problem = f"gradients of {tensor!r} are sums that several programs add to"
            remedy = "index it by head, query, key or distance, or by all of b, h, q_idx and kv_idx"
            yield "deterministic", True, problem, remedy


def _autocast(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    if not isinstance(spec.autocast, bool):
        yield "autocast", spec.autocast, "neither True nor False", "write autocast=True or False"
    elif spec.autocast and spec.dtype == "float32":
        remedy = "write dtype='bfloat16' or 'float16', or leave it out"
        yield "autocast", True, "a module of float32 takes nothing that autocast casts to", remedy
    elif spec.autocast and spec.forms != FORMS[:1]:
        remedy = "leave the other forms to a spec without it, or cast q, k and v before the call"
        yield "autocast", True, f"only the form {FORMS[0]!r} casts", remedy


def _linformer(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    """Projected keys are mixtures of all keys, which have no position."""
    keys = spec.linformer
    if keys is None:
        return
    if not _is_int(keys) or keys < 1:
        yield "linformer", keys, "not a number of keys", "write one from 1 on, or leave it out"
        return
    if isinstance(spec.mask, Mask) and not any(_mask(name, spec)):
        shown_by = trace(spec.mask).expr
        if shown_by != sympy.true:
            problem = "each projected key is made of all keys, so that no mask can hide one of them"
            if shown_by == LINEAR_MASKS[0]:
                problem = "each projected key is made of all keys, those after a query among them"
            yield "mask", spec.mask, problem, "write full(), or leave linformer out"
    if isinstance(spec.score, Score) and not any(_score(name, spec)):
        read = finite_score(spec.score)[0].free_symbols
        if {Q_IDX, KV_IDX, Q_LEN, KV_LEN} & read:
            problem = "reads positions, which projected keys do not have"
            yield "score", spec.score, problem, "leave it out, or leave linformer out"
    refused = {
        "normaliser": isinstance(spec.normaliser, Linear),
        "align": spec.align is not None,
        "autocast": spec.autocast is True,
        "forms": isinstance(spec.forms, tuple) and spec.forms != FORMS[:1],
    }
    for field in (field for field, is_refused in refused.items() if is_refused):
        yield field, getattr(spec, field), "is not for projected keys", "leave it or linformer out"


def _forms(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    forms = spec.forms
    if not isinstance(forms, tuple):
        remedy = f"write a tuple of {FORMS[0]!r} and others of {', '.join(map(repr, FORMS[1:]))}"
        yield "forms", forms, "not a tuple of forms", remedy
        return
    for form in forms:
        if form not in FORMS:
            yield "forms", form, "unknown form", f"write some of {', '.join(map(repr, FORMS))}"
    if FORMS[0] not in forms and all(form in FORMS for form in forms):
        remedy = f"write forms={shown((FORMS[0], *forms))}"
        yield "forms", forms, f"without {FORMS[0]!r}, the form that every module has", remedy


def _untraceable(field: str, value: object, trace: Callable[[], object]) -> Iterator[Finding]:
    try:
        trace()
    except SystemExit as error:
        where = users_line(extract_tb(error.__traceback__)) or field
        yield field, value, f"{where}: SystemExit: {error}", "let the function return"
    except MaskError as error:
        problem, _, remedy = " ".join(str(error).split()).rpartition("; ")
        yield field, value, problem, remedy


def _blocks(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    if not isinstance(spec.blocks, Blocks):
        yield "blocks", spec.blocks, "not Blocks", "write blocks=Blocks(BLOCK_M=..., ...)"
        return
    for field in fields(Blocks):
        value = getattr(spec.blocks, field.name)
        kind, accepted = BLOCK_CHOICES[field.name]
        choices = value if isinstance(value, tuple) else (value,)
        if value is None:
            continue
        if not choices or not all(_is_int(choice) and choice in accepted for choice in choices):
            remedy = f"{one_of(accepted)}, a tuple of some, or leave it out"
            yield f"blocks.{field.name}", value, f"not {kind}", remedy


def _targets(name: str, spec: AttentionSpec) -> Iterator[Finding]:
    remedy = f"write a tuple of some of {', '.join(TARGETS)}"
    targets = spec.targets
    if not isinstance(targets, tuple) or not targets:
        yield "targets", targets, "not a tuple of targets", remedy
        return
    for target in targets:
        if not isinstance(target, str) or target not in TARGETS:
            yield "targets", target, "unknown target", remedy
    if len(set(map(repr, targets))) < len(targets):
        yield "targets", targets, "a target is listed twice", "list it once"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

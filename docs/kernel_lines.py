"""Lines of a rendered kernel, as they stand there: what follows from its mask, score and sink."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator

from flashgen.kernels.forward_triton.kernel import render_kernel
from flashgen.kernels.linear_triton.kernel import render_linear
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan

_ENDS = re.compile(r"(some|all)_(begin|end)(_\d)?")
_LISTED = re.compile(r"(some_shown|all_shown|shown|seen|full)(_\d)?")
_DECIDED = re.compile(r"(some|every|least|most)_of_(rows|keys)_\d+|values|seen|full|visible")
_STATE = re.compile(r"m_i|l_i|m_new|p|alpha|lse|empty")
_EMPTY = re.compile(r"tl\.(zeros|full)\(|seen\.to\(")
#: What the scores are besides what a score function makes of them.
_OTHERS = re.compile(r"tl\.dot\(|tl\.where\(visible,")

#: What the kernels of random features compute of them.
_OF_RANDOM_FEATURES = ("return (products", "phi = tl.math.exp2(")


def of_mask(plan: KernelPlan) -> str:
    """The bounds, or the conditions that list or decide tiles; then what a tile evaluates."""
    if plan.classifies:
        named = _assigned(plan, _DECIDED.fullmatch, function="_classify_tiles")
    elif plan.listing:
        named = _assigned(plan, _LISTED.fullmatch, function="_list_tiles", but=_EMPTY)
    else:
        named = _assigned(plan, _ENDS.fullmatch)
    rows = {line.name for line in plan.code.rows}
    masked = {line.name for line in plan.code.masked} | {"visible"}
    return _blocks(named, _assigned(plan, (rows | masked).__contains__))


def of_score(plan: KernelPlan) -> str:
    """What runs once for each tile of queries; then the inner loop."""
    code = plan.code
    once = {line.name for line in (*code.scalars, *code.rows)} | {"shift"}
    often = {line.name for line in (*code.columns, *code.elements)} | {"scores"}
    return _blocks(
        _assigned(plan, once.__contains__), _assigned(plan, often.__contains__, but=_OTHERS)
    )


def of_state(plan: KernelPlan) -> str:
    """What the kernel keeps of each row while it loops, and what it makes of that."""
    return _blocks(_assigned(plan, _STATE.fullmatch))


def of_features(plan: KernelPlan) -> str:
    """The feature of an element, and the derivative for its gradient."""
    linear = LinearPlan(plan)
    if linear.random:
        lines = map(str.strip, render_linear(plan).splitlines())
        return "\n".join(line for line in lines if line.startswith(_OF_RANDOM_FEATURES))
    if linear.vector:
        program = linear.program
        sums = [f"{x.name} = {'largest' if x.largest else 'sum'}({x.of})" for x in program.sums]
        return "\n".join((*sums, *(f"phi = {piece}" for piece in program.pieces)))
    return f"phi = {linear.map}\nslope = {linear.slope}"


def _blocks(*blocks: Iterator[str]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks)


def _assigned(
    plan: KernelPlan,
    wanted: Callable[[str], object],
    *,
    but: re.Pattern[str] | None = None,
    function: str = "_attention_forward",
) -> Iterator[str]:
    """Assignments to some names.

    Args:
        plan: the kernel.
        wanted: whether an assignment to a name is.
        but: not where the text of what is assigned begins like this.
        function: which of its functions they are in.
    """
    source = render_kernel(plan)
    lines = source.splitlines()
    definitions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    kernel = next(node for node in definitions if node.name == function)
    found = [node for node in ast.walk(kernel) if isinstance(node, ast.Assign | ast.AugAssign)]
    for node in sorted(found, key=lambda node: node.lineno):
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        if not (isinstance(target, ast.Name) and wanted(target.id)):
            continue
        if not (but and but.match(ast.get_source_segment(source, node.value) or "")):
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))

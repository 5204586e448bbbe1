"""fold breaks statements as `ruff format` does; wrap breaks prose."""

from __future__ import annotations

import ast
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flashgen.codegen.folding import fold, indented, wrap
from flashgen.codegen.layout import LINE_LENGTH
from support.turns import is_full

# A statement, and the lines that it is broken into.
STATEMENTS = {
    "what fits stays": (
        "    scores = scores + 1",
        """\
    scores = scores + 1
""",
    ),
    "arguments on one line": (
        "    k = _load_tile(k_src, stride_kn, batch, kv_head, start_n, kv_len, 0, BLOCK_N,"
        " 128, head_dim, USE_TMA)",
        """\
    k = _load_tile(
        k_src, stride_kn, batch, kv_head, start_n, kv_len, 0, BLOCK_N, 128, head_dim, USE_TMA
    )
""",
    ),
    "what a function returns": (
        "    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,"
        " Tensor, Tensor]:",
        """\
    ) -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Tensor, Tensor
    ]:
""",
    ),
    "an argument a line": (
        "    out, lse = reference(q, k, v, scale=scale, return_lse=True,"
        " relative_attention_bias=bias, slopes_of_heads=slopes)",
        """\
    out, lse = reference(
        q, k, v, scale=scale, return_lse=True, relative_attention_bias=bias, slopes_of_heads=slopes
    )
""",
    ),
    "the elements of a list": (
        '    @triton.jit(do_not_specialize=["num_q_heads", "num_kv_heads", "q_len", "kv_len",'
        ' "slopes_size_0", "number"])',
        """\
    @triton.jit(
        do_not_specialize=[
            "num_q_heads",
            "num_kv_heads",
            "q_len",
            "kv_len",
            "slopes_size_0",
            "number",
        ]
    )
""",
    ),
    "the elements of a tuple": (
        "    ancestors = (ancestors_ptr, ancestors_size_0, ancestors_size_1,"
        " ancestors_stride_0, ancestors_stride_1)",
        """\
    ancestors = (
        ancestors_ptr,
        ancestors_size_0,
        ancestors_size_1,
        ancestors_stride_0,
        ancestors_stride_1,
    )
""",
    ),
    "one operator, a bracket at the end": (
        "    visible = visible & (document_ids[b, torch.clamp(q_idx + kv_len, min=0)] =="
        " document_ids[b, kv_idx])",
        """\
    visible = visible & (
        document_ids[b, torch.clamp(q_idx + kv_len, min=0)] == document_ids[b, kv_idx]
    )
""",
    ),
    "one operator, a bracket at the start": (
        "    scores = (5.0 * torch.tanh(0.2 * scores) + (kv_idx - q_idx).to(dtype) *"
        " slopes[h].to(dtype)) / heat[h].to(dtype)",
        """\
    scores = (
        5.0 * torch.tanh(0.2 * scores) + (kv_idx - q_idx).to(dtype) * slopes[h].to(dtype)
    ) / heat[h].to(dtype)
""",
    ),
    "what is called on a subscript": (
        "    scores = scores + bias[h, torch.clamp(torch.clamp(kv_idx + q_len - q_idx -"
        " kv_len, min=-5), max=5)].to(dtype)",
        """\
    scores = scores + bias[
        h, torch.clamp(torch.clamp(kv_idx + q_len - q_idx - kv_len, min=-5), max=5)
    ].to(dtype)
""",
    ),
    "calls on what calls return": (
        "    entry = bias[h, (kv_idx - q_idx + relative_attention_bias_of_keys).long()"
        ".clamp(min=-width, max=width).to(dtype)]",
        """\
    entry = bias[
        h,
        (kv_idx - q_idx + relative_attention_bias_of_keys)
        .long()
        .clamp(min=-width, max=width)
        .to(dtype),
    ]
""",
    ),
    "two operators": (
        "    shift = 1.4426950408889634 * tl.cast(q_first - offs_m + kv_len - q_len,"
        " tl.float32) * _at_1d(slopes, head)",
        """\
    shift = (
        1.4426950408889634
        * tl.cast(q_first - offs_m + kv_len - q_len, tl.float32)
        * _at_1d(slopes, head)
    )
""",
    ),
    "an operand too wide": (
        "    row = (((q_idx + kv_len - q_len) - ((q_idx + kv_len - q_len) % size + size) %"
        " size) // size) * size + size - 1",
        """\
    row = (
        (((q_idx + kv_len - q_len) - ((q_idx + kv_len - q_len) % size + size) % size) // size)
        * size
        + size
        - 1
    )
""",
    ),
    "a wide argument": (
        "    some_end = min(kv_len, (((q_last + kv_len) - ((q_last + kv_len - q_len) % size +"
        " size)) // size) * size + size)",
        """\
    some_end = min(
        kv_len,
        (((q_last + kv_len) - ((q_last + kv_len - q_len) % size + size)) // size) * size + size,
    )
""",
    ),
    "no bracket to break": (
        "    size = first_of_all_the_lengths if first_of_all_the_lengths >"
        " second_of_all_the_lengths else second_of_all",
        """\
    size = (
        first_of_all_the_lengths
        if first_of_all_the_lengths > second_of_all_the_lengths
        else second_of_all
    )
""",
    ),
    "an annotated name": (
        "    BYTES: gl.constexpr = descs[0].block_type.nbytes + descs[1].block_type.nbytes +"
        " descs[2].block_type.nbytes",
        """\
    BYTES: gl.constexpr = (
        descs[0].block_type.nbytes + descs[1].block_type.nbytes + descs[2].block_type.nbytes
    )
""",
    ),
    "a generator": (
        "    elif any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v,"
        " slopes, additive_bias, sinks)):",
        """\
    elif any(
        forward_ad.unpack_dual(x).tangent is not None
        for x in (q, k, v, slopes, additive_bias, sinks)
    ):
""",
    ),
    "a condition": (
        "    if isinstance(relative_attention_bias, bool) or not"
        " isinstance(relative_attention_bias, (int, float, str)):",
        """\
    if isinstance(relative_attention_bias, bool) or not isinstance(
        relative_attention_bias, (int, float, str)
    ):
""",
    ),
    "two values": (
        "    return q.new_empty((*q.shape[:3], 128)), torch.searchsorted(document_ids,"
        " document_ids, right=True, out_int32=True)",
        """\
    return q.new_empty((*q.shape[:3], 128)), torch.searchsorted(
        document_ids, document_ids, right=True, out_int32=True
    )
""",
    ),
    "many targets": (
        "    grad_q, grad_k, grad_v, grad_relative_attention_bias,"
        " grad_additive_bias_of_keys, grad_slopes_of_heads = grads",
        """\
    (
        grad_q,
        grad_k,
        grad_v,
        grad_relative_attention_bias,
        grad_additive_bias_of_keys,
        grad_slopes_of_heads,
    ) = grads
""",
    ),
    "a function's head": (
        "    def _launch(q, k, v, scale, relative_attention_bias, additive_bias_of_keys,"
        " slopes_of_heads, sinks, config):",
        """\
    def _launch(
        q,
        k,
        v,
        scale,
        relative_attention_bias,
        additive_bias_of_keys,
        slopes_of_heads,
        sinks,
        config,
    ):
""",
    ),
    "an ellipsis": (
        "    grads_of_sink = torch.autograd.grad(_sink(lse, sinks, temperature, turns), leaves,"
        " grad_sink[..., None])",
        """\
    grads_of_sink = torch.autograd.grad(
        _sink(lse, sinks, temperature, turns), leaves, grad_sink[..., None]
    )
""",
    ),
    "a string": (
        '    raise ValueError(f"{name}: got head_dim {x.shape[3]}; a_variant_with_a_long_name'
        ' was built for {head_dim} and no other")',
        """\
    raise ValueError(
        f"{name}: got head_dim {x.shape[3]}; a_variant_with_a_long_name was built for {head_dim}"
        " and no other"
    )
""",
    ),
}

OPERATORS = ("|", "&", "+", "-", "*", "/", "//", "%", "@", "<", ">=", "==")
NAMES = ("h", "q_idx", "kv_len", "document_ids", "relative_attention_bias", "0.016031548017576114")


@pytest.mark.parametrize("case", STATEMENTS)
def test_a_statement_is_broken(case: str) -> None:
    statement, lines = STATEMENTS[case]
    assert fold(statement + "\n") == lines


def test_these_are_the_lines_that_ruff_gives() -> None:
    """Of every statement but the string, which it would leave wide and, once broken, leaves so."""
    pairs = [pair for case, pair in STATEMENTS.items() if case != "a string"]
    assert as_ruff_formats([statement for statement, _ in pairs]) == [lines for _, lines in pairs]
    _, lines = STATEMENTS["a string"]
    assert as_ruff_formats([lines]) == [lines]


def test_a_string_without_spaces_is_left_wide() -> None:
    wide = "x" * LINE_LENGTH
    assert fold(f'raise ValueError("{wide}")\n') == f'raise ValueError(\n    "{wide}"\n)\n'


def test_prose_is_wrapped() -> None:
    text = "        " + "score " * 30
    first, *others = wrap(text, 2, "# ").splitlines()
    assert first.startswith("        # score ") and len(first) <= LINE_LENGTH
    assert others and all(line.startswith("        #   score") for line in others)
    assert wrap("    short") == "    short"


def arguments(inner: st.SearchStrategy[str], least: int, most: int) -> st.SearchStrategy[str]:
    return st.lists(inner, min_size=least, max_size=most).map(", ".join)


def operations(inner: st.SearchStrategy[str], least: int) -> st.SearchStrategy[str]:
    """Operands and operators; one comparison at most, as in everything that flashgen prints."""

    @st.composite
    def draw_operation(draw: st.DrawFn) -> str:
        text = draw(inner)
        for _ in range(draw(st.integers(least, 4))):
            compares = any(f" {o} " in text for o in ("<", ">=", "=="))
            operator = draw(st.sampled_from(OPERATORS[:9] if compares else OPERATORS))
            text += f" {operator} {draw(inner)}"
        return text

    return draw_operation()


def extended(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """What holds others: calls, subscripts, brackets, lists, tuples, signs, conditions."""
    operation, bracketed = operations(inner, 0), operations(inner, 1).map("({})".format)
    return st.one_of(
        st.builds("{}({})".format, st.sampled_from(("tl.where", "f")), arguments(operation, 0, 4)),
        st.builds("f({}, dim={})".format, operation, operation),
        arguments(operation, 1, 3).map("bias[{}]".format),
        arguments(operation, 1, 4).map("[{}]".format),
        arguments(operation, 2, 4).map("({})".format),
        bracketed,
        bracketed.map("{}.to(dtype)".format),
        bracketed.map("{}.long().to(dtype)".format),
        inner.map("-f({})".format),
        st.builds("({} if {} else {})".format, operation, operation, operation),
        st.builds("all({} for x in f({}))".format, operation, operation),
    )


OPERANDS = st.recursive(st.sampled_from(NAMES), extended, max_leaves=12)
VALUES = operations(OPERANDS, 1)
CALLS = st.builds("f({})".format, arguments(VALUES, 1, 4))
SIMPLE = st.one_of(
    st.builds("{}{}".format, st.sampled_from(("scores = ", "visible &= ", "return ")), VALUES),
    st.builds("{}{}".format, st.sampled_from(("", "scores = ", "out, lse = ", "raise ")), CALLS),
    st.builds("return {}, {}".format, VALUES, VALUES),
    st.builds("if {}:".format, VALUES),
    st.builds("if {} or {}:".format, VALUES, CALLS),
)


@settings(max_examples=50 if is_full() else 15, deadline=None)
@given(st.lists(SIMPLE.map("    {}".format), min_size=5, max_size=20))
def test_fold_agrees_with_ruff(statements: list[str]) -> None:
    folded = [fold(statement + "\n") for statement in statements]
    assert folded == as_ruff_formats(statements)
    for statement, lines in zip(statements, folded, strict=True):
        assert ast.dump(ast.parse(function_of(lines))) == ast.dump(
            ast.parse(function_of(statement))
        )
        assert all(len(line) <= LINE_LENGTH for line in lines.splitlines())


@settings(max_examples=50 if is_full() else 15, deadline=None)
@given(st.lists(SIMPLE.map("    {}".format), min_size=5, max_size=20), st.sampled_from((4, 8)))
def test_statements_are_folded_anew_for_more_spaces(statements: list[str], width: int) -> None:
    text = "".join(fold(statement + "\n") for statement in statements)
    wider = "".join(fold(" " * width + statement + "\n") for statement in statements)
    assert indented(text, width) == wider


def test_what_is_no_statement_is_indented_alone() -> None:
    text = "# of (all\n\nx = f(y)  # ends ]\n    if x:\n"
    assert indented(text, 4) == "    # of (all\n\n    x = f(y)  # ends ]\n        if x:\n"


def as_ruff_formats(statements: list[str]) -> list[str]:
    """What ruff makes of each, in a function of its own."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={LINE_LENGTH}"]
    source = "\n".join(map(function_of, statements))
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, check=True)
    bodies = done.stdout.split(HEAD)[1:]
    return [
        body.rstrip("\n").removeprefix(before).removesuffix(after.rstrip("\n")).rstrip("\n") + "\n"
        for body, (before, after) in zip(bodies, map(around, statements), strict=True)
    ]


HEAD = "def function():\n"


def function_of(statement: str) -> str:
    """A function whose body is the statement and what it cannot be without."""
    before, after = around(statement)
    return HEAD + before + statement.rstrip("\n") + "\n" + after


def around(statement: str) -> tuple[str, str]:
    before = "    if x:\n        pass\n" if statement.lstrip().startswith("elif") else ""
    if statement.lstrip().startswith("@"):
        return before, "    def inner():\n        pass\n"
    if statement.lstrip().startswith(")"):
        before = "    def inner(\n        x,\n"
    return before, "        pass\n" if statement.rstrip().endswith(":") else ""

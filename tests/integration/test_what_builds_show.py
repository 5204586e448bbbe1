"""What builds show, on a spec of one target: where a module is, what was chosen, why not more."""

import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from flashgen.kernels.registry import keys
from flashgen.publish import FIRST_LINE
from support.projects import UP_TO_DATE, edit


def test_a_build_publishes_a_module_and_shows_what_was_chosen(flashgen, project):
    status, lines = flashgen("build", "specs/tiny.py", "-v")
    assert status == 0
    lines = lines[next(i for i, line in enumerate(lines) if "variant" in line) :]
    rows = [line.split("  ") for line in lines if line.strip()]
    header, row = ([cell.strip() for cell in row if cell.strip()] for row in (rows[0], rows[2]))
    assert header == [
        "variant", "target", "kernel", "blocks", "warps", "stages", "SRAM used, KiB", "chosen",
        "time",
    ]  # fmt: skip
    assert row[:3] == ["tiny", "sm_90", "hopper"]
    assert re.fullmatch(r"\d+\.\d of 227", row[6])
    assert row[7] == "by model"
    portable = [cell.strip() for cell in rows[3] if cell.strip()]
    assert portable[:3] == ["tiny", "sm_90", "portable"]
    assert portable[7] == "by model; runs where TMA cannot read q, k or v"
    assert (project / "generated" / "tiny.py").read_text().startswith(FIRST_LINE)


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("generated", ["module: generated/tiny.py", "import: from generated import tiny"]),
        (
            "my/kernels",
            [
                "module: my/kernels/tiny.py",
                "import: from kernels import tiny",
                "        where my is on sys.path",
            ],
        ),
        (  # no name of a package
            "my/my-kernels",
            [
                "module: my/my-kernels/tiny.py",
                "import: import tiny",
                "        where my/my-kernels is on sys.path",
            ],
        ),
    ],
)
def test_a_build_ends_with_where_the_module_is_and_how_to_import_it(
    flashgen, project, out, expected
):
    _, lines = flashgen("build", "specs", "--out", out)
    assert lines[-len(expected) :] == expected
    statement = expected[1].removeprefix("import: ")
    assert (
        f"\n    {statement}\n    out = tiny.attention(" in (project / out / "tiny.py").read_text()
    )
    assert flashgen("build", "specs", "--out", out) == UP_TO_DATE


def test_package_names_what_the_folder_is_imported_as(flashgen, project):
    asked = ("specs", "--out", "src/mine/kernels", "--package", "mine.kernels")
    _, lines = flashgen("build", *asked)
    assert lines[-3:] == [
        "module: src/mine/kernels/tiny.py",
        "import: from mine.kernels import tiny",
        "        where src is on sys.path",
    ]
    module = project / "src" / "mine" / "kernels" / "tiny.py"
    assert "    from mine.kernels import tiny\n" in module.read_text()
    assert flashgen("build", *asked) == UP_TO_DATE
    assert flashgen("check", *asked)[0] == 0
    assert flashgen("check", *asked[:3])[0] == 1
    assert flashgen("build", *asked[:3])[1][-2:-1] == ["import: from kernels import tiny"]
    assert flashgen("build", *asked[:-1], "elsewhere.deep")[1][-1] == (
        "import: from elsewhere.deep import tiny"
    )
    assert flashgen("build", *asked[:-1], "no-name") == (
        2,
        ["error: --package=no-name: no name of a package; write one as in mine.kernels"],
    )


def test_of_several_modules_it_says_the_folder(flashgen, project):
    shutil.copy("specs/tiny.py", "specs/other.py")
    assert flashgen("build", "specs")[1][-2:] == [
        "2 modules: generated",
        "import: from generated import NAME",
    ]


def test_the_import_that_a_build_shows_works(flashgen, project):
    _, lines = flashgen("build", "specs", "--out", "my/kernels")
    statement = lines[-2].removeprefix("import: ")
    code = f"import sys; sys.path.insert(0, 'my'); {statement}; print(tiny.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kernels.tiny\n"


def test_what_a_build_shows_fits_a_terminal_of_80_columns(flashgen, project, monkeypatch):
    """Nothing is cut off: each kernel has its row, and a rule says where the header ends."""
    monkeypatch.setattr("flashgen.console.make_console", lambda **_: Console(width=80))
    (project / "specs" / "tiny.py").write_text(
        "from flashgen import AttentionSpec, causal\n\n"
        "spec = AttentionSpec(head_dim=64, mask=causal())\n"
    )
    status, lines = flashgen("build", "specs")
    assert status == 0 and re.fullmatch(
        r"tiny: \d+ x \d+ on sm_90, by model; 5 more targets; \d+\.\d s", lines[0]
    )
    assert lines[1:] == ["module: generated/tiny.py", "import: from generated import tiny"]
    _, lines = flashgen("build", "specs", "--force", "-v")
    first = next(i for i, line in enumerate(lines) if line.startswith("tiny, built in"))
    lines = [line.rstrip() for line in lines[first:]]
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert re.fullmatch(r"tiny, built in \d+\.\d s", lines[0])
    rows = [line.split() for line in lines if line.endswith(" by model")]
    assert {row[1] for row in rows} == set(keys())
    assert len(rows) == 20
    command = sys.modules["flashgen.cli.build"]  # the package has its function by this name
    monkeypatch.setattr(command, "width_of_terminal", lambda: 30)
    assert flashgen("build", "specs") == (
        0, ["up to date, nothing to do:", "      tiny"]
    )  # fmt: skip


def test_verbose_tells_the_steps_and_the_rejected(flashgen):
    status, lines = flashgen("build", "specs", "-v")
    assert status == 0
    assert lines[-2:] == ["tiny: render", "tiny: publish"]
    for form in keys():
        heads = [line for line in lines if line.startswith(f"tiny: sm_90: {form}: ")]
        assert len(heads) == 1 and "candidates fit" in heads[0]
    assert any(line.startswith("  BLOCK_M=") for line in lines)


@pytest.mark.parametrize(
    "field, reason, others",
    [
        ("dtype='float32'", "float32", ["backward_keys", "backward_queries"]),
        # Pins are of the forward kernels.
        ("blocks=ODD", "", ["hopper_backward", "backward_keys", "backward_queries"]),
    ],
)
def test_a_module_without_a_gluon_kernel_says_why(flashgen, project, field, reason, others):
    edit(project / "specs" / "tiny.py", "targets", f"{field}, targets")
    edit(project / "specs" / "tiny.py", "causal\n", "Blocks, causal\n\nODD = Blocks(BLOCK_M=64)\n")
    lines = flashgen("build", "specs", "-v")[1]
    (told,) = [line for line in lines if line.startswith("tiny: sm_90: no Gluon kernel: ")]
    told = told.removeprefix("tiny: sm_90: no Gluon kernel: ")
    assert told and reason in told
    rows = [line for line in lines if line.startswith("tiny") and "227" in line]
    row, *backward = rows
    assert [r.split()[2] for r in backward] == others
    assert row.split()[2] == "portable" and f"no Gluon kernel: {told}" in row
    module = (project / "generated" / "tiny.py").read_text()
    assert f"No Gluon kernel for Hopper: {told}" in module.replace("\n# ", " ")
    assert ("gluon import" in module) == ("hopper_backward" in others)
    assert "# flashgen: hopper" not in module
    assert flashgen("check") == (0, ["every module in generated is what its spec renders to"])


def test_a_module_without_a_gluon_kernel_of_the_backward_pass_says_why(flashgen, project):
    alone = "mask=causal(), score=lambda s, b, h, q, kv: 0.1 * (kv - q)"
    edit(project / "specs" / "tiny.py", "mask=causal()", alone)
    lines = flashgen("build", "specs", "-v")[1]
    told = "its score function leaves the products out"
    assert f"tiny: sm_90: no Gluon kernel of the backward pass: {told}" in lines
    rows = [line for line in lines if line.startswith("tiny") and "227" in line]
    forms = ["hopper", "portable", "backward_keys", "backward_queries"]
    assert [row.split()[2] for row in rows] == forms
    assert [f"; no Gluon kernel of the backward pass: {told}" in row for row in rows] == [
        False,
        False,
        True,
        True,
    ]
    module = (project / "generated" / "tiny.py").read_text()
    assert f"No Gluon kernel of the backward pass: {told}." in module.replace("\n# ", " ")
    assert "_backward_hopper" not in module and "# flashgen: grads" not in module


def test_a_module_for_other_targets_says_nothing_of_hopper(flashgen, project):
    lines = flashgen("build", "specs", "-v", "--target=sm_80")[1]
    module = (project / "generated" / "tiny.py").read_text()
    assert "luon" not in module + "".join(lines)


HULLS = {
    "lambda b, h, q, kv: q * kv >= 9": (
        "no exact range of keys: not affine in q_idx and kv_idx: q_idx * kv_idx >= 9",
        "bounds visit 1.00 (for gradients 1.00) times the tiles that are needed, "
        "counted at 4,096 tokens",
    ),
    "dilated(4) & causal()": (
        "no exact range of keys: not affine in q_idx and kv_idx: (q_idx - kv_idx) % 4 == 0",
        "bounds visit 1.00 (for gradients 1.00) times the tiles that are needed, "
        "counted at 4,096 tokens",
    ),
    "document(Tensor('ids', ('kv_len',), 'int32'))": (
        "tiles are decided once a call, as only the data knows ids[q_idx] == ids[kv_idx]; "
        "algebra solves ids[kv_idx] != -1",
        "if ids never falls, declare it with sorted=True: ranges replace these lists",
    ),
    "block_sparse(Tensor('pattern', (None, None), 'bool'), 64)": (
        "tiles are listed once a call, by the table of blocks in "
        "pattern[q_idx // 64, kv_idx // 64] != 0",
    ),
}


@pytest.mark.parametrize("mask", HULLS)
@pytest.mark.parametrize("options", [(), ("-v",)])
def test_bounds_that_are_too_wide_are_no_secret(flashgen, project, mask, options):
    edit(project / "specs" / "tiny.py", "causal()", mask)
    edit(
        project / "specs" / "tiny.py",
        "import ",
        "import Tensor, block_sparse, dilated, document, ",
    )
    lines = flashgen("build", "specs", *options)[1]
    notes = [line for line in lines if line.startswith("note: ")]
    assert notes == [f"note: tiny: {note}" for note in HULLS[mask]]


def test_nor_are_those_of_gradients(flashgen, project):
    """What holds for keys and for queries is said once; here only ranges of queries have gaps."""
    edit(project / "specs" / "tiny.py", "causal()", "document() | (causal() & sink_tokens(3))")
    edit(project / "specs" / "tiny.py", "import ", "import document, sink_tokens, ")
    lines = flashgen("build", "specs")[1]
    assert [line for line in lines if line.startswith("note: ")] == [
        "note: tiny: for gradients, no exact range of queries: "
        "queries between those that see keys of one tile are visited too: "
        "(kv_idx < 3) & (document_ids[b, q_idx] == document_ids[b, kv_idx])"
    ]

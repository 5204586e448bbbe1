"""Builds from end to end, on a spec of one target: what they publish, and when they do nothing."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from flashgen.kernels.registry import keys
from flashgen.publish import FIRST_LINE


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


UP_TO_DATE = (0, ["up to date, nothing to do: tiny"])


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


def test_the_published_module_is_imported_from_its_folder(flashgen, project):
    flashgen("build", "specs")
    code = "from generated import tiny; assert callable(tiny.attention); print(tiny.CONFIGS.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "dict_keys(['sm_90'])\n"


def test_a_second_build_does_nothing_and_says_so(flashgen, project):
    flashgen("build", "specs")
    module = project / "generated" / "tiny.py"
    before = module.stat()
    assert flashgen("build", "specs") == UP_TO_DATE
    after = module.stat()
    # Not the time of access, which reading it moves.
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("text", "slow"),
    [("", {"sympy", "rich", "torch", "triton"}), ("import os\n", {"torch", "triton"})],
)
def test_a_second_build_imports_nothing_slow(flashgen, project, text, slow):
    """Even the spec is not run, unless it may read what is not in its text."""
    (project / "specs" / "tiny.py").write_text(text + (project / "specs" / "tiny.py").read_text())
    flashgen("build", "specs", "--no-tune")
    code = (
        "import sys\n"
        "from flashgen.cli import main\n"
        "try:\n"
        "    main(['build', 'specs', '--no-tune'])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        f"assert not {slow} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == UP_TO_DATE[1]


def test_verbose_tells_which_spec_is_run_at_each_build(flashgen, project):
    edit(project / "specs" / "tiny.py", "from", "import os\nfrom")
    told = "run again at each build, as more may count than its text: specs/tiny.py:1: imports os"
    assert told in flashgen("build", "specs", "-v")[1]
    assert flashgen("build", "specs", "-v") == (0, [UP_TO_DATE[1][0], told])


def test_an_environment_variable_that_a_spec_reads_counts(flashgen, project, monkeypatch):
    """As does all that a spec reads: it is run at each build."""
    edit(project / "specs" / "tiny.py", "head_dim=64", "head_dim=int(os.environ['WIDTH'])")
    edit(project / "specs" / "tiny.py", "from", "import os\nfrom")
    monkeypatch.setenv("WIDTH", "64")
    flashgen("build", "specs")
    assert flashgen("build", "specs") == UP_TO_DATE
    monkeypatch.setenv("WIDTH", "128")
    assert flashgen("build", "specs") != UP_TO_DATE
    assert flashgen("check")[0] == 0


def test_a_comment_in_the_spec_changes_nothing(flashgen, project):
    flashgen("build", "specs")
    edit(project / "specs" / "tiny.py", "spec =", "# A remark.\nspec =")
    assert flashgen("build", "specs") == UP_TO_DATE


@pytest.mark.parametrize(
    "old, new",
    [("head_dim=64", "head_dim=128"), ("causal()", "causal(align='top_left')"), ("sm_90", "sm_80")],
)
def test_a_change_of_the_spec_builds_again(flashgen, project, old, new):
    flashgen("build", "specs")
    before = (project / "generated" / "tiny.py").read_text()
    edit(project / "specs" / "tiny.py", old, new)
    assert flashgen("build", "specs") != UP_TO_DATE
    assert (project / "generated" / "tiny.py").read_text() != before


def test_force_builds_what_is_up_to_date_to_the_same_bytes(flashgen, project):
    flashgen("build", "specs")
    module = project / "generated" / "tiny.py"
    before, content = module.stat(), module.read_bytes()
    status, lines = flashgen("build", "specs", "--force")
    assert status == 0 and any("by model" in line for line in lines)
    assert module.stat().st_mtime > before.st_mtime
    assert module.read_bytes() == content


def test_every_machine_builds_the_same_bytes(project):
    """Another process, hash seed, working folder and spelling of the paths."""
    texts = []
    for seed in ("0", "1"):
        home = project / seed
        home.mkdir()
        command = [sys.executable, "-m", "flashgen", "build", "--no-tune", "--out", "generated"]
        subprocess.run(
            [*command, str(project / "specs") if seed == "1" else "../specs/tiny.py"],
            cwd=home,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            check=True,
            capture_output=True,
        )
        texts.append((home / "generated" / "tiny.py").read_bytes())
    assert texts[0] == texts[1]


def test_out_names_the_package(flashgen, project):
    assert flashgen("build", "specs", "--out", "my/kernels")[0] == 0
    assert "from kernels import tiny" in (project / "my" / "kernels" / "tiny.py").read_text()
    assert not (project / "generated").exists()


def test_target_replaces_the_specs_own(flashgen, project):
    status, lines = flashgen("build", "specs", "-v", "--target", "sm_80", "--target", "gfx942")
    assert status == 0
    rows = [line.split()[:3] for line in lines if " by model" in line and ": " not in line]
    forms = ("portable", "backward_keys", "backward_queries")
    assert rows == [["tiny", target, form] for target in ("sm_80", "gfx942") for form in forms]
    assert flashgen("build", "specs") != UP_TO_DATE
    assert flashgen("build", "specs") == UP_TO_DATE


def test_form_adds_to_the_specs_own(flashgen, project):
    """And decides whether a module is up to date, as the spec's own forms do."""
    flashgen("build", "specs")
    module = project / "generated" / "tiny.py"
    dense = module.read_text()
    assert "def varlen_attention(" not in dense
    assert flashgen("build", "specs", "--form", "varlen")[0] == 0
    assert "def varlen_attention(" in module.read_text()
    assert flashgen("build", "specs", "--form", "varlen") == UP_TO_DATE
    assert flashgen("check", "--form", "varlen")[0] == 0
    assert flashgen("check")[0] == 1
    flashgen("build", "specs")
    assert module.read_text() == dense
    assert flashgen("build", "specs", "--form", "paged")[0] == 2


def test_targets_may_be_named_in_any_order(flashgen):
    flashgen("build", "specs", "--target", "sm_90", "--target", "sm_80")
    swapped = ("specs", "--target", "sm_80", "--target", "sm_90", "--target", "sm_80")
    assert flashgen("check", *swapped)[0] == 0
    assert flashgen("build", *swapped) == UP_TO_DATE


def test_several_files_and_a_family(flashgen, project):
    (project / "family.py").write_text(
        "from flashgen import AttentionSpec\n"
        "specs = [AttentionSpec(d, targets=('sm_90',), name=f'full_{d}') for d in (64, 128)]\n"
    )
    assert flashgen("build", "specs", "family.py")[0] == 0
    assert flashgen("build", "family.py", "specs/tiny.py") == (
        0,
        ["up to date, nothing to do: full_64, full_128, tiny"],
    )


def test_only_what_changed_is_built(flashgen, project):
    flashgen("build", "specs")
    shutil.copy("specs/tiny.py", "specs/other.py")
    _, lines = flashgen("build", "specs")
    assert {line.split()[0] for line in lines if "by model" in line} == {"other:"}
    assert lines[-3:] == [
        "up to date, nothing to do: tiny",
        "module: generated/other.py",
        "import: from generated import other",
    ]


def test_a_bad_spec_among_good_ones_writes_nothing(flashgen, project):
    shutil.copy("specs/tiny.py", "specs/bad.py")
    edit(project / "specs" / "bad.py", "64", "7")
    status, lines = flashgen("build", "specs")
    assert status == 2
    assert lines == [
        "error: specs/bad.py: bad: head_dim=7: not a multiple of 8 from 16 to 512; "
        "write one that is, or (qk, v) of two"
    ]
    assert not (project / "generated").exists()


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


def test_check_finds_nothing_after_a_build(flashgen):
    flashgen("build", "specs")
    assert flashgen("check") == (0, ["every module in generated is what its spec renders to"])


def test_check_of_modules_for_one_target(flashgen):
    flashgen("build", "specs", "--target", "sm_80")
    assert flashgen("check")[0] == 1
    good = (0, ["every module in generated is what its spec renders to"])
    assert flashgen("check", "--target", "sm_80") == good
    assert flashgen("check", "--target", "sm_90")[0] == 1
    assert flashgen("check", "--target", "sm_91")[0] == 2


def test_check_lists_what_differs(flashgen, project):
    flashgen("build", "specs")
    for name in ("changed", "edited", "mine", "missing", "orphan"):
        shutil.copy("specs/tiny.py", f"specs/{name}.py")
    flashgen("build", "specs")
    generated = project / "generated"
    (generated / "missing.py").unlink()
    (project / "specs" / "orphan.py").unlink()
    (generated / "edited.py").write_text((generated / "edited.py").read_text() + "\n")
    (generated / "mine.py").write_text("X = 1\n")
    edit(project / "specs" / "changed.py", "head_dim=64", "head_dim=128")
    assert flashgen("check", "specs", "--out", "generated") == (
        1,
        [
            "generated/changed.py: not what specs/changed.py renders to; build it again",
            "generated/edited.py: damaged or edited by hand; build it again, after moving the edit "
            "to its spec",
            "generated/mine.py: not written by flashgen, so not replaced; move it away, and build "
            "specs/mine.py",
            "generated/missing.py: missing; build specs/missing.py",
            "generated/orphan.py: no spec declares it; delete it, or restore its spec",
        ],
    )


def test_a_build_says_that_it_replaces_an_edit(flashgen, project):
    flashgen("build", "specs")
    module = project / "generated" / "tiny.py"
    right = module.read_text()
    note = "note: tiny: generated/tiny.py was damaged or edited by hand, and is replaced"
    module.write_text(right + "X = 1\n")
    assert note in flashgen("build", "specs")[1]
    assert module.read_text() == right
    edit(project / "specs" / "tiny.py", "head_dim=64", "head_dim=128")
    assert note not in flashgen("build", "specs")[1]


def test_a_module_of_the_users_own_is_not_replaced_by_force(flashgen, project):
    module = project / "generated" / "tiny.py"
    module.parent.mkdir()
    module.write_text("X = 1\n")
    answer = (
        "error: generated/tiny.py: not written by flashgen, so not replaced; move it away, "
        "or choose another folder with --out"
    )
    assert flashgen("build", "specs", "--force") == (2, [answer])
    assert module.read_text() == "X = 1\n"


def test_check_says_of_blocks_that_do_not_fit_any_more_what_a_build_does(flashgen, project):
    flashgen("build", "specs")
    tiny = project / "specs" / "tiny.py"
    tiny.write_text(
        "from flashgen import AttentionSpec, Blocks, causal\n"
        "blocks = Blocks(BLOCK_M=256, BLOCK_N=256)\n"
        "spec = AttentionSpec(512, 'float32', causal(), blocks=blocks, targets=('sm_86',))\n"
    )
    built = flashgen("build", "specs")
    assert built[0] == 2 and "SRAM budget exceeded on sm_86" in built[1][0]
    assert flashgen("check", "specs") == built


def test_check_of_a_file_says_nothing_of_other_specs(flashgen, project):
    shutil.copy("specs/tiny.py", "specs/other.py")
    flashgen("build", "specs")
    asked_for = (0, ["what was asked for in generated is what its spec renders to"])
    assert flashgen("check", "specs/tiny.py") == asked_for
    (project / "generated" / "other.py").write_text(FIRST_LINE)
    assert flashgen("check", "specs/tiny.py") == asked_for
    assert flashgen("check", "specs/other.py")[0] == 1


def test_list(flashgen, project):
    assert flashgen("list") == (0, ["no generated modules in generated"])
    flashgen("build", "specs")
    status, lines = flashgen("list")
    assert status == 0
    assert [line.split() for line in lines if line.strip()][2] == ["tiny", "whole", "none"]
    (project / "generated" / "tiny.py").write_text(FIRST_LINE)
    assert [line.split() for line in flashgen("list")[1] if line.strip()][2] == [
        "tiny", "damaged", "or", "edited", "none",
    ]  # fmt: skip


def test_clean_removes_modules_and_nothing_else(flashgen, project):
    flashgen("build", "specs")
    generated = project / "generated"
    (generated / "mine.py").write_text("X = 1\n")
    (generated / "tuning").mkdir()
    (generated / "tuning" / "tiny.json").write_text('{"results": []}\n')
    assert flashgen("clean") == (0, ["removed 1 module from generated"])
    assert {path.name for path in generated.iterdir()} == {
        "mine.py", "tuning", ".flashgen", "__init__.py",
    }  # fmt: skip


def test_python_m_flashgen():
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "flashgen 0.1.0\n"


def test_help_gives_flags_no_type(flashgen):
    status, lines = flashgen("build", "--help")
    assert status == 0
    assert "--force Build and measure again what is up to date." in " ".join(
        word for line in lines for word in line.split()
    )


@pytest.mark.parametrize(("no_color", "red"), [("", True), ("1", False)])
def test_errors_are_red_in_a_terminal_unless_it_is_not_wanted(project, no_color, red):
    terminal, end = os.openpty()
    environment = {**os.environ, "NO_COLOR": no_color}
    command = [sys.executable, "-m", "flashgen", "build", "missing.py"]
    done = subprocess.run(command, stderr=end, stdout=end, env=environment)
    os.close(end)
    with open(terminal, "rb") as screen:
        said = screen.read1()
    assert done.returncode == 2
    assert b"error: missing.py: no such file" in said and (b"\x1b[31m" in said) == red


def test_bench_without_a_gpu(flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.bench.detect_gpu", lambda: None)
    assert flashgen("bench", "tiny") == (
        2,
        ["error: tiny: no GPU to measure on; run bench where there is one"],
    )


def test_bench_of_an_unknown_variant(flashgen):
    assert flashgen("bench", "tyni") == (
        2,
        ["error: tyni: no spec of this name in specs; write tiny"],
    )


def test_a_shell_completes_commands_options_and_names(flashgen):
    flashgen("build", "specs")

    def completed(words):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run(
            [sys.executable, "-c", "from flashgen.cli import app; app(prog_name='flashgen')"],
            env=os.environ | asked | {"_FLASHGEN_COMPLETE": "complete_bash"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert completed("flashgen expl") == ["explain"]
    assert "--tune-seconds" in completed("flashgen build --tu")
    assert completed("flashgen build --target sm_8") == ["sm_80", "sm_86", "sm_89"]
    assert completed("flashgen build --form v") == ["varlen"]
    assert completed("flashgen bench ") == ["tiny"]
    assert completed("flashgen export --out elsewhere t") == []

"""Builds from end to end, on a spec of one target: what they publish, and when they do nothing."""

import shutil
import subprocess
import sys

import pytest

from support.projects import UP_TO_DATE, edit


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

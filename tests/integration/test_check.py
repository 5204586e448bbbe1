"""flashgen check, and modules that were edited or are not flashgen's."""

import shutil

from flashgen.publish import FIRST_LINE
from support.projects import edit


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

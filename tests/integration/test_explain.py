"""``flashgen explain``: what it writes and prints, and what it refuses."""

import json
import subprocess
import sys

import pytest

from flashgen.cli import main
from flashgen.explain.document import from_json

FAMILY = """\
from flashgen import AttentionSpec, Int, causal, sliding_window

left = Int("left", 64)
specs = [
    AttentionSpec(64, mask=causal(), name="one", targets=("sm_90",)),
    AttentionSpec(64, mask=sliding_window(left, 0), name="two", targets=("sm_90", "sm_80")),
]
"""


def test_it_shows_an_account_and_writes_nothing(flashgen, project):
    before = sorted(project.rglob("*"))
    status, lines = flashgen("explain", "specs/tiny.py", "--q-len", 1000)
    assert status == 0
    assert lines[0] == "tiny on sm_90 (H200)"
    assert "  16 x 32 heads, 1,000 queries, 1,000 keys, d=64, bfloat16" in lines
    assert "Mask: causal()" in lines
    assert any(line.endswith(", by model") for line in lines)
    assert not any(line == "Measured" for line in lines)
    assert sorted(project.rglob("*")) == before


def test_each_variant_of_a_family_is_explained(flashgen, project):
    (project / "specs" / "family.py").write_text(FAMILY)
    status, lines = flashgen("explain", "specs/family.py", "--q-len", 512)
    assert status == 0
    assert [line for line in lines if " on sm_" in line] == [
        "one on sm_90 (H200)",
        "two on sm_90 (H200)",
    ]


def test_json_on_stdout_stands_alone_though_the_spec_prints(project, capsys):
    spec = project / "specs" / "tiny.py"
    spec.write_text('print("from the spec")\n' + spec.read_text())
    with pytest.raises(SystemExit) as stop:
        main(["explain", "specs", "--q-len", "512", "--kv-len", "512", "--json", "-"])
    answer = capsys.readouterr()
    assert not stop.value.code and "from the spec" in answer.err
    lines = answer.out.splitlines()
    [account] = from_json("\n".join(lines))
    assert (account.variant, account.call.q_len, account.file) == ("tiny", 512, "specs/tiny.py")


def test_json_and_a_picture_are_written_beside_what_is_shown(flashgen, project):
    status, lines = flashgen(
        "explain", "specs/tiny.py", "--q-len", 512,
        "--json", "a.json", "--svg", "a.svg", "--png", "new/a.png",
    )  # fmt: skip
    assert status == 0 and lines[0].startswith("tiny on")
    assert json.loads((project / "a.json").read_text())["accounts"][0]["variant"] == "tiny"
    picture = (project / "a.svg").read_text()
    assert picture.startswith("<svg ") and "<title>causal()</title>" in picture
    assert (project / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (project / "new").iterdir()] == ["a.png"]


def test_a_page_is_written_beside_what_is_shown(flashgen, project):
    (project / "specs" / "family.py").write_text(FAMILY)
    status, lines = flashgen("explain", "specs/family.py", "--q-len", 512, "--html", "new/a.html")
    assert status == 0
    shown = [line for line in lines if " on sm_" in line]
    assert shown == ["one on sm_90 (H200)", "two on sm_90 (H200)"]
    page = (project / "new" / "a.html").read_text()
    assert all(f"<h2>{line}</h2>" in page for line in shown)
    lengths = [512, *(2**n for n in range(10, 18))]
    assert [n for n in lengths if f'data-length="{n}"' in page] == lengths
    assert page.count("data-length") == len(lengths)


def test_the_call_is_as_asked(flashgen, project):
    (project / "specs" / "family.py").write_text(FAMILY)
    asked = ("--q-len", 256, "--batch", 3, "--heads", 6, "--kv-heads", 2, "--target", "sm_80")
    status, lines = flashgen("explain", "specs/family.py", *asked, "--json", "-")
    assert status == 0
    accounts = from_json("\n".join(lines))
    assert [account.target for account in accounts] == ["sm_80", "sm_80"]
    call = accounts[1].call
    assert (call.batch, call.num_q_heads, call.num_kv_heads) == (3, 6, 2)
    assert call.params == (("left", "64"),)


def test_a_parameter_of_the_call(flashgen, project):
    (project / "specs" / "window.py").write_text(
        "from flashgen import AttentionSpec, Int, sliding_window\n"
        "spec = AttentionSpec(64, mask=sliding_window(Int('left', 64), 0), targets=('sm_90',))\n"
    )
    status, lines = flashgen("explain", "specs/window.py", "--q-len", 512, "--param", "left=3")
    assert status == 0 and "  left: 3" in lines


RANKS = """\
from flashgen import AttentionSpec, causal, document

spec = AttentionSpec(64, mask=document() & causal(), targets=("sm_90",), forms=("dense", "mesh"))
"""


def test_ranks_over_a_mesh(flashgen, project):
    """Of documents of a thousand tokens, each rank gets those of one document at most."""
    (project / "specs" / "ranks.py").write_text(RANKS)
    asked = "specs/ranks.py", "--ranks", "8", "--q-len", "8192"
    status, lines = flashgen("explain", *asked, "--json", "a.json")
    assert status == 0
    assert lines[0] == "ranks on 8 ranks"
    assert "document_ids: ids of documents of 1000 tokens" in lines
    assert "8,192 queries and 8,192 keys on 8 ranks" in lines
    document = json.loads((project / "a.json").read_text())
    [account] = document["accounts"]
    assert document["form"] == "mesh" and account["ranks"] == 8
    assert account["queries"] == [1024] * 8
    assert sum(account["pairs"]) == 8 * 500500 + 192 * 193 // 2
    assert account["received"][0] == 0 and max(account["received"]) < 1000
    assert set(account["costs"]) == {"all-to-all", "ulysses", "all-gather", "ring", "grid"}
    assert account["picture"][-1].endswith("7") and account["picture"][0].startswith("0")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["specs/tiny.py", "--target", "sm_75"],
            "error: --target=sm_75: unknown target; write one of "
            "sm_80, sm_86, sm_89, sm_90, sm_100, gfx942",
        ),
        (
            ["specs/none.py"],
            "error: specs/none.py: no such file; name a spec file or a folder of them",
        ),
        (
            ["specs/tiny.py", "--param", "left"],
            "error: --param=left: not NAME=VALUE; write --param left=512",
        ),
        (
            ["specs/tiny.py", "--param", "left=5"],
            "error: --param=left=5: tiny has no number of this name; leave it out",
        ),
        (
            ["specs/tiny.py", "--q-len", "5", "--kv-len", "6"],
            "error: --kv-len=6: the call has 5 queries, and in tiny causal() is for equal lengths "
            "only; rebuild the spec with align='top_left' or align='bottom_right', or leave "
            "--kv-len out",
        ),
        (
            ["specs/family.py", "--svg", "x.svg"],
            "error: --svg=x.svg: a picture is of one variant, and there are one, two; "
            "name a file that declares one",
        ),
        (
            ["specs/family.py", "--png", "x.png"],
            "error: --png=x.png: a picture is of one variant, and there are one, two; "
            "name a file that declares one",
        ),
        *(
            (
                ["specs/tiny.py", option, "specs/tiny.py/x"],
                "error: specs/tiny.py/x: cannot be written: File exists; "
                f"choose another place with {option}",
            )
            for option in ("--json", "--html", "--svg", "--png")
        ),
        *(
            (
                ["specs/tiny.py", option, folder],
                f"error: {folder}: cannot be written: Is a directory; "
                f"choose another place with {option}",
            )
            for option in ("--json", "--html", "--svg", "--png")
            for folder in ("/", ".", "specs")
        ),
        *(
            (
                ["specs/tiny.py", option, "-"],
                f"error: {option}=-: only --json writes to stdout; name a file",
            )
            for option in ("--html", "--svg", "--png")
        ),
        (
            ["specs/tiny.py", "--ranks", "0"],
            "error: --ranks=0: not a number of ranks; write 1 to 4096",
        ),
        (
            ["specs/tiny.py", "--ranks", "2", "--strategy", "tree"],
            "error: --strategy=tree: unknown; write one of all-to-all, ulysses, all-gather, ring, "
            "grid",
        ),
        (
            ["specs/tiny.py", "--ranks", "3", "--q-len", "64", "--strategy", "ulysses"],
            "error: specs/tiny.py: tiny: strategy: 'ulysses' cannot compute this call: 32 heads of "
            "queries are no multiple of 3 ranks",
        ),
        (
            ["specs/tiny.py", "--ranks", "2", "--q-len", "64", "--kv-len", "65"],
            "error: --kv-len=65: a mesh has as many keys as queries; leave it out",
        ),
        (
            ["specs/tiny.py", "--ranks", "2", "--svg", "x.svg"],
            "error: --svg=x.svg: --ranks has no such file; leave it out",
        ),
        (
            ["specs/tiny.py", "--strategy", "ring"],
            "error: --strategy=ring: is for --ranks; leave it out",
        ),
        (
            ["specs/tiny.py", "--q-len", "100000000"],
            "error: --q-len=100000000: too long for an account; write at most 1048576",
        ),
        (
            ["specs/tiny.py", "--q-len", "5", "--kv-len", "99999999999999"],
            "error: --kv-len=99999999999999: too long for an account; write at most 1048576",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_it_refuses(flashgen, project, arguments, answer):
    (project / "specs" / "family.py").write_text(FAMILY)
    assert flashgen("explain", *arguments) == (2, [answer])
    assert not (project / "x.svg").exists() and not (project / "-").exists()


def test_a_wrong_spec_gets_the_answer_of_a_build(flashgen, project):
    (project / "specs" / "wrong.py").write_text(
        "from flashgen import AttentionSpec, causal\nspec = AttentionSpec(60, mask=causal())\n"
    )
    built = flashgen("build", "specs/wrong.py")
    assert flashgen("explain", "specs/wrong.py") == built
    assert built[0] == 2


@pytest.mark.parametrize("option", ["--q-len", "--kv-len", "--batch", "--heads", "--kv-heads"])
def test_sizes_are_at_least_one(flashgen, option):
    answer = f"error: {option}=0: not a size; write a whole number from 1 on"
    assert flashgen("explain", "specs/tiny.py", option, 0) == (2, [answer])


def test_a_damaged_file_of_results_is_said(flashgen, project):
    (project / "generated" / "tuning").mkdir(parents=True)
    (project / "generated" / "tuning" / "tiny.json").write_text("{")
    status, [line] = flashgen("explain", "specs/tiny.py")
    assert status == 2 and "not a file of tuning results" in line


def test_it_imports_neither_torch_nor_triton(project):
    code = (
        "import sys\n"
        "from flashgen.cli import main\n"
        "try:\n"
        "    main(['explain', 'specs', '--json', 'a.json', '--svg', 'a.svg', '--html', 'a.html'])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert not {'torch', 'triton'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny on sm_90")

"""The examples do what they say."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashgen.build import Options, Progress, build
from flashgen.reference import attention_reference
from support.variants import import_file

ROOT = Path(__file__).parents[2]
VARIANTS = sorted((ROOT / "examples" / "specs").glob("*.py"))


@pytest.fixture(scope="module")
def gpt():
    return import_file(ROOT / "examples" / "gpt.py")


@pytest.fixture(scope="module")
def train_gpt():
    # As a script finds what lies beside it; its dataclass looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("train_gpt")
    for name in ("train_gpt", "plots"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def train_linear(train_gpt, tmp_path_factory):
    cached = {"FLASHGEN_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cached.items():
            patch.setenv(name, value)
        yield import_file(ROOT / "examples" / "train_linear.py")


@pytest.mark.filterwarnings("ignore:causal_d64")
def test_gpt_learns(gpt):
    losses = gpt.train(steps=15, device="cpu")
    assert losses[0] == pytest.approx(math.log(32), rel=0.15)
    assert losses[-1] < losses[0] / 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:causal_d64")
def test_gpt_learns_on_a_gpu(gpt):
    losses = gpt.train(steps=15, device="cuda")
    assert losses[-1] < losses[0] / 2


@pytest.mark.filterwarnings("ignore:causal_d64")
def test_gpt_sees_no_token_ahead(gpt):
    torch.manual_seed(0)
    model = gpt.GPT(vocabulary=32, max_len=16)
    tokens = torch.randint(32, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 32
    scores, other = model(tokens), model(changed)
    assert torch.equal(scores[:, :9], other[:, :9])
    assert not torch.equal(scores[:, 9:], other[:, 9:])


def test_the_data_is_what_it_says(gpt):
    tokens = gpt.progressions(8, 12, 32)
    steps = (tokens[:, 1:] - tokens[:, :-1]) % 32
    assert (steps == steps[:, :1]).all()
    assert tokens.min() >= 0 and tokens.max() < 32


def test_stories_add_up(train_gpt):
    """What each owns in the end follows from what is told, and nothing else is."""
    text = train_gpt.make_text(5000)
    assert len(text) == 5000 and text == train_gpt.make_text(5000)
    *stories, _ = text.split("\n")
    assert len(stories) > 20
    for told in stories:
        owned = {}
        first, end = told.split(" now ")
        for sentence in first.removesuffix(".").split(". "):
            match sentence.split():
                case [name, "has", number, _]:
                    owned[name] = int(number)
                case [name, "finds", number, "more"]:
                    owned[name] += int(number)
                case [giver, "gives", taker, number, "of", "them"]:
                    owned[giver] -= int(number)
                    owned[taker] += int(number)
                case _:
                    raise AssertionError(sentence)
        assert min(owned.values()) >= 0
        assert re.findall(r"(\w+) has (\d+)", end) == [(n, str(x)) for n, x in owned.items()]


def test_every_run_gets_the_same_batches(train_gpt):
    size, text = train_gpt.SIZES["cpu"], train_gpt.make_text(2000)
    one, other = (train_gpt.batches(text, size, "cpu") for _ in range(2))
    first, second = one(), one()
    assert first.shape == (size.batch, size.seq_len + 1)
    assert not torch.equal(first, second)
    assert torch.equal(first, other()) and torch.equal(second, other())
    characters = sorted(set(text))
    assert all("".join(characters[i] for i in row) in text for row in first)


def test_differences_are_step_by_step(train_gpt):
    runs = {"SDPA": [[4.0, 2.0], [5.0, 2.5]], "flashgen": [[4.5, 2.0], [5.0, 2.0]]}
    apart = train_gpt.differences(runs)
    assert apart == {"between attentions": [0.25, 0.25], "between seeds": [0.75, 0.25]}
    assert train_gpt.smoothed([1.0, 2.0, 6.0]) == [1.0, 1.5, 3.0]


@pytest.mark.filterwarnings("ignore:.*eager reference")
def test_each_linear_attention_learns(train_gpt, train_linear):
    text = train_gpt.make_text(5000)
    found = train_linear.attentions("cpu")
    assert list(found) == [
        "softmax",
        "elu + 1",
        "elu + 1, decays",
        "softmax of features",
        "Performer",
    ]
    for name, attention in found.items():
        losses = train_gpt.train(attention, 0, 8, text, "cpu")
        assert losses[-1] < losses[0] - 0.4, name


def test_long_sequences_lose_the_same_on_any_number_of_ranks(train_gpt, tmp_path, monkeypatch):
    """Of several chunks each; and the runs are on one plot."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
    script, out = str(ROOT / "examples" / "train_long.py"), tmp_path / "runs"
    options = ("--device", "cpu", "--steps", "6", "--seq-len", "600", "--out", str(out))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # One rank needs nobody who starts it.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    started = [
        subprocess.Popen(
            [sys.executable, *by, script, *options],
            env=env | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for by, more in (((), {**alone, "MASTER_PORT": "0"}), (torchrun, {}))
    ]
    for process in started:
        shown, _ = process.communicate(timeout=240)
        assert process.returncode == 0, shown
    one, two = (json.loads((out / f"ranks_{ranks}.json").read_text()) for ranks in (1, 2))
    assert one["losses"] == pytest.approx(two["losses"], abs=1e-4)
    assert one["losses"][-1] < one["losses"][0] - 0.3
    pytest.importorskip("matplotlib", reason="pip install 'flashgen[bench]' brings matplotlib")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [script, "--plot", str(out)])
    import_file(Path(script)).main()
    assert all(label in (out / "losses.svg").read_text() for label in ("1 rank", "2 ranks"))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:causal_d64")
def test_an_attention_that_is_not_causal_is_told_apart(train_gpt):
    """By more than another seed."""
    text = train_gpt.make_text(train_gpt.SIZES["cpu"].characters)

    def wrong(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    attentions = {"SDPA": train_gpt.sdpa, "wrong": wrong}
    runs = {
        name: [train_gpt.train(attention, seed, 25, text, "cpu") for seed in train_gpt.SEEDS]
        for name, attention in attentions.items()
    }
    apart = train_gpt.differences(runs)
    assert sum(apart["between attentions"]) > sum(apart["between seeds"])


def _train(out, steps, device):
    command = [sys.executable, "-W", "ignore", ROOT / "examples" / "train_gpt.py"]
    run = subprocess.run(
        [*command, "--steps", str(steps), "--device", device, "--out", out],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((out / "losses.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_attentions_train_alike(tmp_path, device):
    pytest.importorskip("matplotlib", reason="pip install 'flashgen[bench]' brings matplotlib")
    told, results = _train(tmp_path / "out", 25, device)
    for curves in results["losses"].values():
        assert all(len(curve) == 25 and curve[-1] < 0.8 * curve[0] for curve in curves)
    # The weights of a seed are the same; those of two are not.
    (one, _), (other, _) = results["losses"].values()
    assert one[0] == pytest.approx(other[0], abs=2e-3)
    means = results["mean difference"]
    assert means["between attentions"] < 0.1 * means["between seeds"]
    for name, value in means.items():
        assert f"mean difference {name}: {value:.5f}" in told
    picture = (tmp_path / "out" / "losses.svg").read_text()
    assert picture.startswith("<?xml") and "flashgen, seed 1" in picture


def test_quickstart(tmp_path):
    """A copy of it, beside a module that is built for this test."""
    shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path)
    file = ROOT / "examples" / "specs" / "capped_window.py"
    assert list(build([file], Options(out=tmp_path / "built", tune=False), Progress()))
    run = subprocess.run(
        [sys.executable, tmp_path / "quickstart.py"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "capped_window is right on this" in run.stdout


def test_what_examples_build_is_not_committed():
    """So the set-up command has something to build, and `flashgen check` nothing to object to."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/examples/built/" in ignored
    names = {path.stem for path in VARIANTS}
    assert not names & {path.stem for path in (ROOT / "generated").glob("*.py")}
    assert not names & {path.stem for path in (ROOT / "specs").glob("*.py")}


#: What the call in each docstring reads, besides q, k and v; and the keys, for 64 queries.
CALLS = {
    "bigbird_drawn": {},
    "capped_window": {"sinks": torch.tensor([0.0, 1.0])},
    "chunks_with_sinks": {"slopes": torch.tensor([0.1, 0.5]), "sinks": torch.tensor([0.0, 1.0])},
    "images_in_text": {"tokens": torch.arange(64).repeat(2, 1) % 9 // 4, "IMAGE_TOKEN": 1},
    "packed_windows": {"ids": (torch.arange(64).repeat(2, 1) // 25).int()},
    "sigmoid_decay": {"lengths": torch.tensor([60, 8]).int(), "decay": torch.tensor([0.1, 0.5])},
    "tree_with_sinks": {"ancestors": torch.ones(64, 64).tril().bool().repeat(2, 1, 1), "keys": 90},
    "video_windows": {},
}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda path: path.stem)
def variant(request, tmp_path_factory):
    """A spec file of examples/specs, its spec, and the module that it builds."""
    out, file = tmp_path_factory.mktemp("generated"), request.param
    options = Options(out=out, targets=("sm_90",), tune=False)
    [built] = build([file], options, Progress())
    module = import_file(out / f"{built.variant}.py")
    return SimpleNamespace(file=file, spec=import_file(file).spec, module=module)


def test_a_variant_is_short(variant):
    docstring, *statements = ast.parse(variant.file.read_text()).body
    assert isinstance(docstring.value.value, str)
    assert sum(s.end_lineno - s.lineno + 1 for s in statements) < 15


def test_the_examples_are_listed():
    shown = (ROOT / "examples" / "README.md").read_text()
    listed = re.findall(r"\(specs/(\w+)\.py\)", shown)
    assert sorted(listed) == [path.stem for path in VARIANTS]
    assert CALLS.keys() == {path.stem for path in VARIANTS}


@pytest.mark.filterwarnings("ignore:.*run the eager reference")
def test_a_variant_is_called_as_it_says(variant):
    """The lines of the docstring run, and give what the spec's own functions say."""
    name = variant.file.stem
    values = dict(CALLS[name])
    spec = variant.spec
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, n, spec.head_dim, generator=generator).bfloat16()
        for n in (64, *[values.pop("keys", 64)] * 2)
    )
    chosen = {}

    def attention(*tensors, **params):
        chosen.update(params)
        return variant.module.attention(*tensors, **params)

    docstring = ast.get_docstring(ast.parse(variant.file.read_text()))
    lines = [line for line in docstring.splitlines() if line.startswith("    ")]
    names = {"torch": torch, "q": q, "k": k, "v": v, **values}
    names[name] = SimpleNamespace(attention=attention)
    exec(textwrap.dedent("\n".join(lines)), names)
    expected = attention_reference(
        q, k, v, spec.mask, score=spec.score, normaliser=spec.normaliser, params=chosen
    )
    assert (names["out"] - expected).abs().max() < 0.02


@pytest.mark.filterwarnings("ignore:.*the eager reference")
@pytest.mark.parametrize("variant", [ROOT / "examples/specs/chunks_with_sinks.py"], indirect=True)
def test_what_a_variant_learns_has_gradients(variant):
    learned = {name: x.clone().requires_grad_() for name, x in CALLS["chunks_with_sinks"].items()}
    q, k, v = torch.randn(3, 1, 2, 16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    variant.module.attention(q, k, v, chunk=8, **learned).float().square().sum().backward()
    assert all(x.grad.abs().min() > 0 for x in learned.values())

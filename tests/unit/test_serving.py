"""The server of examples/: pages, its scheduler, and its tokens beside dense recomputation."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashgen
from benchmarks.figures import newest_results
from benchmarks.table import TABLES
from examples.serving import warm
from examples.serving.attention import Flashgen, specs
from examples.serving.cascade import cascade, groups_of
from examples.serving.engine import Engine
from examples.serving.model import GPT, Size, generate_densely
from examples.serving.pages import Pages
from examples.serving.peers import FlashInfer, Padded, keys_in_pages
from examples.serving.scheduler import Request, Scheduler
from support.fake_gpu import fake_gpu, module_on, to_ir_alone
from support.variants import rendered_module

ROOT = Path(__file__).parents[2]
SPECS = specs(16, "float32")
SIZE = Size(vocabulary=50, max_len=160, depth=2, heads=4, kv_heads=2, head_dim=16)

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


@pytest.fixture(scope="module")
def modules():
    return tuple(rendered_module(spec, name=spec.name) for spec in SPECS)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(SIZE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def requests() -> list[Request]:
    """Most begin with the same 40 tokens, and the first two arrive at once."""
    generator = torch.Generator().manual_seed(1)

    def text(length):
        return torch.randint(SIZE.vocabulary, (length,), generator=generator).tolist()

    prefix = text(40)
    return [
        Request(prefix * (i % 3 != 2) + text(3 + 11 * i % 29), 8 + 5 * i % 14, max(0, 3 * i - 3))
        for i in range(8)
    ]


def served(engine: Engine) -> list[Request]:
    todo = requests()
    for request in todo:
        engine.scheduler.add(request)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
    return todo


#: Pages and their size; tokens of a step; whether prefixes are read apart.
SERVERS = {
    "pages": (40, 16, 64, False),
    "prefixes read apart": (40, 16, 64, True),
    "prompts in parts": (20, 32, 9, True),
    "pages run out": (90, 1, 64, True),
}


@pytest.mark.parametrize("name", SERVERS)
def test_tokens_are_those_of_dense_recomputation(name, modules, model):
    count, page_size, tokens, apart = SERVERS[name]
    pages = Pages(count, page_size)
    cascade_from = 0 if apart else 2**40
    attention = Flashgen(modules, SIZE, pages, model.head.weight, cascade_from)
    scheduler = Scheduler(pages, 4, tokens)
    engine = Engine(model, attention, scheduler, itertools.count().__next__)
    for request in served(engine):
        assert request.generated == generate_densely(model, request.prompt, request.new)
    assert engine.steps["mixed"] and engine.steps["decoding False"] + engine.steps["decoding True"]
    assert bool(engine.steps["decoding True"]) == apart
    assert scheduler.shared > 0 and bool(scheduler.preempted) == (name == "pages run out")
    assert not any(pages.users) and len(pages.free) == count


@pytest.mark.gpu
def test_graphs_give_the_tokens_of_eager_steps(monkeypatch):
    """In bfloat16; the tokens are mostly those of dense recomputation, which rounds otherwise."""
    size = replace(SIZE, head_dim=64)
    modules = tuple(flashgen.compile(spec) for spec in specs(64, "bfloat16"))
    torch.manual_seed(0)
    model = GPT(size).to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    found = []
    for graphs in (True, False):
        attention = Flashgen(modules, size, Pages(40, 16), model.head.weight, 0)
        engine = Engine(
            model, attention, Scheduler(Pages(40, 16), 4, 64), itertools.count().__next__
        )
        if not graphs:
            monkeypatch.setattr(engine, "_decoded", engine._next_tokens)
        found.append([request.generated for request in served(engine)])
        assert engine.steps["decoding True"] and bool(engine.graphs) == graphs
    assert found[0] == found[1]
    right = [generate_densely(model, r.prompt, r.new)[0] for r in requests()]
    same = [tokens[0] == first for tokens, first in zip(found[0], right, strict=True)]
    assert sum(same) >= len(same) - 2


def test_padded_tokens_are_those_of_dense_recomputation(model):
    pages = Pages(3, SIZE.max_len, keep=False)
    attention = Padded(SIZE, pages, model.head.weight)
    scheduler = Scheduler(pages, 3, 20)
    for request in served(Engine(model, attention, scheduler, itertools.count().__next__)):
        assert request.generated == generate_densely(model, request.prompt, request.new)
    assert scheduler.shared == 0 and len(pages.free) == 3


class Wrapper:
    """A wrapper of FlashInfer, in torch: what its plan says decides what its run reads."""

    def __init__(self, workspace, layout, **options):
        assert layout == "NHD" and workspace.dtype == torch.uint8
        self.options = options
        self.buffer = options.get("paged_kv_indices_buffer")

    def plan(self, *where, causal=None, q_data_type, kv_data_type=None):
        """Of prompts with where their tokens begin, and of decoding without."""
        *begins, indptr, pages, last, heads, kv_heads, head_dim, self.page_size = where
        assert bool(begins) == bool(causal) and q_data_type == torch.float32
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in where[:-4])
        assert (heads, kv_heads, head_dim) == (SIZE.heads, SIZE.kv_heads, SIZE.head_dim)
        assert self.buffer is None or len(pages) <= len(self.buffer)
        assert len(pages) == indptr[-1] and (last >= 1).all() and (last <= self.page_size).all()
        self.begins = begins[0].tolist() if begins else list(range(len(last) + 1))
        self.pages = [pages[a:b].long() for a, b in itertools.pairwise(indptr.tolist())]
        self.last = last.tolist()

    def run(self, q, caches):
        assert q.is_contiguous() and len(q) == self.begins[-1]
        out = torch.empty_like(q)
        spans = itertools.pairwise(self.begins)
        for (a, b), pages, last in zip(spans, self.pages, self.last, strict=True):
            length = (len(pages) - 1) * self.page_size + last
            k, v = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in caches)
            seen = torch.arange(length) <= torch.arange(length - (b - a), length)[:, None]
            out[a:b] = torch.nn.functional.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None], k[None], v[None], attn_mask=seen, enable_gqa=True
            )[0].transpose(0, 1)
        return out


@pytest.fixture
def flashinfer(monkeypatch):
    """A package of that name, whose wrappers run on the CPU."""
    package = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper, BatchDecodeWithPagedKVCacheWrapper=Wrapper
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return package


@pytest.mark.parametrize(("count", "page_size"), [(40, 16), (20, 32), (90, 1)])
def test_flashinfer_is_told_where_keys_are(count, page_size, flashinfer, modules, model):
    """So that its tokens are those of dense recomputation."""
    pages = Pages(count, page_size)
    attention = FlashInfer(modules[0], SIZE, pages, model.head.weight)
    engine = Engine(model, attention, Scheduler(pages, 4, 64), itertools.count().__next__)
    for request in served(engine):
        assert request.generated == generate_densely(model, request.prompt, request.new)
    assert engine.steps["mixed"] and engine.steps["decoding None"]
    assert bool(engine.scheduler.preempted) == (page_size == 1)


def test_keys_in_pages():
    """Pages that are not full, full ones, pages beyond the keys, and rows of nobody."""
    requests = [Request([0], 1, pages=[7, 3, 5]), None, Request([0], 1, pages=[2, 9])]
    indptr, pages, last = keys_in_pages(requests, [33, 5, 16], 16)
    assert indptr.tolist() == [0, 3, 4, 5]
    assert pages.tolist() == [7, 3, 5, 0, 2] and last.tolist() == [1, 1, 16]


def test_a_prefix_is_computed_once_also_in_the_step_of_both():
    scheduler = Scheduler(Pages(10, 4), 4, 100)
    one, other = Request([1, 2, 3, 4, 5, 6, 7, 8], 3), Request([1, 2, 3, 4, 5, 6, 9], 3)
    third = Request([1, 2, 3, 4, 5, 6, 7, 8], 3)
    for request in (one, other, third):
        scheduler.add(request)
    assert [part.tokens for part in scheduler.next(0)] == [one.prompt, [5, 6, 9], [5, 6, 7, 8]]
    assert one.pages[0] == other.pages[0] == third.pages[0]
    assert len({one.pages[1], other.pages[1], third.pages[1]}) == 3
    assert scheduler.pages.users[one.pages[0]] == 3 and scheduler.shared == 8


def test_pages_keep_their_texts_until_they_are_taken():
    pages = Pages(4, 2)
    one = [pages.take() for _ in range(3)]
    pages.fill(one, [1, 2, 3, 4, 5])
    pages.give_back(reversed(one))
    # The same tokens after others are another text.
    assert pages.share([3, 4, 5]) == []
    assert pages.share([1, 2, 3, 4, 6]) == one[:2]
    pages.give_back(reversed(one[:2]))
    taken = {pages.take() for _ in range(3)}
    assert one[0] not in taken
    assert pages.share([1, 2, 3, 4, 6]) == one[:1]
    with pytest.raises(ValueError, match=f"page {one[1]} is given back by nobody"):
        pages.give_back([one[1], one[1]])


def test_a_request_that_no_cache_holds_is_refused():
    scheduler = Scheduler(Pages(2, 4), 4, 100)
    scheduler.add(Request([1] * 5, 4))
    for request in (Request([1] * 6, 4), Request([], 1), Request([1], 0)):
        with pytest.raises(ValueError, match="the cache holds 1 to 8"):
            scheduler.add(request)


def test_groups_share_what_all_of_their_requests_share():
    def request(pages, tokens):
        return Request([0] * tokens, 1, pages=pages, computed=tokens - 1)

    close = [request([1, 2, 3, 9], 16), request([1, 2, 3, 4], 13), request([1, 2, 7], 10)]
    short = [request([5, 6], 8), request([5, 6], 8)]  # the second page has their last keys
    groups = groups_of([short[0], *close, request([8], 3), short[1]], 4, 1, 4)
    assert [(group.requests, group.pages) for group in groups] == [(close, 2), (short, 1)]
    assert [group.saved for group in groups] == [4, 1]
    assert (
        len(groups_of([*close, *short], 4, 2, 4)) == len(groups_of([*close, *short], 4, 1, 1)) == 1
    )


def test_a_cascade_is_attention_to_all_keys(modules):
    """Two groups, of three sequences and of two, one sequence of none, and a row of nobody."""
    causal, full = modules
    torch.manual_seed(0)
    q, (k, v) = torch.randn(7, 4, 16), torch.randn(2, 20, 16, 2, 16)
    first, second = [3, 4], [5]
    rows = [[*first, 0, 1], [*first, 2], [*first, 6], [*second, 7, 8], [*second, 9], [10, 11], [0]]
    lens = [60, 33, 48, 40, 17, 20, 0]
    skipped = [2, 2, 2, 1, 1, 0, 0]

    def int32(rows):
        most = max(map(len, rows))
        return torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int32)

    own = [row[n:] for row, n in zip(rows, skipped, strict=True)]
    own_lens = [length - 16 * n for length, n in zip(lens, skipped, strict=True)]
    [ends, prefix_lens, own_lens, all_lens] = (
        int32([x])[0] for x in ([0, 3, 5, 5, 7], [32, 16, 0, 0], own_lens, lens)
    )
    # What belongs to nobody may be anything.
    k[12:], v[12:] = torch.nan, torch.nan
    prefixes = int32([first, second, [], []])
    got = cascade(causal, full, q, k, v, ends, prefix_lens, prefixes, own_lens, int32(own))
    right = causal.cache_reference(q[:, None], k, v, all_lens, block_table=int32(rows))
    torch.testing.assert_close(got, right[:, 0])
    assert not got[6].any()


@pytest.fixture
def example(monkeypatch):
    """A file of examples/ by its name, which finds what it imports."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield importlib.import_module
    for name in list(sys.modules):
        if name.partition(".")[0] in ("serve", "serving", "drafts"):
            del sys.modules[name]


@pytest.fixture
def serve(example, modules, monkeypatch):
    """examples/serve.py, with modules that are rendered for these tests."""
    monkeypatch.setattr("flashgen.compile", lambda spec: modules[spec.name == SPECS[1].name])
    return example("serve")


def test_the_command(serve, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve.py", "--device", "cpu", "--requests", "6"])
    serve.main()
    assert "as recomputed 100.00%" in capsys.readouterr().out


def test_wrong_tokens_are_told(serve, modules, monkeypatch):
    """As those of an attention that misses a sequence's last key."""

    def one_less(q, k, v, lens, **others):
        return modules[0].cache_attention(q, k, v, lens - 1, **others)

    wrong = SimpleNamespace(**vars(modules[0]) | {"cache_attention": one_less})
    monkeypatch.setattr("flashgen.compile", lambda spec: wrong)
    monkeypatch.setattr(sys, "argv", ["serve.py", "--device", "cpu", "--requests", "2"])
    with pytest.raises(SystemExit, match="not those of dense recomputation"):
        serve.main()


def test_a_benchmark_is_of_the_same_requests_and_is_drawn(
    serve, modules, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("matplotlib", reason="pip install 'flashgen[bench]' brings matplotlib")
    load = replace(serve.TINY.load, requests=5, keys=1024)
    setting = replace(serve.TINY, load=load)
    model = serve.make_model(setting, "cpu")
    kept = []
    results = serve.bench(
        setting, model, modules, serve.Progress(600.0), lambda x: kept.append(list(x))
    )
    assert kept == [list(results)[: i + 1] for i in range(len(results))]
    told = capsys.readouterr().out
    assert told.count("s] flashgen: serve 5 requests") == 2
    assert ("FlashInfer is left out" in told) == ("FlashInfer" not in results)
    assert told.count("SDPA, padded: serve 1 requests") == 1
    assert told.count("SDPA, padded: serve 5 requests") == 1
    others = ["FlashInfer"] if "FlashInfer" in results else []
    assert list(results) == ["flashgen", "flashgen, nothing shared", *others, "SDPA, padded"]
    assert told.count("as recomputed 100.00%") == len(results)
    assert len({served.tokens for served in results.values()}) == 1
    shared = [name for name, served in results.items() if served.shared > 0]
    assert shared == ["flashgen", *others]
    written, record = tmp_path / "serve.json", serve.recorded(setting, results, "a GPU")
    written.write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["serve.py", "--draw", str(written)])
    serve.main()
    picture = written.with_suffix(".svg").read_text()
    assert all(f"{name}: " in picture for name in results)
    assert "5 requests to a small GPT, a GPU" in picture
    table = TABLES[record["benchmark"]][1](newest_results(tmp_path)[record["benchmark"]])
    for name, served in results.items():
        assert f"| {name} | {served.rate:,.0f} | {served.first_ms:,.0f} |" in table


def test_a_benchmark_ends_when_time_is_over(serve, modules, monkeypatch, capsys):
    """With what was measured before: the first contender, as time passes."""
    progress = serve.Progress(600.0)

    def tell(*_):
        progress.seconds = 0.0

    monkeypatch.setattr(serve, "tell", tell)
    setting = replace(serve.TINY, load=replace(serve.TINY.load, requests=2))
    results = serve.bench(setting, serve.make_model(setting, "cpu"), modules, progress, list)
    assert list(results) == ["flashgen"]
    assert "flashgen, nothing shared: not done" in capsys.readouterr().out


@pytest.mark.parametrize("all_steps", [True, False], ids=["as it is", "a step alone"])
def test_warm_steps_compile_all_that_a_load_asks_for(serve, monkeypatch, all_steps):
    """The mixed steps of the benchmark's load, of a layer, on a GPU that notes alone."""
    gpu, load = fake_gpu(monkeypatch), replace(serve.LARGE.load, requests=40)
    setting = replace(serve.LARGE, size=replace(serve.LARGE.size, depth=1), load=load)
    translated = to_ir_alone(monkeypatch)
    modules = tuple(module_on(gpu, spec, monkeypatch) for spec in specs(128, "bfloat16"))
    pages = Pages(load.keys // load.page_size, load.page_size)
    like = torch.zeros(1, dtype=torch.bfloat16)
    attention = Flashgen(modules, setting.size, pages, like)
    monkeypatch.setattr(warm, "THREADS", 1)
    if not all_steps:
        monkeypatch.setattr(warm, "STEPS", warm.STEPS[:1])
    warm.warm(attention, setting.size, load.batch)
    compiled = len(translated)
    scheduler, clock = Scheduler(pages, load.batch, load.tokens), 0.0
    for request in serve.requests_of(setting):
        scheduler.add(request)
    while (scheduler.waiting or scheduler.running) and len(translated) == compiled:
        parts = scheduler.next(clock)
        clock += 0.003  # about what a step takes
        if any(part.begin == 0 or part.count > 1 for part in parts):
            clock += 0.012
            parts.sort(key=lambda part: part.begin == 0)
            sizes = (sum(part.count for part in parts), setting.size.head_dim)
            heads = (setting.size.heads, setting.size.kv_heads, setting.size.kv_heads)
            with torch.no_grad():
                attention.mixed(parts)(0, *(like.new_zeros(sizes[0], n, sizes[1]) for n in heads))
        scheduler.finish(parts, [0] * sum(part.is_last for part in parts), clock)
    assert (len(translated) == compiled) == all_steps


def test_trees_of_drafts_change_no_token(example, model):
    """Whatever is guessed: nothing right, the second guess after each token, or all of a chain."""
    drafts = example("drafts")
    module = rendered_module(drafts.SPEC, name="drafts")
    prompts = [[7, 3, 5, 1, 2, 8, 4, 9, 6], [1] * 9]
    right = [generate_densely(model, prompt, 30) for prompt in prompts]
    wholes = [prompt + tokens for prompt, tokens in zip(prompts, right, strict=True)]

    def after(text, depth):
        whole = next(whole for whole in wholes if whole[: len(text)] == text[: len(whole)])
        return [*whole, *[0] * 40][len(text) + depth]

    def wrong(text):
        return [after(text, i > 2) + 1 for i in range(1, 7)]

    def second(text):
        return [after(text, 0) + 1, after(text, 0), 0, 0, 0, after(text, 1)]

    def chain(text):
        return [after(text, i) for i in range(20)]

    by_chain = (chain, range(-1, 20))
    for (draft, parents), most in (((wrong, drafts.PARENTS), 30), ((second, drafts.PARENTS), 10),
                                   (by_chain, 2)):  # fmt: skip
        tokens, steps = drafts.generate(model, module, prompts, 30, draft, parents)
        assert tokens == right
        assert steps == most


def test_the_command_of_drafts(example, monkeypatch, capsys):
    drafts = example("drafts")
    monkeypatch.setattr("flashgen.compile", lambda spec: rendered_module(spec, name="drafts"))
    monkeypatch.setattr(sys, "argv", ["drafts.py", "--device", "cpu", "--new", "12"])
    drafts.main()
    assert "all are those of dense recomputation" in capsys.readouterr().out

"""Serves a small GPT: continuous batching over keys in pages, by modules of flashgen.

    python examples/serve.py
    python examples/serve.py --bench --out serve
    python examples/serve.py --draw serve/serve.json

Requests with prompts of different lengths arrive over time, and most begin with the same prefix.
Each step decodes a token of all running requests and computes parts of new prompts. Pages are
shared where texts begin alike, taken and given back, and taken away if they run out. In the end
each token is compared with what torch computes from the whole text, without a cache.

With --bench on a GPU, the same requests are served by FlashInfer, too, if it can be imported, and
last by torch's SDPA over padded rows, as far as --seconds reach. OUT gets serve.json, written anew
after each of them, and, of the tokens over time, serve.svg, which needs matplotlib; --draw makes
the picture of a file later. Without --bench a tiny model is served, in float32 on a CPU, where the
modules' eager reference takes the place of their kernels.

The parts are in serving/: pages, scheduler, engine, model, attention, cascade, peers and warm.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import triton
from plots import SAVED, STYLE
from serving.attention import Flashgen, specs
from serving.engine import Attention, Engine
from serving.model import GPT, Size, dense_scores
from serving.pages import Pages
from serving.peers import FlashInfer, Padded, has_flashinfer
from serving.scheduler import Request, Scheduler
from serving.warm import warm

import flashgen

#: Of the requests that were measured, how many are compared with dense recomputation.
COMPARED = 8

#: SDPA over padded rows is five times slower than others: its warm-up has one of so many requests.
FEWER = 8

#: The colours of contenders in a picture.
COLOURS = {
    "flashgen": "#e8590c",
    "flashgen, nothing shared": "#f0a36b",
    FlashInfer.name: "#5a9e4b",
    Padded.name: "#3b82c4",
}


class Progress:
    """Says what a benchmark does, each phase with the seconds since it began.

    Attributes:
        seconds: how long all of it may take.
    """

    def __init__(self, seconds: float = math.inf):
        self.seconds, self._start = seconds, time.perf_counter()

    @property
    def passed(self) -> float:
        """The seconds since the beginning."""
        return time.perf_counter() - self._start

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.passed > self.seconds

    def say(self, phase: str) -> None:
        """Prints a line at once."""
        print(f"[{self.passed:5.1f} s] {phase}", flush=True)


@dataclass(frozen=True)
class Load:
    """Requests, and what they are served with.

    Attributes:
        requests: how many.
        prompt, new: medians of a prompt's own tokens and of those to generate; a tenth of the
            requests have over four times as many.
        prefix: tokens that most prompts, three of four, begin with.
        gap: mean seconds between two arrivals.
        batch: the most requests that run at a time.
        tokens: the most tokens of a step.
        keys: for how many tokens of all requests there is memory.
        page_size: the keys of a page.
    """

    requests: int
    prompt: int
    new: int
    prefix: int
    gap: float
    batch: int
    tokens: int
    keys: int
    page_size: int


@dataclass(frozen=True)
class Setting:
    """A model and its load."""

    size: Size
    dtype: str
    load: Load


TINY = Setting(
    Size(vocabulary=64, max_len=512, depth=2, heads=4, kv_heads=2, head_dim=16),
    "float32",
    Load(requests=12, prompt=20, new=12, prefix=48, gap=0.01, batch=6, tokens=96, keys=512,
         page_size=16),
)  # fmt: skip
LARGE = Setting(
    Size(vocabulary=32_000, max_len=4096, depth=16, heads=16, kv_heads=4, head_dim=128),
    "bfloat16",
    Load(requests=128, prompt=256, new=192, prefix=1024, gap=0.004, batch=64, tokens=2048,
         keys=131_072, page_size=32),
)  # fmt: skip


def requests_of(setting: Setting, seed: int = 0) -> list[Request]:
    """The same requests every time."""
    rng, size, load = random.Random(seed), setting.size, setting.load

    def drawn(middle: int, most: int) -> int:
        return max(1, min(most, round(middle * rng.lognormvariate(0, 1.1))))

    def text(length: int) -> list[int]:
        return rng.choices(range(size.vocabulary), k=length)

    prefix, arrival, requests = text(load.prefix), 0.0, []
    for _ in range(load.requests):
        arrival += rng.expovariate(1 / load.gap)
        before = prefix if rng.random() < 0.75 else []
        new = drawn(load.new, (size.max_len - load.prefix) // 2)
        own = drawn(load.prompt, size.max_len - load.prefix - new)
        requests.append(Request(before + text(own), new, arrival))
    return requests


def make_model(setting: Setting, device: str, seed: int = 0) -> GPT:
    """A model of random weights: its tokens vary, since its embeddings are not small."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = GPT(setting.size).to(getattr(torch, setting.dtype)).eval()
    for embedding in (model.tokens, model.positions):
        torch.nn.init.normal_(embedding.weight, std=0.5)
    return model


# --- serving --------------------------------------------------------------------------------------


@dataclass
class Served:
    """What came of a load.

    Attributes:
        tokens: how many were generated.
        seconds: from the first arrival to the last token.
        steps: how many there were of each kind.
        shared: tokens of prompts that were not computed, since a page held their keys.
        preempted: how often a request had to begin anew.
        first_ms: the median time from a request's arrival to its first token.
        between_ms: the median, over requests, of the mean time between two of its tokens.
        times: when each percent of the tokens was there.
    """

    tokens: int
    seconds: float
    steps: dict[str, int]
    shared: int
    preempted: int
    first_ms: float
    between_ms: float
    times: list[float]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def serve(engine: Engine, requests: list[Request], progress: Progress) -> Served | None:
    """Serves requests, by the engine's clock, until all are done; None if time is over before."""
    scheduler = engine.scheduler
    for request in requests:
        scheduler.add(request)
    while scheduler.waiting or scheduler.running:
        if progress.is_over:
            return None
        if not engine.step():
            time.sleep(0.0005)  # until the next request arrives
    times = sorted(t for request in requests for t in request.times)
    pauses = [(r.times[-1] - r.times[0]) / (r.new - 1) for r in requests if r.new > 1]
    return Served(
        tokens=len(times),
        seconds=times[-1] - min(request.arrival for request in requests),
        steps=dict(engine.steps),
        shared=scheduler.shared,
        preempted=scheduler.preempted,
        first_ms=1e3 * median(r.times[0] - r.arrival for r in requests),
        between_ms=1e3 * median(pauses or [0.0]),
        times=[times[max(0, -(-i * len(times) // 100) - 1)] for i in range(1, 101)],
    )


def seconds_since_now() -> Callable[[], float]:
    """A clock that begins at 0."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def compare(model: GPT, requests: list[Request]) -> tuple[float, float]:
    """How the tokens of requests agree with dense recomputation of each whole text.

    Returns:
        The share of tokens with the greatest of the recomputed scores, and the most by which the
        score of another was below it, as a share of the spread of scores.
    """
    equal, below = [], 0.0
    for request in requests:
        # The last token has no successor.
        scores = dense_scores(model, request.tokens[:-1], len(request.prompt) - 1).float()
        chosen = torch.tensor(request.generated, device=scores.device)
        of_chosen = scores.gather(1, chosen[:, None])[:, 0]
        equal += (scores.argmax(-1) == chosen).tolist()
        below = max(below, ((scores.amax(-1) - of_chosen) / scores.std(-1)).max().item())
    return mean(equal), below


# --- contenders -----------------------------------------------------------------------------------


def contenders(
    setting: Setting, model: GPT, modules: tuple[Any, Any], names: list[str]
) -> Iterator[tuple[str, Engine]]:
    """An engine of each name, with as much memory for keys."""
    size, load, like = setting.size, setting.load, model.head.weight
    for name in names:
        number, page_size, batch = load.keys // load.page_size, load.page_size, load.batch
        if name == Padded.name:
            number, page_size = load.keys // size.max_len, size.max_len
            batch = min(batch, number)
        # SDPA's rows and the second of flashgen's ways share nothing.
        pages = Pages(number, page_size, keep=name in ("flashgen", FlashInfer.name))
        attention: Attention
        if name == Padded.name:
            attention = Padded(size, pages, like)
        elif name == FlashInfer.name:
            attention = FlashInfer(modules[0], size, pages, like)
        else:
            attention = Flashgen(modules, size, pages, like)
        yield name, Engine(model, attention, Scheduler(pages, batch, load.tokens), lambda: 0.0)


def bench(
    setting: Setting,
    model: GPT,
    modules: tuple[Any, Any],
    progress: Progress,
    keep: Callable[[dict[str, Served]], None],
) -> dict[str, Served]:
    """What came of the same load for every contender that time is enough for.

    Graphs and kernels are made before. ``keep`` gets what there is after each of them.
    """
    names = ["flashgen", "flashgen, nothing shared", FlashInfer.name, Padded.name]
    if not has_flashinfer():
        names.remove(FlashInfer.name)
        progress.say(f"no package flashinfer here: {FlashInfer.name} is left out")
    results: dict[str, Served] = {}
    for name, engine in contenders(setting, model, modules, names):
        if not results and isinstance(engine.attention, Flashgen):
            progress.say("compile kernels")
            warm(engine.attention, setting.size, setting.load.batch)
        progress.say(f"{name}: capture graphs")
        engine.capture()
        scheduler = engine.scheduler
        # Others of the same kind first: what is compiled at first use then is.
        before = requests_of(setting, 1)
        if name == Padded.name:
            before = before[: -(-len(before) // FEWER)]
        for requests in (before, requests_of(setting)):
            progress.say(f"{name}: serve {len(requests)} requests")
            pages = Pages(
                len(scheduler.pages.users), scheduler.pages.size, keep=scheduler.pages.keep
            )
            engine.scheduler = Scheduler(pages, scheduler.max_batch, scheduler.max_tokens)
            engine.steps.clear()
            engine.clock = seconds_since_now()
            served = serve(engine, requests, progress)
            if served is None:
                progress.say(f"{name}: not done; --seconds or --requests change that")
                return results
        share, below = compare(model, requests[:COMPARED])
        tell(name, served, share, below)
        results[name] = served
        keep(results)
        del engine
        gc.collect()
    return results


def tell(name: str, served: Served, share: float, below: float) -> None:
    """Prints a contender's line."""
    print(
        f"{name:25} {served.rate:9,.0f} tokens/s  {served.tokens:,} in {served.seconds:.2f} s  "
        f"first {served.first_ms:,.0f} ms, then {served.between_ms:.1f} ms  "
        f"shared {served.shared:,}, preempted {served.preempted}  "
        f"as recomputed {share:.2%}, else below by {below:.3f}  {served.steps}",
        flush=True,
    )


def draw(record: dict[str, Any], path: Path) -> None:
    """The tokens of each contender over time, of what a benchmark wrote."""
    import matplotlib
    from matplotlib.figure import Figure

    gpu = record["environment"]["gpu"]
    title = f"{record['load']['requests']} requests to a small GPT, {gpu}"

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for served in record["cells"]:
            colour = COLOURS[served["name"]]
            counts = [i * served["tokens"] / 100 for i in range(101)]
            label = f"{served['name']}: {served['tokens_a_second']:,.0f} tokens/s"
            axes.plot([0, *served["times"]], counts, color=colour, linewidth=1.4, label=label)
        axes.set(xlabel="seconds", ylabel="tokens generated", title=title)
        axes.legend(frameon=False)
        axes.grid(linewidth=0.5, alpha=0.4)
        figure.savefig(path, **SAVED)


def recorded(setting: Setting, results: dict[str, Served], gpu: str) -> dict[str, Any]:
    """What a benchmark writes: `python -m benchmarks.table` makes a table of it."""
    environment = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    cells = [{"name": name, "tokens_a_second": x.rate} | asdict(x) for name, x in results.items()]
    return {"benchmark": "serve", "environment": environment, **asdict(setting), "cells": cells}


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Serves a load and says how fast, and whether the tokens are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--bench", action="store_true", help="a larger model, beside others")
    parser.add_argument("--requests", type=int, help="how many, instead of the setting's number")
    parser.add_argument("--out", type=Path, default=Path("serve"), help="folder of --bench")
    parser.add_argument("--seconds", type=float, default=100.0, help="of --bench, in all")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw what --bench wrote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.draw is not None:
        draw(json.loads(options.draw.read_text()), options.draw.with_suffix(".svg"))
        return
    kind = torch.device(options.device).type
    if options.bench and kind != "cuda":
        parser.error("--bench: needs a GPU; leave it out to serve a tiny model")
    if options.requests is not None and options.requests < 1:
        parser.error("--requests: at least 1")
    setting = LARGE if options.bench else TINY
    if kind == "cuda" and not options.bench:
        setting = replace(setting, dtype="bfloat16")
    if options.requests is not None:
        setting = replace(setting, load=replace(setting.load, requests=options.requests))

    progress = Progress(options.seconds if options.bench else math.inf)
    if options.bench:
        progress.say("build modules")
    own, prefix = specs(setting.size.head_dim, setting.dtype)
    modules = flashgen.compile(own), flashgen.compile(prefix)
    model = make_model(setting, options.device)
    if not options.bench:
        [(name, engine)] = contenders(setting, model, modules, ["flashgen"])
        requests = requests_of(setting)
        engine.clock = seconds_since_now()
        served = serve(engine, requests, progress)
        assert served is not None  # there is no end of time
        share, below = compare(model, requests)
        tell(name, served, share, below)
        if setting.dtype == "float32" and share < 1:
            sys.exit("some tokens are not those of dense recomputation")
        return

    options.out.mkdir(parents=True, exist_ok=True)
    written, gpu = options.out / "serve.json", torch.cuda.get_device_name(options.device)

    def keep(results: dict[str, Served]) -> None:
        written.write_text(json.dumps(recorded(setting, results, gpu)) + "\n")
        progress.say(f"wrote {written}")

    results = bench(setting, model, modules, progress, keep)
    if not results:
        sys.exit("nothing was measured in time")
    if find_spec("matplotlib") is None:
        progress.say(f"no matplotlib, no picture: --draw {written} makes it elsewhere")
        return
    draw(recorded(setting, results, gpu), written.with_suffix(".svg"))
    progress.say(f"wrote {written.with_suffix('.svg')}")


if __name__ == "__main__":
    main()

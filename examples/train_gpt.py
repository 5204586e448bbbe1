"""Trains one small GPT with torch's attention and with a generated module, and compares the two.

    flashgen build specs/causal_d64.py && PYTHONPATH=. python examples/train_gpt.py --out train_gpt

Four runs: each attention from the weights of two seeds, all on the same batches. Where the module
is right, what it does to the loss is no more than what another seed does. OUT gets the losses as
losses.json and a picture of both differences as losses.svg, which needs matplotlib.

On a GPU it is a model of 5 million parameters in bfloat16 under autocast, 32 x 1024 characters a
step, about a minute in all. On a CPU, where the module's eager reference takes the place of its
kernels, it is a tiny one.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from plots import INK, SAVED, STYLE
from torch import nn
from torch.nn import functional as F

from generated import causal_d64

HEAD_DIM = 64  # what the module was built for
SEEDS = (0, 1)
SMOOTHED = 20  # steps that a point of a drawn curve is the mean of

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by torch."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS: dict[str, Attention] = {"SDPA": sdpa, "flashgen": causal_d64.attention}


@dataclass(frozen=True)
class Size:
    """Of a model and its batches."""

    batch: int
    seq_len: int
    width: int
    depth: int
    characters: int  # of the text


SIZES = {
    "cuda": Size(batch=32, seq_len=1024, width=256, depth=6, characters=4_000_000),
    "cpu": Size(batch=4, seq_len=64, width=128, depth=2, characters=40_000),
}


# --- the text -------------------------------------------------------------------------------------

NAMES = ("ada", "ben", "cleo", "dan", "eve", "finn", "gus", "ida")
THINGS = ("apples", "books", "coins", "keys", "nuts", "stamps")


def story(rng: random.Random) -> str:
    """Two people who give each other things, and what they own in the end.

    Who reads on to the last numbers has to look back at all that happened.
    """
    people, thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    owned = {name: rng.randint(2, 9) for name in people}
    told = [f"{name} has {number} {thing}." for name, number in owned.items()]
    for _ in range(rng.randint(1, 5)):
        giver, taker = rng.sample(people, 2)
        if rng.random() < 0.3 or owned[giver] == 0:
            found = rng.randint(1, 4)
            owned[taker] += found
            told.append(f"{taker} finds {found} more.")
        else:
            given = rng.randint(1, owned[giver])
            owned[giver] -= given
            owned[taker] += given
            told.append(f"{giver} gives {taker} {given} of them.")
    end = " and ".join(f"{name} has {number}" for name, number in owned.items())
    return f"{' '.join(told)} now {end} {thing}.\n"


def make_text(characters: int) -> str:
    """Stories one after the other, the same every time."""
    rng, stories, length = random.Random(0), [], 0
    while length < characters:
        stories.append(story(rng))
        length += len(stories[-1])
    return "".join(stories)[:characters]


def batches(text: str, size: Size, device: str) -> Callable[[], torch.Tensor]:
    """What draws a batch, (batch, seq_len + 1) numbers of characters: those of any run alike."""
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([vocabulary[character] for character in text], device=device)
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(size.seq_len + 1)

    def draw() -> torch.Tensor:
        starts = torch.randint(len(text) - size.seq_len, (size.batch, 1), generator=generator)
        return numbers[(starts + window).to(device)]

    return draw


# --- the model ------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Multi-head attention by a function of q, k and v, each (batch, heads, seq, HEAD_DIM)."""

    def __init__(self, width: int, attention: Attention):
        super().__init__()
        self.attention = attention
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        batch, seq_len, width = x.shape
        qkv = self.to_qkv(x).view(batch, seq_len, 3, width // HEAD_DIM, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(batch, seq_len, width))


class Block(nn.Module):
    """A transformer block, normalised before attention and before the MLP."""

    def __init__(self, width: int, attention: Attention):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = SelfAttention(width, attention)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Embeddings of characters and positions, blocks, and a head that scores the next character."""

    def __init__(self, vocabulary: int, size: Size, attention: Attention):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.seq_len, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, attention) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """(batch, seq) numbers of characters to (batch, seq, vocabulary) scores of the next."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


# --- training -------------------------------------------------------------------------------------


def train(attention: Attention, seed: int, steps: int, text: str, device: str) -> list[float]:
    """Trains from the weights of a seed; the loss of every step."""
    size = SIZES[torch.device(device).type]
    torch.manual_seed(seed)
    model = GPT(len(set(text)), size, attention).to(device)
    draw = batches(text, size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    warm = max(1, steps // 20)

    def rate(step: int) -> float:
        """Up to 1 in a line, then down to 0.1 along a cosine."""
        cosine = math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))
        return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for _ in range(steps):
        characters = draw()
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            scores = model(characters[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), characters[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())  # read at the end: nothing waits for the GPU on the way
    return torch.stack(losses).tolist()


def difference(one: list[float], other: list[float]) -> list[float]:
    """How far two curves are apart at each step."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def differences(runs: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Step by step, between the attentions of each seed and between the seeds of each attention.

    Args:
        runs: the losses of each attention, a list for each seed.
    """
    by_seed = zip(*runs.values(), strict=True)
    between_attentions = [difference(*curves) for curves in by_seed]
    between_seeds = [difference(*curves) for curves in runs.values()]
    return {
        "between attentions": [sum(x) / len(x) for x in zip(*between_attentions, strict=True)],
        "between seeds": [sum(x) / len(x) for x in zip(*between_seeds, strict=True)],
    }


def smoothed(curve: list[float]) -> list[float]:
    """Each point the mean of itself and of those up to `SMOOTHED` steps before."""
    parts = [curve[max(0, step + 1 - SMOOTHED) : step + 1] for step in range(len(curve))]
    return [sum(part) / len(part) for part in parts]


def draw_losses(
    runs: dict[str, list[list[float]]], apart: dict[str, list[float]], title: str, path: Path
) -> None:
    """Losses of all runs above, differences below; the same bytes for the same losses."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = {"SDPA": "#3b82c4", "flashgen": "#e8590c"}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for name, curves in runs.items():
            for seed, curve in zip(SEEDS, curves, strict=True):
                line = "-" if seed == SEEDS[0] else ":"
                label = f"{name}, seed {seed}"
                above.plot(curve, line, color=colours[name], linewidth=1, label=label)
        for (name, curve), colour in zip(apart.items(), ("#e8590c", INK), strict=True):
            below.plot(smoothed(curve), color=colour, linewidth=1.2, label=name)
        above.set_ylabel("loss")
        below.set(xlabel="step", ylabel=f"difference, mean of {SMOOTHED} steps", yscale="log")
        for axes in (above, below):
            axes.legend(frameon=False)
            axes.grid(linewidth=0.5, alpha=0.4)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, **SAVED)


def main() -> None:
    """Four runs; what they lost, and how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("train_gpt"), help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: at least 1")
    kind = torch.device(options.device).type
    if kind not in SIZES:
        parser.error(f"--device: {options.device}; one of {', '.join(SIZES)}")
    gpu = torch.cuda.get_device_name(options.device) if kind == "cuda" else kind
    text = make_text(SIZES[kind].characters)
    runs: dict[str, list[list[float]]] = {name: [] for name in ATTENTIONS}
    for seed in SEEDS:
        for name, attention in ATTENTIONS.items():
            started = time.perf_counter()
            losses = train(attention, seed, options.steps, text, options.device)
            runs[name].append(losses)
            seconds = time.perf_counter() - started
            last = smoothed(losses)[-1]
            print(f"{name:9} seed {seed}  loss {losses[0]:.4f} to {last:.4f}  {seconds:5.1f} s")

    apart = differences(runs)
    means = {name: sum(curve) / len(curve) for name, curve in apart.items()}
    for name, value in means.items():
        print(f"mean difference {name}: {value:.5f}")
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        "gpu": gpu,
        "torch": torch.__version__,
        "steps": options.steps,
        "size": asdict(SIZES[kind]),
        "seeds": SEEDS,
        "mean difference": means,
        "losses": runs,
    }
    (options.out / "losses.json").write_text(json.dumps(results) + "\n")
    title = (
        f"A GPT of {SIZES[kind].depth} layers, trained with two attentions from two seeds, {gpu}"
    )
    draw_losses(runs, apart, title, options.out / "losses.svg")
    print(f"wrote {options.out / 'losses.json'} and {options.out / 'losses.svg'}")


if __name__ == "__main__":
    main()

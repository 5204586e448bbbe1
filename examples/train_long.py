"""Trains a small GPT on long sequences, each of them over all GPUs.

    PYTHONPATH=. torchrun --nproc-per-node 4 examples/train_long.py --out train_long
    PYTHONPATH=. python examples/train_long.py --plot train_long

Context parallel shares each sequence's positions among all ranks, and FSDP2 the parameters. Blocks
are compiled by torch.compile, and computed again in the backward pass. The attention in a block is
a plain module of q, k and v: parallelize_module applies `ContextParallelStyle` to it by its name.

Every number of ranks starts from the same weights and sees the same text, so that losses agree but
for rounding. A run writes them to OUT/ranks_N.json; --plot draws all runs of a folder as
losses.svg, which needs matplotlib.

On GPUs a step is one sequence of 131,072 characters, of a model of 4 layers and 8 million
parameters in bfloat16. On a CPU, where the module's eager reference takes the place of its kernels,
it is a tiny one, without torch.compile.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from plots import SAVED, STYLE
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from train_gpt import make_text

import flashgen
from flashgen import AttentionSpec, causal
from flashgen.distributed import ContextParallelStyle

WARM = 20  # steps until the learning rate is reached


@dataclass(frozen=True)
class Size:
    """Of a model and its sequences."""

    seq_len: int
    head_dim: int
    q_heads: int
    kv_heads: int
    depth: int
    characters: int  # of the text
    dtype: str  # of activations


SIZES = {
    "cuda": Size(131_072, 128, 4, 2, 4, 4_000_000, "bfloat16"),
    "cpu": Size(256, 16, 4, 2, 2, 40_000, "float32"),
}


def module_of(size: Size) -> ModuleType:
    """The module of causal attention, for parts of a sequence."""
    spec = AttentionSpec(size.head_dim, size.dtype, causal(), forms=("dense", "mesh"), name="long")
    return flashgen.compile(spec)


# --- the model ------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries or keys, (batch, heads, tokens, head_dim), turned by their tokens' positions."""
    half = x.shape[-1] // 2
    rates = 1e5 ** -(torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


class Attend(nn.Module):
    """Causal attention of q, k and v; the style gives it keys of all ranks."""

    def __init__(self, module: ModuleType):
        super().__init__()
        self.attention = module.attention

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(batch, heads, seq, head_dim) each; the output likewise."""
        return self.attention(q, k, v)


class Block(nn.Module):
    """A transformer block, normalised before attention and before the MLP."""

    def __init__(self, size: Size, module: ModuleType):
        super().__init__()
        self.size = size
        width = size.q_heads * size.head_dim
        self.norm_attention = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * size.kv_heads * size.head_dim, bias=False)
        self.attend = Attend(module)
        self.to_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same, of tokens at these positions."""
        batch, tokens, width = x.shape
        normed = self.norm_attention(x)
        q = self.to_q(normed).view(batch, tokens, -1, self.size.head_dim).transpose(1, 2)
        kv = self.to_kv(normed).view(batch, tokens, 2, -1, self.size.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4)
        out = self.attend(rotated(q, positions), rotated(k, positions), v)
        x = x + self.to_out(out.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Embeddings of characters, blocks, and a head that scores the next character."""

    def __init__(self, vocabulary: int, size: Size, module: ModuleType):
        super().__init__()
        width = size.q_heads * size.head_dim
        self.characters = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(size, module) for _ in range(size.depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, characters: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) numbers of characters to (batch, tokens, vocabulary) scores."""
        x = self.characters(characters)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def distributed(
    model: GPT, style: ContextParallelStyle, mesh: DeviceMesh, size: Size, backend: str
) -> None:
    """Puts a model on the ranks of a mesh: attention, then what is saved, compiled and sharded."""
    parallelize_module(model, mesh, {"blocks.*.attend": style})
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, size.dtype), reduce_dtype=torch.float32
    )
    for number, block in enumerate(model.blocks):
        if backend != "none":
            block.compile(backend=backend)
        model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(model.blocks[number], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# --- training -------------------------------------------------------------------------------------


def train(
    size: Size, steps: int, backend: str, device: torch.device
) -> Iterator[dict[str, list[float] | float]]:
    """Trains from the weights of seed 0.

    Yields, after each step, the losses so far, the seconds of steps, and the GiB of the rank with
    the most memory.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))
    module = module_of(size)
    style = ContextParallelStyle(module)
    text = make_text(size.characters)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    whole = torch.tensor([numbers[character] for character in text], device=device)
    torch.manual_seed(0)
    model = GPT(len(numbers), size, module).to(device)
    distributed(model, style, mesh, size, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    # Without it the first steps are too long, and what rounding does to losses grows.
    warming = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM))
    generator = torch.Generator().manual_seed(0)
    # All sequences have the same layout, since the mask depends on no data.
    attend = style.attend
    positions = attend.shard(torch.arange(size.seq_len, device=device), 0)
    losses, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        start = int(torch.randint(len(text) - size.seq_len, (), generator=generator))
        characters = whole[None, start : start + size.seq_len + 1]
        scores = model(attend.shard(characters[:, :-1], 1), positions)
        targets = attend.shard(characters[:, 1:], 1)
        total = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / size.seq_len
        optimizer.zero_grad()
        (loss * ranks).backward()  # FSDP takes the mean over ranks, where the loss is their sum
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warming.step()
        found = torch.zeros(2, device=device)
        found[0] = loss.detach()
        dist.all_reduce(found[:1])
        if device.type == "cuda":
            found[1] = torch.cuda.max_memory_allocated(device) / 2**30
            dist.all_reduce(found[1:], dist.ReduceOp.MAX)
        loss, memory = found.tolist()
        losses.append(loss)
        seconds.append(time.perf_counter() - began)
        yield {"losses": losses, "seconds": seconds, "GiB": round(memory, 2)}


def draw_losses(folder: Path) -> None:
    """The losses of all runs in a folder on one plot; the same bytes for the same losses."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = [json.loads(path.read_text()) for path in folder.glob("ranks_*.json")]
    runs.sort(key=lambda run: run["ranks"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        styles = zip(("-", "--", ":"), ("#3b82c4", "#e8590c", "#2f9e44"), strict=True)
        for run, (line, colour) in zip(runs, styles, strict=False):
            label = f"{run['ranks']} rank{'s' * (run['ranks'] > 1)}"
            axes.plot(run["losses"], line, color=colour, linewidth=1.5, label=label)
        first = runs[0]
        title = f"A GPT on sequences of {first['size']['seq_len']:,} characters, {first['gpu']}"
        axes.set(xlabel="step", ylabel="loss", title=title)
        axes.legend(frameon=False)
        axes.grid(linewidth=0.5, alpha=0.4)
        figure.savefig(folder / "losses.svg", **SAVED)


def main() -> None:
    """A run on the ranks that torchrun started, or a plot of those that were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seq-len", type=int, help="of a sequence, in characters")
    parser.add_argument("--out", type=Path, default=Path("train_long"), help="folder of results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="of torch.compile; none: without")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the runs in a folder")
    options = parser.parse_args()
    if options.plot is not None:
        draw_losses(options.plot)
        print(f"wrote {options.plot / 'losses.svg'}")
        return
    if options.steps < 1:
        parser.error("--steps: at least 1")
    if options.device not in SIZES:
        parser.error(f"--device: {options.device}; one of {', '.join(SIZES)}")
    if "RANK" not in os.environ:
        parser.error("run it by torchrun --nproc-per-node N")
    size = SIZES[options.device]
    if options.seq_len is not None:
        size = replace(size, seq_len=options.seq_len)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    backend = options.backend or ("inductor" if device.type == "cuda" else "none")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    path = options.out / f"ranks_{ranks}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    run = {
        "ranks": ranks,
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "size": asdict(size),
    }
    for step, found in enumerate(train(size, options.steps, backend, device), start=1):
        if rank == 0:
            seconds = found["seconds"][-1]
            told = (
                f"loss {found['losses'][-1]:.4f}  {seconds:7.3f} s  {found['GiB']:.2f} GiB a rank"
            )
            print(f"{ranks} ranks  step {step:4}  {told}", flush=True)
            path.write_text(json.dumps(run | found) + "\n")
    dist.barrier()  # a rank that ends before the others may break their connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

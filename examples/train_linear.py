"""Trains one small GPT with softmax attention and with linear attentions, and draws their losses.

    PYTHONPATH=. python examples/train_linear.py --out train_linear

Every attention starts from the same weights and sees the same batches: those of train_gpt.py. OUT
gets the losses as losses.json and their curves as losses.svg, which needs matplotlib. Modules are
built into flashgen's cache at first. On a CPU, where modules run their eager reference, the model
is a tiny one.

Another attention is another entry of `attentions`: a function of q, k and v.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from plots import SAVED, STYLE
from train_gpt import HEAD_DIM, SIZES, SMOOTHED, Attention, make_text, sdpa, smoothed, train

import flashgen
from flashgen import AttentionSpec, Tensor, causal, elu_plus_one, favor, linear, softmax_features

COLOURS = ("#3b82c4", "#e8590c", "#2f9e44", "#9c36b5", "#808488")


#: A logarithm for each key, of what the state before it is multiplied by.
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def module_of(
    name: str, feature_map: flashgen.FeatureMap, decay: Tensor | None = None
) -> ModuleType:
    """The module of causal linear attention with these features."""
    weights = linear(feature_map, decay=decay)
    return flashgen.compile(AttentionSpec(HEAD_DIM, mask=causal(), normaliser=weights, name=name))


def decays_of(k: torch.Tensor) -> torch.Tensor:
    """A decay near 1 for each key, by its first element: so the model learns what forgets."""
    return F.logsigmoid(k[..., 0].float() + 4.0)


def attentions(device: str) -> dict[str, Attention]:
    """Functions of q, k and v, each (batch, heads, seq, HEAD_DIM)."""
    performer = module_of("performer", favor(256))
    matrix = performer.draw_features(0, device)
    forgetful = module_of("forgetful", elu_plus_one(), DECAY)
    return {
        "softmax": sdpa,
        "elu + 1": module_of("elu", elu_plus_one()).attention,
        "elu + 1, decays": lambda q, k, v: forgetful.attention(q, k, v, decay=decays_of(k)),
        "softmax of features": module_of("features", softmax_features()).attention,
        "Performer": lambda q, k, v: performer.attention(q, k, v, matrix),
    }


def draw_losses(runs: dict[str, list[float]], title: str, path: Path) -> None:
    """The smoothed loss of each attention; the same bytes for the same losses."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for (name, losses), colour in zip(runs.items(), COLOURS, strict=False):
            axes.plot(smoothed(losses), color=colour, linewidth=1.2, label=name)
        axes.set(xlabel="step", ylabel=f"loss, mean of {SMOOTHED} steps", title=title)
        axes.legend(frameon=False)
        axes.grid(linewidth=0.5, alpha=0.4)
        figure.savefig(path, **SAVED)


def main() -> None:
    """A run with each attention; what each lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("train_linear"), help="folder of results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: at least 1")
    kind = torch.device(options.device).type
    if kind not in SIZES:
        parser.error(f"--device: {options.device}; one of {', '.join(SIZES)}")
    gpu = torch.cuda.get_device_name(options.device) if kind == "cuda" else kind
    options.out.mkdir(parents=True, exist_ok=True)
    text = make_text(SIZES[kind].characters)
    runs: dict[str, list[float]] = {}
    results = {
        "gpu": gpu,
        "torch": torch.__version__,
        "steps": options.steps,
        "size": asdict(SIZES[kind]),
        "losses": runs,
    }
    for name, attention in attentions(options.device).items():
        started = time.perf_counter()
        runs[name] = losses = train(attention, 0, options.steps, text, options.device)
        seconds = time.perf_counter() - started
        said = f"{name:21} loss {losses[0]:.4f} to {smoothed(losses)[-1]:.4f}  {seconds:5.1f} s"
        print(said, flush=True)
        # What an interrupted run has is kept.
        (options.out / "losses.json").write_text(json.dumps(results) + "\n")

    title = f"A GPT of {SIZES[kind].depth} layers, trained with each attention, {gpu}"
    draw_losses(runs, title, options.out / "losses.svg")
    print(f"wrote {options.out / 'losses.json'} and {options.out / 'losses.svg'}")


if __name__ == "__main__":
    main()

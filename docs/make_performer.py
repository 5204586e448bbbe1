"""Draws how near Performer's estimate of softmax attention is: docs/pictures/performer.svg.

    python -m docs.make_performer

It takes references of modules on the CPU, and needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

import torch

import flashgen
from flashgen import AttentionSpec, causal, favor, linear

PICTURE = Path(__file__).parent / "pictures" / "performer.svg"

FEATURES = (16, 32, 64, 128, 256)
HEAD_DIM, LENGTH, HEADS, SEEDS = 64, 256, 8, 16

#: Standard deviations of the elements of q and k, each with its colour. That of scores is the
#: square of them.
SIZES = {0.25: "#3b82c4", 0.5: "#2f9e44", 1.0: "#e8590c"}


def errors(size: float) -> list[float]:
    """The root of the mean squared error for each number of features, over that of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, HEADS, LENGTH, HEAD_DIM, generator=generator, dtype=torch.float64)
        for _ in range(3)
    )
    q, k = size * q, size * k
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = []
    for features in FEATURES:
        normaliser = linear(favor(features))
        module = flashgen.compile(
            AttentionSpec(
                HEAD_DIM, "float32", mask=causal(), normaliser=normaliser, targets=("sm_90",)
            )
        )
        squares = [
            (module.reference(q, k, v, module.draw_features(seed).double()) - right).square().mean()
            for seed in range(SEEDS)
        ]
        found.append((torch.stack(squares).mean() / right.square().mean()).sqrt().item())
    return found


def draw(curves: dict[float, list[float]], path: Path) -> None:
    """Errors over numbers of features; the same bytes for the same errors."""
    import matplotlib
    from matplotlib.figure import Figure

    ink = "#808488"  # seen well on white and on black
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "flashgen",
        "font.size": 9,
        **dict.fromkeys(("text.color", "xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), ink),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for size, found in curves.items():
            label = f"q and k of deviation {size}"
            axes.plot(FEATURES, found, "o-", color=SIZES[size], linewidth=1.2, label=label)
        first = next(iter(curves.values()))
        halved = [first[0] * (FEATURES[0] / n) ** 0.5 for n in FEATURES]
        axes.plot(FEATURES, halved, ":", color=ink, linewidth=1, label="1 / sqrt(features)")
        axes.set(xlabel="features", ylabel="error / output", xscale="log", yscale="log")
        axes.set_xticks(FEATURES, map(str, FEATURES))
        axes.minorticks_off()
        axes.legend(frameon=False)
        axes.grid(linewidth=0.5, alpha=0.4)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Writes the picture, and prints what it shows."""
    curves = {size: errors(size) for size in SIZES}
    for size, found in curves.items():
        print(size, *(f"{n}: {x:.3f}" for n, x in zip(FEATURES, found, strict=True)))
    draw(curves, PICTURE)


if __name__ == "__main__":
    main()

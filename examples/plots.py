"""How the plots of the examples look: on white and on black, the same bytes each time."""

from __future__ import annotations

from typing import Any

INK = "#808488"  # seen well on both

#: For `matplotlib.rc_context`.
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flashgen",
    "font.size": 9,
    **dict.fromkeys(("text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), INK),
}

#: For `savefig`.
SAVED: dict[str, Any] = {"transparent": True, "metadata": {"Date": None, "Creator": None}}

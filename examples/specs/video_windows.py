"""Video: causal over the frames, a neighbourhood within each; sizes are arguments of the call.

Position ``(t * height + y) * width + x`` is a patch of frame t. It sees the patches up to `radius`
away from its own place, in its own frame and in the `past` frames before it. The bounds follow the
frames; which rows and columns of a frame are near is left to the mask.

    out = video_windows.attention(q, k, v, height=16, width=16, past=3, radius=2)
"""

from flashgen import AttentionSpec, Int

height, width = Int("height", min=1), Int("width", min=1)
past, radius = Int("past", default=3), Int("radius", default=2)


def near(b, h, q_idx, kv_idx):
    row, kv_row = q_idx // width, kv_idx // width
    frames = row // height - kv_row // height
    down, across = row % height - kv_row % height, q_idx % width - kv_idx % width
    return (frames >= 0) & (frames <= past) & (abs(down) <= radius) & (abs(across) <= radius)


spec = AttentionSpec(head_dim=64, dtype="bfloat16", mask=near)

"""Functions as people give them to FlexAttention: what torch tests it with, and attention-gym has.

Each is written here anew, by what it computes. It captures tensors, numbers, other functions and
objects in the ways that such code does.
"""

# ruff: noqa: E731

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

BATCH, HEADS, LENGTH = 2, 4, 24

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """What a call of FlexAttention is given.

    Attributes:
        score_mod, mask_mod: its functions.
        q_len, kv_len: its lengths.
        learned: tensors that the functions capture, whose gradients are compared.
    """

    score_mod: Function | None = None
    mask_mod: Function | None = None
    q_len: int = LENGTH
    kv_len: int = LENGTH
    learned: tuple[torch.Tensor, ...] = ()


TORCH: dict[str, Callable[[], Case]] = {}
GYM: dict[str, Callable[[], Case]] = {}


def torchs(make: Callable[[], Case]) -> Callable[[], Case]:
    TORCH[make.__name__] = make
    return make


def gyms(make: Callable[[], Case]) -> Callable[[], Case]:
    GYM[make.__name__] = make
    return make


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def scores(**functions: Function) -> None:
    for name, function in functions.items():
        TORCH[name] = functools.partial(Case, function)


def masks(**functions: Function) -> None:
    for name, function in functions.items():
        TORCH[name] = functools.partial(Case, None, function)


def alibi(num_heads):
    def alibi_bias(score, b, h, q, kv):
        return score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / num_heads))

    return alibi_bias


def draw(*shape: int, learned: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).requires_grad_(learned)


# --- torch: functions that capture nothing --------------------------------------------------------

scores(
    identity=lambda score, b, h, q, kv: score,
    times_two=lambda score, b, h, q, kv: score * 2,
    squared=lambda score, b, h, q, kv: score * score,
    causal_score=lambda score, b, h, q, kv: torch.where(q >= kv, score, float("-inf")),
    inverse_causal=lambda score, b, h, q, kv: torch.where(q <= kv, score, float("-inf")),
    relative=lambda score, b, h, q, kv: score + (q - kv),
    relative_causal=lambda score, b, h, q, kv: torch.where(q >= kv, score + (q - kv), -math.inf),
    alibi=alibi(HEADS),
    trig=lambda score, b, h, q, kv: torch.sin(torch.cos(score)) + torch.tan(b),
    branching_trig=lambda score, b, h, q, kv: torch.cos(score) * torch.sin(score) + torch.tan(b),
    silu=lambda score, b, h, q, kv: F.silu(score),
    odd_keys_skipped=lambda score, b, h, q, kv: torch.where(kv % 2 == 0, score, float("-inf")),
    floor_division=lambda score, b, h, q, kv: score - q // (1 + kv),
    power=lambda score, b, h, q, kv: torch.pow(score, 2) / (1 + score.abs()),
    bidirectional_alibi=lambda score, b, h, q, kv: score - (q - kv).abs() * 0.125,
    by_parity=lambda score, b, h, q, kv: torch.where(
        (q + kv) % 2 == 0, score * 2.0, torch.where(q == kv, score, score * 0.5)
    ),
)
masks(
    causal=causal,
    inverse_causal_mask=lambda b, h, q, kv: q <= kv,
    everything=noop_mask,
    rows_of_nothing=lambda b, h, q, kv: q < LENGTH // 2,
    ends=lambda b, h, q, kv: (kv < 4) | (kv >= LENGTH - 4),
    batch_and_head=lambda b, h, q, kv: (q + b >= kv) & (kv % (h + 1) == 0),
    window=lambda b, h, q, kv: (q >= kv) & (q - kv <= 7),
    far=lambda b, h, q, kv: (q >= kv) & (q - kv > 7),
)


# --- torch: functions that capture ----------------------------------------------------------------


@torchs
def bias_of_head():
    bias = draw(HEADS, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[h], learned=(bias,))


@torchs
def factor_of_head():
    factor = draw(HEADS, learned=True)
    return Case(lambda score, b, h, q, kv: score * factor[h], learned=(factor,))


@torchs
def bias_of_sum():
    bias = draw(2 * LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[q + kv], learned=(bias,))


@torchs
def bias_of_pair():
    bias = draw(LENGTH, LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[q, kv], learned=(bias,))


@torchs
def bias_in_two_steps():
    bias = draw(LENGTH, LENGTH)  # vmap has no gradient of two steps
    return Case(lambda score, b, h, q, kv: score + bias[q][kv])


@torchs
def bias_transposed():
    bias = draw(LENGTH, LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[kv, q], learned=(bias,))


@torchs
def bias_of_head_transposed():
    bias = draw(HEADS, LENGTH, LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[h, kv, q], learned=(bias,))


@torchs
def bias_of_batch():
    bias = draw(BATCH, LENGTH, LENGTH)
    return Case(lambda score, b, h, q, kv: score + bias[b, q, kv])


@torchs
def bias_of_everything():
    bias = draw(BATCH, HEADS, LENGTH, LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[b, h, q, kv], learned=(bias,))


@torchs
def bias_of_half_precision():
    bias = draw(BATCH, LENGTH, LENGTH).half()
    return Case(lambda score, b, h, q, kv: score + bias[b, q, kv])


@torchs
def bias_of_double_precision():
    bias = draw(LENGTH).double()
    return Case(lambda score, b, h, q, kv: score + bias[kv])


@torchs
def bias_of_distance():
    bias = draw(2 * LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[(q - kv) + LENGTH], learned=(bias,))


@torchs
def bias_that_wraps():
    """A negative index counts from the end."""
    bias = draw(2 * LENGTH, learned=True)
    return Case(lambda score, b, h, q, kv: score + bias[q - kv], learned=(bias,))


@torchs
def index_multiple():
    bias = draw(BATCH, LENGTH)
    return Case(lambda score, b, h, q, kv: score + bias[b][q])


@torchs
def index_of_a_number():
    bias = draw(4, BATCH, HEADS, LENGTH)
    return Case(lambda score, b, h, q, kv: score + bias[0][b, h][q] + bias[-1, b, h, q])


@torchs
def index_of_a_captured_number():
    bias, which = draw(BATCH, HEADS, 4, LENGTH), torch.tensor(2)
    return Case(lambda score, b, h, q, kv: score + bias[b][h][which, q])


@torchs
def buffers_of_all_dimensions():
    of_token, of_batch, of_head = draw(LENGTH), draw(BATCH), draw(HEADS, learned=True)

    def every_bias(score, batch, head, token_q, token_kv):
        score = score + of_token[token_q]
        score = score + of_batch[batch]
        return score + of_head[head]

    return Case(every_bias, learned=(of_head,))


@torchs
def flags_of_positions():
    second = torch.arange(LENGTH) >= LENGTH // 2
    return Case(
        lambda score, b, h, q, kv: torch.where(second[q] == second[kv], score, float("-inf"))
    )


@torchs
def documents_as_a_score():
    ids = (torch.arange(LENGTH) // 7).int()

    def document_causal(score, b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        return torch.where((q_idx >= kv_idx) & same, score, -float("inf"))

    return Case(document_causal)


@torchs
def documents():
    ids = torch.arange(LENGTH) // 7  # int64, as arange has it
    return Case(None, lambda b, h, q, kv: ids[q] == ids[kv])


@torchs
def documents_of_each_sequence():
    ids = torch.stack([torch.arange(LENGTH) // 7, torch.arange(LENGTH) // 10]).int()
    return Case(None, lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv))


@torchs
def documents_out_of_order():
    ids = torch.arange(LENGTH).int() * 5 % 3
    return Case(None, lambda b, h, q, kv: ids[q] == ids[kv])


@torchs
def positions_within_documents():
    offsets = torch.tensor([0, 10, 17, LENGTH], dtype=torch.int32)
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    for at in range(3):
        ids[offsets[at] : offsets[at + 1]] = at

    def nested(inner):
        def score_mod(score, b, h, q, kv):
            return inner(score, b, h, q - offsets[ids[q]], kv - offsets[ids[kv]])

        return score_mod

    return Case(nested(lambda score, b, h, q, kv: torch.where(q >= kv, score, -math.inf)))


@torchs
def bidirectional_at_first():
    first = torch.tensor([3, 11], dtype=torch.int32)

    def score_mod(score, b, h, q, kv):
        both = (q <= first[b]) & (kv <= first[b])
        return torch.where(both | (q >= kv), score, -float("inf"))

    return Case(score_mod)


@torchs
def neighbours_in_a_picture():
    width = 6

    def place(at):
        return at / width, at % width

    def score_mod(score, b, h, q, kv):
        (q_x, q_y), (kv_x, kv_y) = place(q), place(kv)
        near = ((q_x - kv_x).abs() <= 1) | ((q_y - kv_y).abs() <= 1)
        return torch.where(near, score, float("-inf"))

    return Case(score_mod)


@torchs
def padding_by_length():
    length = torch.tensor([5, 19], dtype=torch.int32)
    return Case(None, lambda b, h, q, kv: (q >= kv) & (kv < length[b]))


@torchs
def a_scale():
    scale = torch.ones((), dtype=torch.int32)
    return Case(lambda score, b, h, q, kv: score + scale)


@torchs
def a_learned_scale():
    scale = torch.tensor(0.75, requires_grad=True)
    return Case(lambda score, b, h, q, kv: score * scale, learned=(scale,))


@torchs
def composed():
    first = lambda score, b, h, m, n: score + (m - n)
    second = lambda score, b, h, m, n: torch.where(m <= n, score, float("-inf"))
    return Case(lambda score, b, h, m, n: second(first(score, b, h, m, n), b, h, m, n))


@torchs
def masks_joined():
    near, first = (lambda b, h, q, kv: (q - kv) <= 5), (lambda b, h, q, kv: kv < 3)
    return Case(None, or_masks(and_masks(causal, near), first))


@torchs
def a_score_and_a_mask():
    slopes = draw(HEADS, learned=True)
    return Case(lambda score, b, h, q, kv: score + slopes[h] * (kv - q), causal, learned=(slopes,))


@torchs
def new_zeros_as_a_head():
    table = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[b, h.new_zeros(h.shape), q_idx, kv_idx]

    return Case(score_mod, lambda b, h, q, kv: table[b, h.new_zeros(h.shape), q, kv])


@torchs
def a_dense_mask():
    table = torch.rand(LENGTH, LENGTH) < 0.4
    return Case(None, lambda b, h, q, kv: table[q, kv])


@torchs
def distances_of_points():
    points, lengths = draw(LENGTH, 3), torch.logspace(0.001, 0.1, HEADS)

    def score_mod(score, b, h, q_idx, k_idx):
        distance = (points[q_idx] - points[k_idx]).pow(2).sum(-1).sqrt()
        return torch.exp(-distance / lengths[h]) * score

    return Case(score_mod)


@torchs
def a_bias_of_columns():
    rel_h, width = draw(BATCH, HEADS, LENGTH, 4), 6
    return Case(lambda score, b, h, q, kv: score + rel_h[b, h, q, kv // width])


@torchs
def more_queries_than_keys():
    return Case(None, causal, LENGTH, 10)


@torchs
def more_keys_than_queries():
    """q_idx counts from the first key, as in torch."""
    return Case(lambda score, b, h, q, kv: score + (q - kv), causal, 10, LENGTH)


@torchs
def one_query_at_an_offset():
    offset = torch.tensor(13)
    return Case(None, lambda b, h, q, kv: causal(b, h, q + offset, kv), 1, LENGTH)


@torchs
def one_query_at_an_offset_in_a_list():
    offset = torch.tensor([13])
    return Case(None, lambda b, h, q, kv: causal(b, h, q + offset[0], kv), 1, LENGTH)


@torchs
def a_paged_cache():
    pages = torch.stack([torch.randperm(LENGTH // 4) for _ in range(BATCH)]).int()
    length = torch.tensor([LENGTH, 9], dtype=torch.int32)

    def mask_mod(b, h, q_idx, physical):
        logical = pages[b, physical // 4] * 4 + physical % 4
        live = (logical >= 0) & (logical < length[b])
        return torch.where(live, causal(b, h, q_idx, logical), False)

    return Case(None, mask_mod)


@torchs
def a_paged_cache_of_whole_tiles():
    """All keys of a tile lie in one page; the second sequence has none."""
    pages = torch.tensor([[0], [-1]], dtype=torch.int32)

    def mask_mod(b, h, q_idx, physical):
        logical = pages[b, physical // 64] * 64 + physical % 64
        return torch.where(logical >= 0, causal(b, h, q_idx, logical), False)

    return Case(None, mask_mod)


@torchs
def a_table_with_minus_one():
    """-1, for no page, counts from the end as an index; the condition hides what it reads."""
    pages = torch.tensor([[0, 1, 2, -1, -1, -1], [2, 0, 1, 3, 4, 5]], dtype=torch.int32)
    lengths = draw(6)
    return Case(
        lambda score, b, h, q, kv: score + lengths[pages[b, kv // 4]],
        lambda b, h, q, kv: (pages[b, kv // 4] >= 0) | (kv < 2),
    )


@torchs
def a_module_with_parameters():
    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(HEADS))
            self.offset = 2

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.table[h] * (kv_idx - q_idx + self.offset)

    bias = Bias()
    return Case(bias.score_mod, learned=(bias.table,))


@torchs
def an_object_that_is_called():
    class Window:
        def __init__(self, width, table):
            self.width, self.table = width, table

        def __call__(self, b, h, q_idx, kv_idx):
            return (q_idx - kv_idx <= self.width) & self.table[kv_idx]

    return Case(None, Window(5, torch.arange(LENGTH) % 5 != 3))


@torchs
def a_partial():
    def score_mod(score, b, h, q_idx, kv_idx, *, slopes, cap):
        return cap * torch.tanh((score + slopes[h] * (kv_idx - q_idx)) / cap)

    slopes = draw(HEADS, learned=True)
    return Case(functools.partial(score_mod, slopes=slopes, cap=3.5), learned=(slopes,))


@torchs
def defaults():
    bias = draw(LENGTH, learned=True)

    def score_mod(score, b, h, q, kv, bias=bias, factor=0.5, *, more=2):
        return score + factor * bias[kv] * more

    return Case(score_mod, learned=(bias,))


GLOBAL_BIAS = torch.linspace(-1, 1, LENGTH)
GLOBAL_WINDOW = 6


@torchs
def globals_of_a_module():
    return Case(
        lambda score, b, h, q, kv: score + GLOBAL_BIAS[kv],
        lambda b, h, q, kv: (q >= kv) & (q - kv < GLOBAL_WINDOW),
    )


@torchs
def lists_and_dicts():
    held = {"slopes": [draw(HEADS), draw(HEADS, learned=True)], "by": SimpleNamespace(factor=0.5)}
    return Case(
        lambda score, b, h, q, kv: score + held["by"].factor * held["slopes"][1][h] * (q - kv),
        learned=(held["slopes"][1],),
    )


@torchs
def a_size_that_is_read():
    table = draw(HEADS, 9, learned=True)

    def score_mod(score, b, h, q, kv):
        return score + table[h, torch.clamp(q - kv, 0, table.shape[-1] - 1)]

    return Case(score_mod, learned=(table,))


@torchs
def a_tensor_that_is_made():
    slopes = draw(HEADS, learned=True)
    return Case(
        lambda score, b, h, q, kv: score - torch.exp(slopes)[h] * (q - kv).abs(), learned=(slopes,)
    )


@torchs
def a_short_row():
    chosen = torch.tensor([[0, 3], [1, 2], [5, 0]]).int()
    return Case(None, lambda b, h, q, kv: (chosen[q // 8] == kv // 4).any() | (kv == 0))


@torchs
def a_branch_on_a_number():
    bias, use = draw(LENGTH), True

    def score_mod(score, b, h, q, kv):
        if use:
            score = score + bias[kv]
        for _ in range(2):
            score = score * 0.75
        return score

    return Case(score_mod)


@torchs
def bits():
    packed = torch.randint(0, 256, (LENGTH, LENGTH // 8), dtype=torch.uint8)
    return Case(None, lambda b, h, q, kv: ((packed[q, kv // 8] >> (kv % 8)) & 1) == 1)


# --- attention-gym --------------------------------------------------------------------------------


def gym_mask(name: str, function: Function, q_len: int = LENGTH, kv_len: int = LENGTH) -> None:
    GYM[name] = functools.partial(Case, None, function, q_len, kv_len)


def windowed(width):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= width)


gym_mask("causal_mask", causal)
gym_mask("sliding_window", windowed(6))


def dilated(width, step):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= width) & (distance % step == 0)

    return mask


gym_mask("dilated_window", dilated(8, 2))


@gyms
def prefix():
    length = torch.tensor([4, 9], dtype=torch.int32)
    return Case(None, or_masks(lambda b, h, q, kv: kv < length[b], causal))


@gyms
def packed_documents():
    offsets = torch.cumsum(torch.tensor([0, 9, 4, 11]), -1).int()
    counts = offsets[1:] - offsets[:-1]
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), counts)

    def mask(b, h, q_idx, kv_idx):
        inner = causal(b, h, q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]])
        return (ids[q_idx] == ids[kv_idx]) & inner

    return Case(None, mask)


@gyms
def packed_documents_by_their_starts():
    offsets = torch.cumsum(torch.tensor([0, 9, 4, 11]), -1).int()
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), offsets.diff())
    return Case(None, lambda b, h, q, kv: (kv >= offsets[ids[q]]) & causal(b, h, q, kv))


@gyms
def pictures_in_text():
    spans = torch.tensor([[0, 14], [3, 14], [14, 24]], dtype=torch.int32)
    picture = torch.repeat_interleave(torch.arange(3), repeats=4)

    def mask(b, h, q_idx, kv_idx):
        span = spans[picture[kv_idx]]
        return (q_idx >= span[0]) & (q_idx < span[1])

    return Case(None, mask, LENGTH, 12)


@gyms
def global_tokens():
    is_global = torch.zeros(LENGTH, dtype=torch.bool)
    is_global[[0, 8]] = True
    near = lambda b, h, q, kv: (q - kv).abs() <= 3
    return Case(None, or_masks(near, lambda b, h, q, kv: is_global[q] | is_global[kv]))


@gyms
def a_tree_of_drafts():
    before, ancestors = 14, torch.eye(10, dtype=torch.bool)
    for node, parent in enumerate([0, 0, 1, 1, 2, 2, 3, 4, 5], start=1):
        ancestors[node] |= ancestors[parent]

    def mask(b, h, q_idx, kv_idx):
        node = (kv_idx - before).clamp(min=0, max=9)
        return (kv_idx < before) | ((kv_idx < before + 10) & ancestors[q_idx, node])

    return Case(None, mask, 10, LENGTH)


def neighbourhood(width, kernel):
    def place(at):
        return at // width, at % width

    def mask(b, h, q_idx, kv_idx):
        near = True
        for q_at, kv_at, most in zip(place(q_idx), place(kv_idx), (3, width - 1), strict=True):
            centre = q_at.clamp(kernel // 2, most - kernel // 2)
            near = near & ((centre - kv_at).abs() <= kernel // 2)
        return near

    return mask


gym_mask("neighbourhood_2d", neighbourhood(6, 3))


def in_tiles(inner, width=8, tile=4):
    def order(at):
        number, inside = at // (tile * tile), at % (tile * tile)
        row = number // (width // tile) * tile + inside // tile
        column = number % (width // tile) * tile + inside % tile
        return row * width + column

    return lambda b, h, q_idx, kv_idx: inner(b, h, order(q_idx), order(kv_idx))


def near_in_a_square(b, h, q_idx, kv_idx, width=8):
    rows = (q_idx // width - kv_idx // width).abs() <= 1
    return rows & ((q_idx % width - kv_idx % width).abs() <= 1)


gym_mask("neighbourhood_in_tiles", in_tiles(near_in_a_square), 64, 64)


def morton(b, h, q_idx, kv_idx):
    def place(code):
        bits = [((code >> at) & 1) for at in range(6)]
        return (
            bits[0] | (bits[2] << 1) | (bits[4] << 2), bits[1] | (bits[3] << 1) | (bits[5] << 2)
        )  # fmt: skip

    (q_x, q_y), (kv_x, kv_y) = place(q_idx), place(kv_idx)
    return ((q_x - kv_x).abs() <= 1) & ((q_y - kv_y).abs() <= 1)


gym_mask("neighbourhood_in_morton_order", morton, 64, 64)


def shared(before, length):
    def mask(b, h, q_idx, kv_idx):
        q_branch, kv_branch = (q_idx - before) // length, (kv_idx - before) // length
        same = (q_idx >= before) & (kv_idx >= before) & (q_branch == kv_branch)
        return causal(b, h, q_idx, kv_idx) & ((kv_idx < before) | same)

    return mask


gym_mask("a_shared_prefix", shared(6, 6))


def sliding_tiles(tiles_wide, kernel, tile):
    def mask(b, h, q_idx, kv_idx):
        q_tile, kv_tile = q_idx // tile, kv_idx // tile
        seen = True
        for part in (lambda at: at // tiles_wide, lambda at: at % tiles_wide):
            q_at, kv_at = part(q_tile), part(kv_tile)
            reach = kernel // 2
            centre = torch.clamp(q_at, reach, (tiles_wide - 1) - reach)
            seen = seen & (kv_at >= centre - reach) & (kv_at <= centre + reach)
        return seen

    return mask


gym_mask("sliding_tiles", sliding_tiles(4, 3, 4), 64, 64)


def spatial_heads(prompt, tokens, frames, width):
    rounded = math.floor(width * tokens / 4) * 4

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < prompt + tokens) | (q_idx < prompt) | (abs(q_idx - kv_idx) < rounded)

    return mask


def temporal_heads(prompt, tokens, frames, width):
    reach = (width * tokens) // frames

    def mask(b, h, q_idx, kv_idx):
        q_token, kv_token = (q_idx - prompt) % tokens, (kv_idx - prompt) % tokens
        return (kv_idx < prompt) | (q_idx < prompt) | (torch.abs(q_token - kv_token) < reach)

    return mask


gym_mask("video_spatial", spatial_heads(4, 5, 4, 2))
gym_mask("video_temporal", temporal_heads(4, 5, 4, 3))


def batched(inner, size):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx // size == kv_idx // size) & inner(b, h, q_idx % size, kv_idx % size)

    return mask


gym_mask("batches_in_one_sequence", batched(causal, 6))


def block_diffusion(length, block):
    def mask(b, h, q_idx, kv_idx):
        q_noised, kv_noised = q_idx < length, kv_idx < length
        q_block, kv_block = (q_idx % length) // block, (kv_idx % length) // block
        own = (q_block == kv_block) & (q_noised == kv_noised)
        before = (q_block > kv_block) & q_noised & ~kv_noised
        return own | before | ((q_block >= kv_block) & ~q_noised & ~kv_noised)

    return mask


gym_mask("block_diffusion", block_diffusion(12, 4))


@gyms
def chosen_blocks():
    table = torch.rand(HEADS, LENGTH // 4, LENGTH // 8) < 0.5
    return Case(None, lambda b, h, q, kv: table[h, q // 4, kv // 8])


@gyms
def alibi_bias():
    return Case(alibi(HEADS), causal)


@gyms
def soft_cap():
    cap = 20
    return Case(lambda score, b, h, q, kv: cap * torch.tanh(score / cap))


def activated(function, offset=1.0):
    return lambda score, b, h, q, kv: torch.log(function(score) + offset)


GYM["activation_gelu"] = functools.partial(Case, activated(F.gelu))
GYM["activation_relu"] = functools.partial(Case, activated(F.relu))
GYM["activation_sigmoid"] = functools.partial(Case, activated(torch.sigmoid))


@gyms
def sandwich():
    frequencies = 1.0 / 10000 ** (torch.arange(8) / 8)
    distances = torch.arange(2 * LENGTH) - (LENGTH - 1)
    table = torch.cos(distances.abs()[:, None] * frequencies).sum(-1)
    offset, factors = LENGTH - 1, HEADS / (8.0 * torch.arange(1, HEADS + 1))
    return Case(lambda score, b, h, q, kv: score + table[q - kv + offset] * factors[h], causal)


@gyms
def graphormer():
    bias = draw(HEADS, 5, learned=True)
    distances = torch.randint(0, 5, (BATCH, LENGTH, LENGTH), dtype=torch.int32)
    return Case(lambda score, b, h, q, kv: score + bias[h, distances[b, q, kv]], learned=(bias,))


@gyms
def rope_of_latent_attention():
    query, key, scale = draw(BATCH, HEADS, LENGTH, 8), draw(BATCH, 1, LENGTH, 8), 0.5

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + scale * torch.dot(query[b, h, q_idx], key[b, h // HEADS, kv_idx])

    return Case(score_mod)


CASES = {**TORCH, **{f"gym_{name}": make for name, make in GYM.items()}}

#: One of each kind, for kernels.
KINDS = (
    "relative_causal",
    "bias_of_head",
    "bias_that_wraps",
    "bias_of_everything",
    "a_learned_scale",
    "documents_of_each_sequence",
    "positions_within_documents",
    "a_paged_cache",
    "a_paged_cache_of_whole_tiles",
    "one_query_at_an_offset",
    "more_keys_than_queries",
    "gym_pictures_in_text",
    "gym_graphormer",
)

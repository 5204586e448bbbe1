"""Greedy decoding with trees of drafted tokens, whose tokens are those without drafts.

    python examples/drafts.py

Each step verifies a tree: its first token is the last one of the text, and each further token is a
guess at what follows the token before it. All keys of the tree are appended; the mask of `tree`
lets a token see the text and the tokens that it descends from. The longest path of right guesses
stays: its keys are moved together, and the other ones lie behind the end. `verify` waits for
nothing on the device.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from serving.model import GPT, Attend, Size, generate_densely

import flashgen
from flashgen import AttentionSpec, tree

SPEC = AttentionSpec(16, "float32", mask=tree(), forms=("dense", "cache"), name="drafts")
SIZE = Size(vocabulary=16, max_len=256, depth=2, heads=4, kv_heads=2, head_dim=16)
PAGE_SIZE = 16

#: A tree of 1 + 2 + 4 tokens: two guesses after each.
PARENTS = (-1, 0, 0, 1, 1, 2, 2)


Caches = list[tuple[torch.Tensor, torch.Tensor]]


def attention_to(
    module: ModuleType,
    caches: Caches,
    block_table: torch.Tensor,
    lens: torch.Tensor,
    ancestors: torch.Tensor,
) -> Attend:
    """Attention of (batch, n) new tokens, flat, to the text and to their ancestors."""
    shape = ancestors.shape[:2]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, shape) for x in (q, k, v))
        module.append(k, v, *caches[layer], lens, block_table)
        out = module.cache_attention(
            q, *caches[layer], lens, block_table=block_table, ancestors=ancestors
        )
        return out.flatten(0, 1)

    return attend


def verify(
    model: GPT,
    module: ModuleType,
    caches: Caches,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of each sequence: how many tokens of a tree are right, and what follows them.

    Args:
        model: the model that would generate without drafts.
        module: a module of `tree()` with the form "cache".
        caches: pages of keys and of values of each layer; they get those of the tree.
        block_table: the pages of each sequence, with room for the tree.
        kv_lens: (batch,) int32, the keys before the tree; they grow by those that stay.
        tokens: (batch, n) the trees, the last token of each text first.
        parents: (batch, n) int32, as of `tree_ancestors`.

    Returns:
        The length of each sequence's longest right path, (batch,), at least 1; and (batch, n), of
        which the first tokens, as many, are those that follow each token of the path.
    """
    ancestors = module.tree_ancestors(parents)
    depth = ancestors.sum(-1)
    attend = attention_to(module, caches, block_table, kv_lens + tokens.shape[1], ancestors)
    positions = kv_lens[:, None] + depth - 1
    scores = model(tokens.flatten(), positions.flatten(), attend)
    following = scores.argmax(-1).view(tokens.shape)
    # A path is right if each of its tokens is what the model says after the one before it.
    guessed = following.gather(1, parents.clamp_min(0).long()) == tokens
    right = ((guessed | (parents < 0))[:, None] | ~ancestors).all(-1)
    best = torch.where(right, depth, 0).argmax(-1)
    on_path = ancestors.gather(1, best[:, None, None].expand(-1, 1, tokens.shape[1]))[:, 0]
    length = on_path.sum(-1)
    # The keys of the path move to where the text ends, those of other tokens behind them.
    order = torch.argsort(~on_path, dim=-1, stable=True)
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    size = caches[0][0].shape[1]
    here, there = (
        (block_table.long().gather(1, at // size), at % size)
        for at in (kv_lens[:, None] + order, kv_lens[:, None] + offsets)
    )
    for cache in (cache for pair in caches for cache in pair):
        cache[there] = cache[here]
    kv_lens += length.int()
    return length, following.gather(1, order)


@torch.no_grad()
def generate(
    model: GPT,
    module: ModuleType,
    prompts: list[list[int]],
    new: int,
    draft: Callable[[list[int]], list[int]],
    parents: Sequence[int] = PARENTS,
) -> tuple[list[list[int]], int]:
    """The greedy tokens after each prompt, and the number of steps that it took.

    Args:
        model: what generates.
        module: of `tree()`.
        prompts: of one length.
        new: how many tokens to generate at least.
        draft: the guesses for a text: a token for each of `parents` but the first.
        parents: the tree of a step.
    """
    like, size, batch = model.head.weight, model.size, len(prompts)
    pages = -(-size.max_len // PAGE_SIZE)
    shape = (batch * pages, PAGE_SIZE, size.kv_heads, size.head_dim)
    caches = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(size.depth)]
    table = torch.randperm(batch * pages).view(batch, pages).int().to(like.device)
    # The prompts but for their last tokens, each of which follows from all before it.
    known = torch.tensor(prompts, device=like.device)[:, :-1]
    kv_lens = torch.full((batch,), known.shape[1], dtype=torch.int32, device=like.device)
    positions = torch.arange(known.shape[1], device=like.device)
    chain = (positions[:, None] >= positions).expand(batch, -1, -1)
    attend = attention_to(module, caches, table, kv_lens, chain)
    model(known.flatten(), positions.repeat(batch), attend, slice(0, 0))

    of_trees = torch.tensor(parents, dtype=torch.int32, device=like.device).expand(batch, -1)
    texts, steps = [list(prompt) for prompt in prompts], 0
    while min(map(len, texts)) < len(prompts[0]) + new:
        trees = torch.tensor([[text[-1], *draft(text)] for text in texts], device=like.device)
        length, following = verify(model, module, caches, table, kv_lens, trees, of_trees)
        for text, count, tokens in zip(texts, length.tolist(), following.tolist(), strict=True):
            text += tokens[:count]
        steps += 1
    return [text[len(prompts[0]) :][:new] for text in texts], steps


def main() -> None:
    """Generates with drafts of which some are right, and compares with dense recomputation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--new", type=int, default=40, help="tokens to generate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if not 1 <= options.new <= SIZE.max_len - 2 * PAGE_SIZE:
        parser.error(f"--new: 1 to {SIZE.max_len - 2 * PAGE_SIZE}")
    torch.manual_seed(0)
    rng = random.Random(0)
    with torch.device(options.device):
        model = GPT(SIZE)
    prompts = [rng.choices(range(SIZE.vocabulary), k=10) for _ in range(3)]
    right = [generate_densely(model, prompt, options.new) for prompt in prompts]
    texts = [prompt + tokens for prompt, tokens in zip(prompts, right, strict=True)]

    def draft(text: list[int]) -> list[int]:
        """Two guesses after each token, one of which is mostly right: a stand-in for a model."""
        whole = next(whole for whole in texts if whole[: len(text)] == text[: len(whole)])
        guesses = []
        for token, parent in enumerate(PARENTS[1:], 1):
            depth = 1 + (parent > 0)
            place = len(text) + depth - 1
            is_right = token % 2 == 1 and place < len(whole) and rng.random() < 0.8
            guesses.append(whole[place] if is_right else rng.randrange(SIZE.vocabulary))
        return guesses

    tokens, steps = generate(model, flashgen.compile(SPEC), prompts, options.new, draft)
    print(f"{options.new} tokens of {len(prompts)} texts in {steps} steps")
    if tokens != right:
        sys.exit("some tokens are not those of dense recomputation")
    print("all are those of dense recomputation")


if __name__ == "__main__":
    main()

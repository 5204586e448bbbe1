"""Linear attention in all its variants, at head_dim 64 and 128: the table of benchmarks.linear."""

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    elu_plus_one,
    exp2,
    favor,
    identity,
    linear,
    log,
)


def retention(h):
    """The decay of a head of RetNet."""
    return log(1.0 - exp2(-5.0 - h))


def normaliser_of(variant, head_dim):
    """A variant's way from products to weights."""
    if variant == "elu":
        return linear(elu_plus_one())
    if variant == "favor":
        return linear(favor(256))
    of_keys = ("batch", "num_kv_heads", "kv_len")
    decay = {
        "plain": None,
        "retention": retention,
        "token": Tensor("decay", of_keys),
        "gla": Tensor("decay", (*of_keys, head_dim)),
    }[variant]
    return linear(identity(), decay=decay, normalise=False)


specs = [
    AttentionSpec(
        head_dim=head_dim,
        dtype="bfloat16",
        mask=causal(),
        normaliser=normaliser_of(variant, head_dim),
        targets=("sm_90",),
        name=f"linear_{variant}_d{head_dim}",
    )
    for head_dim in (64, 128)
    for variant in ("plain", "elu", "retention", "token", "gla", "favor")
]

"""Linear attention with elu(x) + 1: Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236."""

from flashgen import AttentionSpec, causal, elu_plus_one, linear

spec = AttentionSpec(head_dim=128, mask=causal(), normaliser=linear(elu_plus_one()))

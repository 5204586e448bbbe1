"""SIZES: what lengths, heads and the batch are called by, of the call's q and k."""

SIZES = {
    "batch": "q.shape[0]",
    "num_q_heads": "q.shape[1]",
    "num_kv_heads": "k.shape[1]",
    "q_len": "q.shape[2]",
    "kv_len": "k.shape[2]",
}

"""Optimizers on shards: how they step, which of them need whole tensors, norms and clipping."""

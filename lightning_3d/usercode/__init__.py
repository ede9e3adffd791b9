"""The user's hooks, callbacks and optimizers where weights are sharded."""

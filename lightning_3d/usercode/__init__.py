"""The user's hooks, callbacks and optimizers beside sharded weights."""

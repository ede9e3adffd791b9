"""The order of samples, and the place of a run in its epoch."""

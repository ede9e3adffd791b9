"""Runs the user's code with its effects recorded or undone: trials, and the microbatches of a pipeline."""

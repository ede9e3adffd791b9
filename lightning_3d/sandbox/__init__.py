"""Runs the user's code so that its effects are recorded or undone: trials, and the microbatches of a pipeline."""

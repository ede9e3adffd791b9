"""The module itself: its parts, its state, its buffers and metrics."""

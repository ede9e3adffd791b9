"""Activations that backward keeps of the forward: recompute it block by block, and count its bytes."""

"""Experts over data ranks, on an unchanged module: each rank owns some experts, and tokens travel to them and back.

The router and all else stay on the rank of the token. Files in the order of reading:

- plan: `expert_plan` (the modules that are divided), `prove_experts` (the comparison with the undivided module)
- run: `expert_exchange` (of tokens or experts), `expert_forward` (the layer on an experts module, and `apply_experts`)
"""

"""Long sequences on an unchanged module: inside of its blocks each context rank has a part of the sequence.

The batch stays whole on every context rank, and so do labels, positions and masks around the blocks. The hidden states
are divided where the first block begins, and gathered where other code reads them. Tokens meet in attention alone,
where ranks exchange heads, or gather keys and values. Files in the order of reading:

- plan: `cut_plan` (what is cut), `find_cuts` (which arguments of a block are, by trial), `prove_cut`
- run: `cut_block`, `cut_attention`, `eager_private` (attention of transformers); `compared_block` checks a first step
"""

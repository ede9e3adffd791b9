"""A GPT on sequences of 8,192 bytes, one in a batch. Module and data are those of other examples.

One device:                         python examples/long_context.py
A part of the sequence on each:     python examples/long_context.py --strategy 3d --context 4 --devices 4
"""

from functools import partial

from common import run
from gpt_from_scratch import StandardLibrary
from nanogpt import NanoGPT

LENGTH = 8192

if __name__ == "__main__":
    run(partial(NanoGPT, context=LENGTH), partial(StandardLibrary, batch_size=1, context=LENGTH), __doc__)

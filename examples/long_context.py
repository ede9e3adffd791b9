"""A GPT on a sequence of 4,096 bytes whose activations one small process cannot hold, and four can.

`ulimit -v` limits the memory of a process as a small host would. The C library reserves some for each thread, unless
MALLOC_ARENA_MAX is 1. Module and data are those of other examples. One process ends for want of memory, four train:

    export MALLOC_ARENA_MAX=1
    (ulimit -v 2000000; python examples/long_context.py --steps 3)
    (ulimit -v 2000000; python examples/long_context.py --steps 3 --strategy 3d --context 4 --devices 4)
"""

from functools import partial

from common import run
from gpt_from_scratch import StandardLibrary
from nanogpt import NanoGPT

LENGTH = 4096

if __name__ == "__main__":
    data = partial(StandardLibrary, batch_size=1, context=LENGTH)
    run(partial(NanoGPT, context=LENGTH, width=256, layers=16), data, __doc__)

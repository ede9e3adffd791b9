"""Mechanisms of a steady step, each with its reason. A new one needs a line here.

A mechanism is a file of ours that torch, Lightning or the user's module calls in a training step by another way than
the methods of a Lightning strategy: a hook, a patched method, a stand-in for a tensor, an autograd function, a context.
"""

import sys
from pathlib import Path

from lightning.pytorch import Callback

import lightning_3d
from tests.parity import make_trainer
from tests.workers import run
from tests.zoo import MODULES

PACKAGE = Path(lightning_3d.__file__).parent
INTERFACE = ("layout.py", "precision.py", "strategy")
"""Called as the methods of a Lightning strategy and its precision plugin."""

EVERY_STEP = {
    "axes/parameters.py": "notes the full tensors that states give to a step",
    "errors.py": "explains torch's errors about shards",
    "module/undo.py": "puts back what a context replaces: groups of an optimizer, metrics behind a microbatch",
    "optim/stand_ins.py": "gives optimizers local shards in place of DTensors",
    "optim/step.py": "refuses parameters that an optimizer gets during training",
    "optim/sharded_steps.py": "steps optimizers on shards, and Adam on the host by the fused kernel",
    "ranks/random_streams.py": "draws from the stream of this data rank",
    "usercode/hooks.py": "lets the user's hooks read and write shards",
}
ZERO_1 = EVERY_STEP | {
    "module/forward.py": "calls our layers around a forward: here a loss computes large logits in parts",
    "zero/fsdp_seam.py": "puts our collectives under FSDP2, and sends without a copy into one buffer",
    "zero/fsdp_unit_private.py": "reduces zeros for gradients that this rank lacks",
    "zero/sharded.py": "gathers weights that are used outside of their block, ends backward with the reduction",
    "zero/changed_weights.py": "refuses a step that writes to gathered weights",
}
TENSOR_AND_PIPELINE = EVERY_STEP | {
    "pipeline/gates.py": "runs each block on its own stage",
    "pipeline/traced_tensor.py": "stands for values of other stages",
    "ranks/rank_zero.py": "makes the last stage rank zero for the user's step",
    "sandbox/log_recorder.py": "records what the step logs for each microbatch, updates of metrics, and calls of loggers",
    "sandbox/snapshot.py": "keeps changes of attributes and buffers of one microbatch from the others",
    "tensor/autograd_collectives.py": "sends between tensor ranks in forward and backward",
    "tensor/block_forward.py": "runs a block in shards",
    "module/forward.py": "calls our layers around a forward: here a module of such a block runs on local shards",
    "tensor/recompute.py": "repeats a checkpointed forward in the same state",
}


class Entries(Callback):
    """Notes the files of the package that code of others calls in one step."""

    def __init__(self):
        self.files = set()

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == 7:  # the third of its epoch: peers compare nothing before it
            sys.setprofile(self._note)

    def on_train_batch_end(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        own = Path(frame.f_code.co_filename)
        caller = frame.f_back and Path(frame.f_back.f_code.co_filename)
        entered = event == "call" and not frame.f_code.co_name.startswith("<")  # a generator goes on anywhere
        if entered and PACKAGE in own.parents and (caller is None or PACKAGE not in caller.parents):
            self.files.add(str(own.relative_to(PACKAGE)))


def _fit(strategy, world):
    entries = Entries()
    make_trainer(world, strategy, quiet=True, max_steps=8, max_epochs=100, callbacks=[entries]).fit(MODULES["GPT"]())
    return {file for file in entries.files if not file.startswith(INTERFACE)}


def test_zero_1_has_these():
    assert run(_fit, {"zero_stage": 1}, 2, world=2, fresh=True)[0] == ZERO_1.keys()
    assert len(ZERO_1) <= 13


def test_tensor_and_pipeline_have_these():
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert run(_fit, strategy, 4, world=4, fresh=True)[0] == TENSOR_AND_PIPELINE.keys()
    assert len(TENSOR_AND_PIPELINE) <= 21

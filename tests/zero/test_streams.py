"""The code for devices with streams, on CPUs: without a thread, by the library's collectives, prefetched."""

import pytest

from lightning_3d import Strategy3D
from lightning_3d.zero.fsdp_seam import FullySharded
from tests.parity import assert_same, long, make_trainer, reference, train
from tests.workers import run
from tests.zoo import MODULES


def streamed(function, *args):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Strategy3D, "_streams", True)
        return function(*args)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"zero_stage": 0}),
        long(2, {"zero_stage": 1}),
        long(2, {"zero_stage": 2}),
        (2, {"zero_stage": 3}),
        long(4, {"zero_stage": 3, "zero_shard_size": 2}),
    ],
    ids=["zero0", "zero1", "zero2", "zero3", "hybrid"],
)
def test_it_trains_as_on_one_device(world, strategy):
    attributes = {"optimizer": "plain_sgd"}
    flags = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    wanted = reference("GPT", attributes, flags)
    assert_same(run(streamed, train, "GPT", world, strategy, attributes, flags, world=world), wanted, 1e-4)


def _warned(grad_sync):
    trainer = make_trainer(1, {"zero_stage": 0, "grad_sync": grad_sync}, max_steps=1)
    module = MODULES["GPT"]()
    with pytest.warns(UserWarning, match='grad_sync="auto" uses the collectives of NCCL') as warned:
        trainer.fit(module)
    return len([each for each in warned if "hop by hop" in str(each.message)])


def test_a_ring_on_devices_is_warned_of():
    assert run(streamed, _warned, "ring", world=1) == [1]


def _events():
    """Gathers and calls of blocks in the forward of the third step."""
    module, events = MODULES["GPT"](), []
    names = {block: f"{at}" for at, block in enumerate(module.blocks)}
    for block in module.blocks:
        block.register_forward_pre_hook(lambda block, _: events.append(("call", names[block])))
    gather = FullySharded.gather

    def noted(seam, output, input, group, module):
        if module in names:
            events.append(("gather", names[module]))
        return gather(seam, output, input, group, module)

    steps = []
    module.on_train_batch_start = lambda *_: events.clear()
    module.on_before_backward = lambda *_: steps.append(list(events))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FullySharded, "gather", noted)
        make_trainer(2, {"zero_stage": 3}, quiet=True, max_steps=3).fit(module)
    return steps


def test_the_next_block_is_gathered_before_a_block_computes():
    for steps in run(streamed, _events, world=2):
        blocks = [name for kind, name in steps[2] if kind == "call"]
        assert len(blocks) > 1
        wanted = [("gather", blocks[0])]
        for at, name in enumerate(blocks):
            wanted += [*(("gather", later) for later in blocks[at + 1 : at + 2]), ("call", name)]
        assert steps[2] == wanted
        assert steps[0] != wanted  # the order is known after the first step

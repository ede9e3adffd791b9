"""The listed families in a Trainer: twenty steps on tensor ranks, also with ZeRO beside them, against one device.

Every family with every layout and optimizer is marked long; the few that are not have each layout and each family.
"""

import itertools

import pytest

from tests.parity import assert_parity

FAMILIES = ("Perceptron", "NanoGPT", "Packed", "TorchEncoder", "Llama", "GPT2", "T5", "Bart", "ViT", "Bert")
LAYOUTS = (
    *({"tensor_parallel_size": size} for size in (2, 3, 4)),
    *({"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": stage} for stage in (0, 1, 2, 3)),
    {"tensor_parallel_size": 2, "sequence_parallel": True},  # in unequal parts
)
QUICK = {(family, index % len(LAYOUTS), ("sgd", "adamw")[index % 2]) for index, family in enumerate(FAMILIES)}


def cases():
    for family, layout, optimizer in itertools.product(FAMILIES, range(len(LAYOUTS)), ("sgd", "adamw")):
        marks = [] if (family, layout, optimizer) in QUICK else [pytest.mark.long]
        name = "-".join([family, *(f"{key.split('_')[0]}{value}" for key, value in LAYOUTS[layout].items()), optimizer])
        yield pytest.param(family, LAYOUTS[layout], optimizer, marks=marks, id=name)


def test_the_quick_ones_have_every_family_layout_and_optimizer():
    for values, wanted in zip(zip(*QUICK, strict=True), (FAMILIES, range(len(LAYOUTS)), ("sgd", "adamw")), strict=True):
        assert set(values) == set(wanted)


@pytest.mark.filterwarnings("ignore:These stay unsplit")
@pytest.mark.parametrize(("family", "layout", "optimizer"), list(cases()))
def test_twenty_steps_are_those_of_one_device(family, layout, optimizer):
    world = layout["tensor_parallel_size"] * layout.get("data_parallel_size", 1)
    assert_parity(
        f"tests.tensor.trained:{family}",
        world,
        {"data_parallel_size": 1, "quiet": True, **layout},
        attributes={"optimizer": optimizer},
        trainer={"max_epochs": 4},
        steps=20,
        timeout=300,
    )

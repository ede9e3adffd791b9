"""Adapters of peft, as docs/huggingface.md builds them, train in every layout as on one device."""

import re
import warnings

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from tests.docs.pages import ROOT
from tests.parity import QUIET
from tests.workers import run

pytest.importorskip("peft", reason="needs peft")
LAYOUTS = [
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2, "num_microbatches": 2},
]


def module():
    """The class of the page."""
    page = (ROOT / "docs" / "huggingface.md").read_text()
    (code,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "get_peft_model" in text]
    names = {}
    exec(code.partition("\ntrainer = ")[0], names)
    seed_everything(3, verbose=False)
    return names["Adapted"]()


class Rows:
    """Four batches of eight samples. A data rank takes its share of each."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        ids = torch.randint(3, 250, (8, 12), generator=torch.Generator().manual_seed(index))
        ids = ids.tensor_split(self.ranks)[self.rank]
        return {"input_ids": ids, "labels": ids}


def trained(strategy, world, folder):
    warnings.simplefilter("ignore")
    made = module()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    chosen = "auto" if strategy is None else Strategy3D(**strategy, quiet=True, timeout=60)
    trainer = Trainer(**QUIET, devices=world, strategy=chosen, max_epochs=2, gradient_clip_val=0.1)
    wanted = trainer.strategy.distributed_sampler_kwargs if world > 1 else {"rank": 0, "num_replicas": 1}
    trainer.fit(made, DataLoader(Rows(wanted["rank"], wanted["num_replicas"]), batch_size=None))
    after = dict(made.state_dict())
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    if trainer.global_rank == 0:
        made.model.save_pretrained(folder)
    return changed, after


@pytest.mark.long
@pytest.mark.parametrize("strategy", LAYOUTS, ids=str)
def test_adapters_train_as_on_one_device(strategy, tmp_path):
    ((changed, wanted),) = run(trained, None, 1, str(tmp_path / "one"), world=1, timeout=120)
    assert changed
    assert all("lora_" in name for name in changed)
    for mine, weights in run(trained, strategy, 2, str(tmp_path / "two"), world=2, timeout=180):
        assert mine == changed
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "two" / "adapter_config.json").exists()

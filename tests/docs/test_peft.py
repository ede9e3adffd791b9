"""Adapters of peft, as docs/huggingface.md builds them, train in every layout as on one device."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.checkpoint.full_files import consolidate, export
from lightning_3d.errors import CheckpointError
from lightning_3d.tools.planner.profile_module import count_module
from tests.docs.pages import ROOT
from tests.parity import QUIET
from tests.workers import run

peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers 5, about peft
LAYOUTS = {
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "tensor and zero 3": {"tensor_parallel_size": 2, "zero_stage": 3},
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "prompt": {"num_virtual_tokens": 4},
}


def module(kind="lora"):
    """The class of the page."""
    page = (ROOT / "docs" / "huggingface.md").read_text()
    (code,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "get_peft_model" in text]
    names = {}
    exec(code.partition("\ntrainer = ")[0], names)
    given = {"task_type": "CAUSAL_LM", **KINDS[kind]}
    other = {"ia3": lambda **_: peft.IA3Config(**given), "prompt": lambda **_: peft.PromptTuningConfig(**given)}
    original = names["LoraConfig"]
    names["LoraConfig"] = other.get(kind, lambda **written: original(**{**written, **given}))
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


class Frozen(Callback):
    """Frozen weights never have a gradient or a state, and the others have one."""

    def on_before_zero_grad(self, trainer, module, optimizer):
        assert not [name for name, p in module.named_parameters() if not p.requires_grad and p.grad is not None]
        assert all(p.requires_grad for p in optimizer.state)


def trained(kind, strategy, world, epochs, resume=None, save=None):
    warnings.simplefilter("ignore")
    made = module(kind)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    chosen = "auto" if strategy is None else Strategy3D(**strategy, checkpoint_format="sharded", quiet=True, timeout=60)
    flags = {**QUIET, "devices": world, "max_epochs": epochs, "gradient_clip_val": 0.1, "callbacks": [Frozen()]}
    trainer = Trainer(**flags, strategy=chosen)
    wanted = trainer.strategy.distributed_sampler_kwargs if world > 1 else {"rank": 0, "num_replicas": 1}
    loader = DataLoader(Rows(wanted["rank"], wanted["num_replicas"]), batch_size=None)
    trainer.fit(made, loader, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    after = {name: value.clone() for name, value in made.state_dict().items()}
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    made.eval()
    outputs = made.model(**Rows(0, 1)[0]).logits.detach()
    merged = made.model.merge_and_unload()(**Rows(0, 1)[0]).logits.detach() if kind != "prompt" else outputs
    return changed, after, outputs, merged


def loaded(kind, folder):
    """Outputs of the first model with the adapters in `folder`, by peft alone."""
    base = module(kind).model
    base = base.get_base_model() if kind == "prompt" else base.unload()
    return peft.PeftModel.from_pretrained(base, folder).eval()(**Rows(0, 1)[0]).logits.detach()


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [("zero 3", "tensor"), ("tensor and zero 3", "pipeline"), ("pipeline", "zero 2"), ("tensor", "zero 0")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_go_from_layout_to_layout(kind, first, second, tmp_path):
    """Trained in one layout, resumed in another, exported, and loaded by peft: the numbers of one device."""
    warnings.simplefilter("ignore")
    ((changed, wanted, outputs, _),) = run(trained, kind, None, 1, 2, world=1, timeout=120)
    world = 4 if " and " in first else 2
    run(trained, kind, LAYOUTS[first], world, 1, None, str(tmp_path / "a.ckpt"), world=world, timeout=240)
    runs = run(trained, kind, LAYOUTS[second], 2, 2, str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"), world=2)
    for mine, weights, seen, merged in runs:
        assert mine == changed
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close([seen, merged], [outputs, outputs], rtol=1e-4, atol=1e-5)
    export(tmp_path / "b.ckpt", tmp_path / "adapters", adapters=True)
    torch.testing.assert_close(loaded(kind, tmp_path / "adapters"), runs[0][2], rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["zero 1", "zero 3"])
def test_one_file_has_adapters_too(layout, tmp_path):
    save = str(tmp_path / "a.ckpt")
    run(trained, "dora", LAYOUTS[layout], 2, 1, None, save, world=2, timeout=120)
    consolidate(save, tmp_path / "one.ckpt")
    for source in ("a.ckpt", "one.ckpt"):
        export(tmp_path / source, tmp_path / source[0], adapters=True)
    names = sorted(path.name for path in Path(tmp_path / "a").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "o" / name).read_bytes()
    assert json.loads((tmp_path / "a" / names[0]).read_text())["use_dora"] is True
    with pytest.raises(CheckpointError, match="Export the adapters with --adapters"):
        export(tmp_path / "a.ckpt", tmp_path / "x")


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_no_states_of_frozen_weights(kind):
    made = module(kind)
    plan = count_module(made, name=kind)
    frozen = plan.layers * plan.block_frozen + plan.first_frozen + plan.last_frozen
    assert frozen == sum(p.numel() for p in made.parameters() if not p.requires_grad)

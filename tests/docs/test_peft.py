"""Adapters of peft, as docs/huggingface.md builds them, train in every layout as on one device."""

import json
import os
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.checkpoint.full_files import consolidate, export
from lightning_3d.errors import CheckpointError
from lightning_3d.tools.planner.profile_module import count_module
from tests.docs.pages import ROOT
from tests.parity import QUIET
from tests.workers import WorkerError, run

peft = pytest.importorskip("peft", reason="needs peft")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers 5, about peft
LAYOUTS = {
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "tensor and zero 3": {"tensor_parallel_size": 2, "zero_stage": 3},
    "tensor and pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2},
    "pipeline and zero 1": {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 1},
    "pipeline and zero 3": {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3},
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "saved embeddings": {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "tokens": {"trainable_token_indices": [3, 5, 9]},
    "tokens alone": {"token_indices": [3, 5, 9], "target_modules": ["embed_tokens"]},
    "experts": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "prompt": {"num_virtual_tokens": 4},
    "prefix": {"num_virtual_tokens": 4},
    "no task": {"task_type": None},
}
OTHER = {
    "ia3": peft.IA3Config,
    "prompt": peft.PromptTuningConfig,
    "prefix": peft.PrefixTuningConfig,
    "tokens alone": peft.TrainableTokensConfig,
}
"""Configurations in place of the page's."""
UNMERGED = ("prompt", "prefix")
PAIRS = [
    ("zero 3", "tensor"),
    ("tensor and zero 3", "pipeline"),
    ("pipeline", "zero 2"),
    ("tensor", "zero 0"),
    ("pipeline and zero 3", "zero 1"),
    ("tensor and pipeline", "pipeline and zero 1"),
]


def module(kind="lora", dtype=torch.float32, computes=torch.float32):
    """The class of the page. Weights of the base are of one dtype and compute in the other."""
    page = (ROOT / "docs" / "huggingface.md").read_text()
    (code,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "get_peft_model" in text]
    names = {}
    exec(code.partition("\ntrainer = ")[0], names)
    given = {"task_type": "CAUSAL_LM", **KINDS[kind]}
    lora, build = names["LoraConfig"], names["AutoModelForCausalLM"].from_config
    names["LoraConfig"] = lambda **written: OTHER[kind](**given) if kind in OTHER else lora(**{**written, **given})
    names["AutoModelForCausalLM"] = SimpleNamespace(from_config=lambda config: build(config).to(dtype).to(computes))
    if kind == "experts":
        names["LlamaConfig"] = partial(transformers.MixtralConfig, num_local_experts=4, num_key_value_heads=4)
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


def ranks(layout):
    return 4 if " and " in layout else 2


def trained(kind, strategy, world, epochs, resume=None, save=None, dtypes=()):
    made = module(kind, *dtypes)
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
    if save is not None and int(os.environ["RANK"]) == 0:
        made.model.save_pretrained(f"{save}.own", save_embedding_layers=kind == "embedding")
    merged = outputs if kind in UNMERGED else made.model.merge_and_unload()(**Rows(0, 1)[0]).logits.detach()
    return changed, after, outputs, merged


def loaded(kind, folder):
    """Outputs of the first model with the adapters in `folder`, by peft alone."""
    base = module(kind).model
    base = base.get_base_model() if kind in UNMERGED else base.unload()
    return peft.PeftModel.from_pretrained(base, folder).eval()(**Rows(0, 1)[0]).logits.detach()


def cases():
    for kind in KINDS:
        for first, second in PAIRS:
            if kind != "prefix" or "pipeline" not in f"{first} {second}":
                yield pytest.param(kind, first, second, id=f"{kind}, {first}, {second}")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "first", "second"), [*cases()])
def test_adapters_go_from_layout_to_layout(kind, first, second, tmp_path):
    """Trained in one layout, resumed in another, exported, and loaded by peft: the numbers of one device."""
    warnings.simplefilter("ignore")
    ((changed, wanted, outputs, _),) = run(trained, kind, None, 1, 2, world=1, timeout=120)
    files, worlds = [str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")], (ranks(first), ranks(second))
    run(trained, kind, LAYOUTS[first], worlds[0], 1, None, files[0], world=worlds[0], timeout=240)
    runs = run(trained, kind, LAYOUTS[second], worlds[1], 2, *files, world=worlds[1], timeout=240)
    for mine, weights, seen, merged in runs:
        assert mine == changed
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close([seen, merged], [outputs, outputs], rtol=1e-4, atol=1e-5)
    export(files[1], tmp_path / "adapters", adapters=True)
    torch.testing.assert_close(loaded(kind, tmp_path / "adapters"), runs[0][2], rtol=0, atol=1e-6)
    assert content(tmp_path / "adapters") == content(f"{files[1]}.own")


def content(folder):
    """The configuration in a folder of PEFT, and the names of tensors. Sets have no order."""
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    names = load_file(Path(folder, "adapter_model.safetensors")).keys()
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}, {*names}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pipeline", "pipeline and zero 3", "tensor and pipeline"])
def test_a_prefix_is_refused_in_a_pipeline(layout):
    """transformers reads its mask in Python between the blocks. Tensor ranks are the remedy, which the cases above try."""
    with pytest.raises(
        WorkerError, match=r"PipelineSplitError: The step reads a tensor's value in Python.* use tensor_p"
    ):
        run(trained, "prefix", LAYOUTS[layout], ranks(layout), 1, world=ranks(layout), timeout=120)


@pytest.mark.long
def test_adapters_of_stacked_experts_are_refused_where_data_ranks_share_them():
    """All ranks would add to all rows. The remedy, ZeRO 3, is among the cases above."""
    with pytest.raises(WorkerError, match=r"by their names, as adapters of PEFT do.*Use expert_parallel_size=1"):
        run(trained, "experts", {"expert_parallel_size": 2}, 2, 1, world=2, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zero 1"])
def test_adapters_in_fp32_on_a_base_in_bf16_stay_within_its_rounding(layout):
    """The base in bf16, against the same values computed in fp32: a layout is as near as one device."""
    half = (torch.bfloat16, torch.bfloat16)
    ((_, exact, _, _),) = run(trained, "lora", None, 1, 1, None, None, (torch.bfloat16,), world=1, timeout=120)
    ((_, alone, _, _),) = run(trained, "lora", None, 1, 1, None, None, half, world=1, timeout=120)
    wanted, near = learnt(exact), (learnt(alone) - learnt(exact)).norm()
    assert 0 < near < wanted.norm() / 2
    world = ranks(layout)
    for _, weights, _, _ in run(trained, "lora", LAYOUTS[layout], world, 1, None, None, half, world=world, timeout=240):
        assert (learnt(weights) - wanted).norm() < 1.5 * near


def learnt(weights):
    """Matrices that are zero before training."""
    found = [weight for name, weight in weights.items() if "lora_B" in name]
    assert {weight.dtype for weight in found} == {torch.float32}
    return torch.cat([weight.flatten() for weight in found])


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

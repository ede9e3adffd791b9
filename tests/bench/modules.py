"""The modules that the contestants train: a Llama of Hugging Face, a ViT of timm, a UNet of diffusers."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

LR = 1e-3


@dataclass(frozen=True)
class Task:
    kind: str = "llama"
    width: int = 384
    blocks: int = 6
    rows: int = 8
    """Of the global batch, which is the same for all contestants."""
    length: int = 64

    def load(self) -> None:
        """Import what the module needs, as a training script does before `fit`."""
        with torch.device("meta"):
            self.model()

    def dataset(self) -> list[Any]:
        """One global batch, again and again: the loss of all contestants must fall alike."""
        generator = torch.Generator().manual_seed(1)
        if self.kind == "llama":
            return list(torch.randint(0, VOCABULARY, (self.rows, self.length), generator=generator))
        images = torch.randn(self.rows, 3, self.length, self.length, generator=generator)
        return [(image, number % 10) for number, image in enumerate(images)]

    def model(self) -> nn.Module:
        """Build the module, with the same weights on every rank."""
        torch.manual_seed(0)
        if self.kind == "llama":
            return llama(self)
        if self.kind == "vit":
            from timm.models.vision_transformer import VisionTransformer

            sizes = {"img_size": self.length, "patch_size": 8, "num_classes": 10, "num_heads": 8}
            return VisionTransformer(embed_dim=self.width, depth=self.blocks, **sizes)
        from diffusers import UNet2DModel

        channels = (self.width // 4, self.width // 2, self.width // 2)
        return UNet2DModel(self.length, layers_per_block=self.blocks // 3, block_out_channels=channels,
                           down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
                           up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"))  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.kind == "llama":
            return model(input_ids=batch, labels=batch).loss
        images, labels = batch
        if self.kind == "vit":
            return nn.functional.cross_entropy(model(images), labels)
        return nn.functional.mse_loss(model(images, labels).sample, images)


VOCABULARY = 4096


def llama(task: Task) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=task.width, intermediate_size=task.width * 11 // 4, use_cache=False,
            num_hidden_layers=task.blocks, num_attention_heads=8, num_key_value_heads=4,
        )
    )  # fmt: skip


class Training(LightningModule):
    """What a user writes."""

    def __init__(self, task: Task, steps: int) -> None:
        super().__init__()
        self.task, self.steps = task, steps
        self.model = task.model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.task.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        places = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        data = self.task.dataset() * self.steps
        # Lightning's own sampler of DDP would shuffle rows between batches
        sampler = DistributedSampler(data, shuffle=False, **places)
        return DataLoader(data, batch_size=self.task.rows // places["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


class ByHand(Training):
    """What Lightning's ModelParallelStrategy asks the author of the module to write."""

    kind = "zero3"

    def configure_model(self) -> None:
        if self.kind == "tensor":
            _tensor_plan(self.model, self.device_mesh["tensor_parallel"])
            return
        from torch.distributed.fsdp import fully_shard

        again = self.kind == "zero3"
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=again)


class ByHandZero2(ByHand):
    kind = "zero2"


class ByHandTensor(ByHand):
    kind = "tensor"


def _tensor_plan(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh, ends | {"lm_head": ColwiseParallel(output_layouts=Replicate())})


class Half(nn.Module):
    """One of two stages of the Llama, cut by hand for torch's `PipelineStage`."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        inner = model.model
        middle = len(inner.layers) // 2
        self.first, self.rotary_emb = first, inner.rotary_emb
        self.layers = inner.layers[:middle] if first else inner.layers[middle:]
        if first:
            self.embed_tokens = inner.embed_tokens
        else:
            self.norm, self.lm_head = inner.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return x if self.first else self.lm_head(self.norm(x))

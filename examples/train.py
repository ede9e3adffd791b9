"""Any example from its Hydra config: what a project of your own would have.

One device:       python examples/train.py example=vision
Tensor parallel:  python examples/train.py example=vision +layout@trainer.strategy=tp2 trainer.devices=2
A sweep:          python examples/train.py -m example=vision +layout@trainer.strategy=zero1,tp2,pp2 trainer.devices=2,4
"""

import hydra
import torch
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig


def train(config: DictConfig) -> Trainer:
    seed_everything(config.seed, verbose=False)
    torch.set_num_threads(config.threads)
    trainer: Trainer = hydra.utils.instantiate(config.trainer)
    trainer.fit(hydra.utils.instantiate(config.model), datamodule=hydra.utils.instantiate(config.data))
    return trainer


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    train(config)


if __name__ == "__main__":
    main()

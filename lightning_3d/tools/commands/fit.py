"""`lightning-3d fit | validate | test | predict`: Lightning's own command line, with our strategies registered."""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import ConfigurationError, did_you_mean
from lightning_3d.layout import Layout

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CLASS = re.compile(r"^((?:--trainer\.strategy=)?)([\w.]+\.Strategy3D)$")
"""jsonargparse reads a class without arguments as the name of a registered strategy."""
VERBS = {
    "fit": "train a LightningModule: --model module.Class --trainer.strategy 3d_zero1 --trainer.devices 2",
    "validate": "the same for trainer.validate",
    "test": "the same for trainer.test",
    "predict": "the same for trainer.predict",
}


def train(arguments: Sequence[str]) -> int:
    """Run LightningCLI, which takes any LightningModule and LightningDataModule by their import path.

    Importing this package registered `3d`, `3d_zero1` and the others, so that `--trainer.strategy=3d_zero1` works here
    without an import in user code.
    """
    try:
        from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

        from lightning_3d.tools.commands.parsing import OneLine
    except ImportError as error:
        raise ConfigurationError(
            f"`lightning-3d {arguments[0]}` is LightningCLI, which needs jsonargparse ({error}):"
            " pip install 'jsonargparse[signatures]'."
        ) from error

    from lightning.fabric.utilities.exceptions import MisconfigurationException

    class Parser(OneLine, LightningArgumentParser):
        """Lightning's parser, with our errors. Printed configs include our defaults."""

        def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
            _check_name(cfg.get("trainer.strategy"))
            return super().dump(_with_defaults(cfg), *args, **kwargs)

    class OurCLI(LightningCLI):
        """LightningCLI with our parser and our errors."""

        def instantiate_trainer(self, **kwargs: Any) -> "Trainer":
            _check_name(self._get(self.config_init, "trainer.strategy"))
            try:
                return super().instantiate_trainer(**kwargs)
            except (ValueError, TypeError, MisconfigurationException) as error:
                raise ConfigurationError(f"the Trainer cannot be built ({type(error).__name__}): {error}") from error

    if os.getcwd() not in sys.path:  # a console script has no working directory on its path
        sys.path.insert(0, os.getcwd())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # `main(argv)` is called from Python
        # LightningCLI 2.6 uses what jsonargparse deprecates since 4.49: nothing that a user could change
        warnings.filterwarnings("ignore", r"\s*By default only one Jsonargparse|(?s:.)*\bdeprecated in v4\.49\.0")
        given = [_CLASS.sub(r'\1{"class_path": "\2"}', argument) for argument in arguments]
        OurCLI(
            args=None if given == sys.argv[1:] else given, parser_class=Parser, parser_kwargs={"prog": "lightning-3d"}
        )
    return 0


def _check_name(name: Any) -> None:
    """Raise for an unknown name of a strategy, with those that are close to it."""
    from lightning.pytorch.strategies import StrategyRegistry

    known = [each for each, entry in StrategyRegistry.items() if entry["description"] != "not a strategy"]
    if isinstance(name, str) and name not in (*known, "auto"):
        ours = ", ".join(each for each in known if each.startswith("3d"))
        hint = did_you_mean(name, known) or f". This package registers {ours}; Lightning has its own."
        raise ConfigurationError(f"--trainer.strategy {name!r} is not a registered strategy{hint}")


def _with_defaults(config: Any) -> Any:
    """`config` with the defaults of `Strategy3D` for sizes that are not given."""
    strategy = config.get("trainer.strategy")
    given = getattr(strategy, "init_args", None)
    if given is None or not strategy.class_path.endswith(".Strategy3D") or given.get("layout") != "given":
        return config  # layout="auto" chooses what is not given
    config, usual = config.clone(), Layout()
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "zero_stage"):
        if given.get(name) is None:
            config[f"trainer.strategy.init_args.{name}"] = getattr(usual, name)
    return config

"""`lightning-3d fit | validate | test | predict`: Lightning's own command line, with our strategies registered."""

import os
import sys
import warnings
from collections.abc import Sequence

from lightning_3d.errors import ConfigurationError

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
        from lightning.pytorch.cli import LightningCLI
    except ImportError as error:
        raise ConfigurationError(
            f"`lightning-3d {arguments[0]}` is LightningCLI, which needs jsonargparse: pip install 'lightning-3d[cli]'."
        ) from error
    if os.getcwd() not in sys.path:  # a console script does not see the modules beside the user
        sys.path.insert(0, os.getcwd())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # `main(argv)` is called from Python
        LightningCLI(args=None if list(arguments) == sys.argv[1:] else list(arguments))
    return 0

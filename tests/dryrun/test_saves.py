"""A dry run saves nothing, wherever the epoch ends."""

import json
import textwrap

from lightning_3d.cli import main
from tests.dryrun.test_cli import SCRIPT


def test_an_epoch_that_ends_in_the_first_step(tmp_path, capfd):
    script = tmp_path / "train.py"
    text = textwrap.dedent(SCRIPT).replace("max_epochs=1,", "max_epochs=3, limit_train_batches=1,")
    assert "limit_train_batches" in text
    script.write_text(text.replace("self.log(", "self.trainer.save_checkpoint('by_hand.ckpt')\n        self.log("))
    assert main(["dry-run", str(script), "--cluster", "1x2xh100", "--json"]) == 0
    assert json.loads(capfd.readouterr()[0])["world_size"] == 2
    assert not list(tmp_path.rglob("*.ckpt"))

"""A dry run saves nothing and does not validate, wherever the epoch ends."""

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


VALIDATION = """
        def validation_step(self, batch, batch_idx):
            raise ValueError("a dry run does not validate")

        def on_train_epoch_end(self):
            Path(__file__).with_name("epoch").touch()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    if __name__"""


def test_validation_is_skipped_where_an_epoch_ends_in_the_first_step(tmp_path, capfd):
    """What reads a metric of validation at the end of the epoch goes on without it."""
    text = textwrap.dedent(SCRIPT.replace("\n    if __name__", VALIDATION, 1))
    for old, new in (
        ("max_epochs=1,", "max_epochs=3, limit_train_batches=1, callbacks=[EarlyStopping('val_loss')],"),
        ("import LightningModule, Trainer", "import LightningModule, Trainer\nfrom lightning.pytorch.callbacks import EarlyStopping"),
        ("batch_size=4))", "batch_size=4), DataLoader(torch.randn(8, 8)))"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    assert main(["dry-run", str(tmp_path / "train.py"), "--cluster", "1x2xh100", "--ranks", "0", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["world_size"] == 2 and "Traceback" not in err
    assert (tmp_path / "epoch").exists()

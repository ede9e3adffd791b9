"""`lightning-3d dry-run script.py`. It saves nothing and does not validate, wherever the epoch ends."""

import json
import re
import textwrap

import pytest

from lightning_3d.cli import main

SCRIPT = """
    import argparse
    from pathlib import Path

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from lightning_3d import Strategy3D

    class Net(LightningModule):
        def __init__(self, width):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=16)
        parser.add_argument("--tensor", type=int, default=1)
        args = parser.parse_args()
        print("the script's own words")
        trainer = Trainer(
            accelerator="gpu", devices=8, num_nodes=4, max_epochs=1, default_root_dir=Path(__file__).parent / "logs",
            strategy=Strategy3D(tensor_parallel_size=args.tensor),
        )
        trainer.fit(Net(args.width), DataLoader(torch.randn(64, 8), batch_size=4))
        Path(__file__).with_name("after").touch()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_a_script_runs_unchanged_until_its_fit_is_over(script, capfd):
    assert main(["dry-run", str(script), "--cluster", "2x8xh100", "--args", "--width 32 --tensor 2", "--json"]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert "the script's own words" in err
    assert (report["cluster"], report["world_size"]) == ("2x8xh100", 16)
    assert report["layout"] == "data 8 x tensor 2 x pipeline 1, ZeRO 1"
    assert report["ranks"][0]["parameters"] == 4 * (
        2 * 8 + 2 + 16 + 1
    )  # of 16 x 8 and 16 two rows, of 1 x 16 and 1 the only one
    assert not script.with_name("after").exists()
    assert not script.with_name("logs").exists()


def test_the_report_says_that_ranks_fit(script, capfd):
    """The bytes are the largest of their columns."""
    assert main(["dry-run", str(script), "--cluster", "2xh100", "--args", "--tensor 2"]) == 0
    text = capfd.readouterr().out
    rows = [re.split(" {2,}", line) for line in text.splitlines() if "pipeline 0, data" in line]
    step, before = (max((row[column] for row in rows), key=_kilobytes) for column in (-3, -2))
    assert f"these ranks fit: at most {step} in a step, {before} before training" in text


def _kilobytes(shown):
    number, unit = shown.split()
    assert unit == "KB", shown
    return float(number)


def test_the_exit_code_says_whether_the_job_would_fail(script, capfd):
    assert main(["dry-run", str(script), "--cluster", "1x3xcpu", "--args", "--tensor 2"]) == 1
    assert "3 ranks cannot be split into tensor_parallel_size=2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py", "--cluster", "8xcpu"], "there is no script nothing.py"),
        (["{script}", "--cluster", "8xh10"], "did you mean h100"),
        (["{script}", "--cluster", "9000"], "up to 4096 ranks"),
        (["{script}", "--cluster", "8xcpu", "--ranks", "0,8"], "give numbers below 8"),
        (["{empty}", "--cluster", "8xcpu"], "ended without a call of trainer.fit"),
    ],
)
def test_questions_that_cannot_be_answered_take_one_line(script, capsys, arguments, message):
    empty = script.with_name("empty.py")
    empty.write_text("print('nothing to train')")
    given = [text.format(script=script, empty=empty) for text in arguments]
    assert main(["dry-run", *given]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1


def test_help_shows_a_worked_example(capsys):
    with pytest.raises(SystemExit) as end:
        main(["dry-run", "--help"])
    assert end.value.code == 0
    assert "lightning-3d dry-run train.py --cluster 128x8xh100" in capsys.readouterr().out


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

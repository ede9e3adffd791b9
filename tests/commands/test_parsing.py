"""One parser for every command: an error is one line that names the nearest thing there is."""

import subprocess
import sys

import pytest
import yaml

from lightning_3d.cli import main

FIT = "fit --seed_everything=1 --model=tests.zoo.vectors.MLP --trainer.accelerator=cpu"


def refused(capsys, line):
    try:
        code = main(line.split())
    except SystemExit as stopped:
        code = stopped.code
    err = [text for text in capsys.readouterr().err.splitlines() if "seed" not in text.lower()]
    assert code == 2
    assert len(err) == 1, err
    return err[0]


@pytest.mark.filterwarnings("ignore:LightningCLI")
@pytest.mark.parametrize(
    ("line", "prog", "message"),
    [
        ("fti", "", "did you mean fit?"),
        ("plam", "", "did you mean plan?"),
        ("plan gpt2 --clustr h100", " plan", "did you mean --cluster"),
        ("plan gpt2 --cluster h100 --precision bf16-mixd", " plan", "did you mean bf16-mixed"),
        ("compare there --metrc loss", " compare", "did you mean --metric"),
        ("plan gpt2 --cluster h100 --top many", " plan", "many"),
        (f"{FIT} --trainer.devics=2", " fit", "did you mean --trainer.devices"),
        (f"{FIT} --trainer.strategy=3d_zer1", " fit", "strategy '3d_zer1' is not a registered strategy: did you mean 3d_zero1"),
        (f"{FIT} --trainer.strategy=3d_zeroo1 --print_config", " fit", "did you mean 3d_zero1"),
        (f"{FIT} --trainer.strategy=3d_zero5", " fit", "did you mean 3d_zero"),
        (f"{FIT} --trainer.strategy=nothing_like_it", " fit", "This package registers 3d, 3d_zero0"),
        (f"{FIT} --trainer.strategy=lightning_3d.Strategy3D --trainer.strategy.zero_stge=1", " fit",
         "Option 'zero_stge' is not accepted: did you mean zero_stage"),
        (f"{FIT} --trainer.strategy=lightning_3d.Strategy3D --trainer.strategy.zero_stage=7", " fit",
         "zero_stage: Expected a Literal[0, 1, 2, 3] Given value: 7"),
        (f"{FIT} --trainer.devices=abc", " fit", "the Trainer cannot be built (TypeError)"),
        ("fit --model=tests.zoo.vectors.MPL", " fit", "module 'tests.zoo.vectors' has no attribute 'MPL'"),
        ("fit --config nowhere.yaml", " fit", "File does not exist"),
        ("fit", "", "the following arguments are required: fit.model"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_the_nearest_name(capsys, line, prog, message):
    err = refused(capsys, line)
    assert err.startswith(f"lightning-3d{prog}: ")
    assert message in err


def printed(capsys, *flags):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--model=tests.zoo.vectors.MLP", *flags, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]


@pytest.mark.filterwarnings("ignore:LightningCLI")
@pytest.mark.parametrize(
    "flags", [["--trainer.strategy=lightning_3d.Strategy3D"], ["--trainer.strategy", "lightning_3d.Strategy3D"]]
)
def test_a_printed_config_says_what_holds(capsys, flags):
    given = printed(capsys, *flags)["init_args"]
    sizes = [given[f"{axis}_parallel_size"] for axis in ("data", "tensor", "pipeline")]
    assert (*sizes, given["zero_stage"]) == ("auto", 1, 1, 1)
    chosen = printed(capsys, *flags, "--trainer.strategy.layout=auto")["init_args"]
    assert (chosen["tensor_parallel_size"], chosen["zero_stage"]) == (None, None)


@pytest.mark.long
def test_without_jsonargparse_the_error_says_what_to_install():
    script = "import sys; sys.modules['jsonargparse'] = None; from lightning_3d.cli import main"
    script += "; print([main(line.split()) for line in sys.argv[1:]])"
    lines = ["plan gpt2 --cluster h100", "fit --model=x", ""]
    done = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True)
    assert done.stdout == "[2, 2, 2]\n", done.stderr
    assert done.stderr.count("\n") == 3, done.stderr
    assert done.stderr.count("pip install 'jsonargparse[signatures]'") == 3

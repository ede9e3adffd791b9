"""`lightning-3d fit`, `inspect`, their one parser, and LightningCLI in a script of the user's own."""

import subprocess
import sys
import warnings

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_3d import Strategy3D
from lightning_3d.cli import main
from tests.workers import run
from tests.zoo.language import UntiedGPT
from tests.zoo.plain import MLP

STRATEGY = ["--trainer.strategy=lightning_3d.Strategy3D", "--trainer.strategy.tensor_parallel_size=2"]
SMALL = [
    "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.limit_val_batches=0",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
    "--trainer.use_distributed_sampler=false",
]  # fmt: skip


def test_a_config_can_be_printed_and_holds_every_argument(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--model=tests.zoo.plain.MLP", *STRATEGY, "--print_config"])
    assert stopped.value.code == 0
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_3d.Strategy3D"
    assert strategy["init_args"]["tensor_parallel_size"] == 2
    assert strategy["init_args"]["loss_scope"] == "auto"


def test_a_yaml_file_names_the_strategy(tmp_path):
    init = {"pipeline_parallel_size": 2, "zero_stage": 0}
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {"class_path": "lightning_3d.Strategy3D", "init_args": init},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's and jsonargparse's own, about pytest's arguments and each other
        cli = LightningCLI(MLP, run=False, args=["--config", str(tmp_path / "config.yaml")])
    assert isinstance(cli.trainer.strategy, Strategy3D)
    assert cli.trainer.strategy.settings.base.pipeline_parallel_size == 2


def test_arguments_are_typed_and_explained(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.strategy.help=lightning_3d.Strategy3D"])
    text = " ".join(capsys.readouterr().out.split()).replace("int | None", "int | null")  # as jsonargparse 4.39 has it
    assert "ranks that share every large matrix; 1 if not given. (type: int | null, default: null)" in text
    assert "{ring,native,hierarchical,auto}" in text.replace(" ", "").replace("|", ",") or "'hierarchical'" in text
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--model=tests.zoo.plain.MLP", "--trainer.strategy=lightning_3d.Strategy3D",
              "--trainer.strategy.zero_stage=7"])  # fmt: skip
    assert stopped.value.code == 2


def _fit(folder, strategy):
    assert main(["fit", "--model=tests.zoo.language.GPT", "--trainer.devices=2", *SMALL, *strategy,
                 f"--trainer.default_root_dir={folder}", "--trainer.enable_checkpointing=false"]) == 0  # fmt: skip


def test_two_ranks_train_and_save_their_config(tmp_path):
    run(_fit, str(tmp_path), STRATEGY, world=2)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["trainer"]["strategy"]["init_args"]["tensor_parallel_size"] == 2


def test_registered_names_need_no_import(tmp_path):
    run(_fit, str(tmp_path), ["--trainer.strategy=3d_zero2"], world=2)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["strategy"] == "3d_zero2"


BORING = "lightning.pytorch.demos.boring_classes"


def _verbs(folder):
    """Every verb in turn, the later ones with the config that the first one saved; what came out of each."""
    flags = [flag for flag in SMALL if "limit_val" not in flag]
    flags += [f"--trainer.{name}" for name in ("devices=2", "limit_train_batches=2", "limit_val_batches=2",
              "limit_test_batches=2", "limit_predict_batches=2", "enable_checkpointing=false")]  # fmt: skip
    model = [f"--model={BORING}.BoringModel", f"--data={BORING}.BoringDataModule"]
    assert main(["fit", *model, *flags, "--trainer.strategy=3d_zero1", f"--trainer.default_root_dir={folder}"]) == 0
    seen = []

    class Spy(LightningCLI):
        def after_instantiate_classes(self):
            seen.append(self.trainer)

    monkey = pytest.MonkeyPatch()
    monkey.setattr("lightning.pytorch.cli.LightningCLI", Spy)
    for verb in ("validate", "test", "predict"):
        assert main([verb, "--config", f"{folder}/config.yaml", f"--trainer.default_root_dir={folder}/{verb}"]) == 0
    monkey.undo()
    return [
        (str(trainer.state.fn.value), str(trainer.state.status.value), type(trainer.strategy).__name__)
        for trainer in seen
    ]


def test_every_verb_runs_from_the_config_that_fit_saved(tmp_path):
    for ended in run(_verbs, str(tmp_path), world=2):
        assert ended == [(verb, "finished", "Strategy3D") for verb in ("validate", "test", "predict")]


def test_inspect_shows_the_plan_the_stages_and_parameters(capsys):
    assert main(["inspect", "tests.zoo.language.GPT", "--tensor", "2", "--pipeline", "2"]) == 0
    text = capsys.readouterr().out
    assert "c_attn.weight: dimension 0 in 3 fused sections (16, 16, 16), 24 of 48" in text
    assert "stage 0: embed" in text


def held(capsys, *arguments):
    """Parameters on a rank of each stage, as printed."""
    assert main(["inspect", "tests.zoo.language.UntiedGPT", *arguments]) == 0
    text = capsys.readouterr().out
    return text, [
        int(line.split(" has ")[1].split()[0].replace(",", ""))
        for line in text.splitlines()
        if line.startswith("stage ") and " has " in line
    ]


def test_inspect_counts_each_parameter_on_its_ranks(capsys):
    total = sum(parameter.numel() for parameter in UntiedGPT().parameters())
    _, stages = held(capsys, "--pipeline", "2")
    assert len(stages) == 2
    assert sum(stages) == total
    text, (rank,) = held(capsys, "--tensor", "2")
    assert f"parameters on a rank: {rank:,} of {total:,}" in text
    assert sum(held(capsys, "--tensor", "2", "--pipeline", "2")[1]) == rank


def test_inspect_of_one_rank_counts_everything_also_of_a_script_that_trains(capsys, tmp_path, monkeypatch):
    lines = (
        "from lightning.pytorch import Trainer",
        "from tests.zoo.plain import MLP",
        "Trainer().fit(MLP())",
        "1 / 0",
    )
    (tmp_path / "trains_at_once.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["inspect", "trains_at_once.MLP"]) == 0
    total = sum(parameter.numel() for parameter in MLP().parameters())
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"stage 0: each rank has {total:,} of {total:,} parameters (100%)"


def test_a_class_that_is_not_there_is_one_line(capsys):
    assert main(["inspect", "tests.zoo.language.Nothing"]) == 2
    assert capsys.readouterr().err == "lightning-3d inspect: 'tests.zoo.language' has no 'Nothing'.\n"


def test_inputs_of_a_module_without_forward_are_refused_in_words(capsys):
    assert main(["inspect", "tests.planner.odd.NoStep", "--tensor", "2", "--inputs", "2x8:float32"]) == 2
    assert "--inputs are those of `forward`, and NoStep has none" in capsys.readouterr().err
    assert main(["inspect", "tests.planner.odd.Good", "--tensor", "2", "--inputs", "2x8:float32"]) == 2
    assert "Good cannot be run on its inputs" in capsys.readouterr().err


FIT = "fit --seed_everything=1 --model=tests.zoo.plain.MLP --trainer.accelerator=cpu"


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
        ("fit --model=tests.zoo.plain.MPL", " fit", "module 'tests.zoo.plain' has no attribute 'MPL'"),
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
        main(["fit", "--model=tests.zoo.plain.MLP", *flags, "--print_config"])
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

import json
import re
import shlex
import subprocess
import sys
from textwrap import dedent

import pytest

from lightning_3d.cli import COMMANDS, main
from lightning_3d.tools.planner import answers
from tests.planner.test_bad_input import refused

HERE = "tests.zoo.planned"
pytestmark = pytest.mark.usefixtures("no_user_files")


def ask(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_plan_shows_layouts_memory_time_and_cost(capsys):
    text = ask(capsys, "llama-7b", "--tokens", "300B", "--cluster", "16x8xh100", "--price", "2")
    assert "6.738B parameters, 32 blocks" in text
    assert "128 x NVIDIA H100" in text
    for word in ("ZeRO", "MFU", "cost", "limited by", "weights", "activations", "optimizer", "of 80 GB", "compute"):
        assert word in text


def test_the_published_days_of_gpt3(capsys):
    flags = ["--tokens", "300B", "--cluster", "1024xa100-80g", "--sustained", "140", "--recompute", "full"]
    assert "8TP/(nX) at X = 140 TFLOP/s per device: 33.8 days" in ask(capsys, "gpt3-175b", *flags)
    shape = ["--layers", "128", "--hidden", "25600", "--heads", "160", "--vocab", "51200", "--seq", "2048"]
    flags = ["--batch", "3072", "--cluster", "3072xa100-80g", "--sustained", "163", "--recompute", "full", "--json"]
    data = json.loads(ask(capsys, *shape, "--tokens", "450B", "--tensor", "8", "--pipeline", "64", *flags))
    assert f"{data['plans'][0]['step_seconds']['total']:.2f}" == "102.63"
    assert f"{data['job']['parameters'] / 1e9:.2f}" == "1008.04"


def test_json_is_the_same_plan(capsys):
    flags = ["7b", "--tokens", "140B", "--cluster", "8xh100", "--top", "2"]
    data = json.loads(ask(capsys, *flags, "--json"))
    assert len(data["plans"]) == 2
    assert data["job"]["parameters"] == pytest.approx(7e9)
    best = data["plans"][0]
    assert best["fits"]
    assert best["layout"]["tensor_parallel_size"] >= 1
    assert best["dollars"] > 0
    assert max(memory["total"] for memory in best["memory_bytes"]) <= best["device_memory_bytes"]


def test_deadline_budget_and_comparison(capsys):
    flags = ["7b", "--tokens", "140B", "--json"]
    within = json.loads(ask(capsys, *flags, "--accelerator", "h100", "--gpus-for", "10 days"))["plans"][0]
    fewer = json.loads(ask(capsys, *flags, "--accelerator", "h100", "--gpus-for", "40 days"))["plans"][0]
    assert within["days"] <= 10
    assert fewer["cluster"]["devices"] < within["cluster"]["devices"]
    cheap = json.loads(ask(capsys, *flags, "--accelerator", "h100", "--max-cost", "100000"))["plans"][0]
    assert cheap["dollars"] <= 100000
    compared = json.loads(ask(capsys, *flags, "--cluster", "64xh100", "--compare", "a100-80g,h100,tpu-v4"))
    assert {plan["cluster"]["accelerator"] for plan in compared["plans"]} == {"a100-80g", "h100", "tpu-v4"}
    assert "tpu-v4 is in the catalogue for comparison only: lightning_3d does not run on it." in compared["notes"]
    old = json.loads(ask(capsys, "gpt2", "--tokens", "1B", "--json", "--compare", "v100-32g,tpu-v4"))["notes"]
    assert {note.split()[3] for note in old if "older than a year" in note} == {"v100-32g", "tpu-v4"}
    costs = [plan["dollars"] for plan in compared["plans"]]
    assert costs == sorted(costs)


def test_the_amount_of_data_for_a_time_and_a_price(capsys):
    flags = ["--cluster", "8xa100-80g", "--price", "3", "--for", "100 hours", "--json"]
    data = json.loads(ask(capsys, *flags))
    plan, job = data["plans"][0], data["job"]
    assert plan["dollars"] == pytest.approx(8 * 3 * 100)
    assert plan["days"] == pytest.approx(100 / 24)
    assert job["samples"] * job["tokens_per_sample"] == pytest.approx(20 * job["parameters"], rel=0.3)
    named = json.loads(ask(capsys, "7b", *flags))
    assert named["plans"][0]["dollars"] == pytest.approx(2400)


def test_clusters_of_one_kind_are_compared(capsys):
    data = json.loads(ask(capsys, "7b", "--tokens", "1B", "--compare", "8xh100,16xh100", "--json"))
    assert [plan["cluster"]["devices"] for plan in data["plans"]] == [8, 16]
    assert all(plan["dollars"] for plan in data["plans"])


def test_experts_and_offload_are_proposed_where_they_decide(capsys):
    """Over data ranks DeepSeek-V3 trains in less time than with a copy of all experts on each."""
    flags = ["--tokens", "14.8T", "--cluster", "256x8xh800", "--batch", "15360", "--top", "1", "--json"]
    found, whole = (
        json.loads(ask(capsys, "deepseek-v3", *flags, *given))["plans"][0] for given in ([], ["--expert-parallel", "1"])
    )
    assert found["options"]["experts"] > 1
    assert found["days"] < 0.9 * whole["days"]
    flags = ["--sequence", "131072", "--cluster", "8xh100", "--json"]
    moved, kept = (json.loads(ask(capsys, "llama3-8b", *flags, *given)) for given in ([], ["--offload", "none"]))
    assert moved["plans"][0]["options"]["offload"] == "activations"
    assert moved["plans"][0]["days"] < kept["plans"][0]["days"]
    assert any("activations wait in host memory" in note for note in moved["notes"])


@pytest.mark.parametrize(("experts", "cluster", "sizes"), [(60, "1x8", {1, 4}), (9, "3x8", {1, 3}), (8, "5x8", {1, 8})])
def test_expert_ranks_that_are_proposed_divide_experts_and_devices(experts, cluster, sizes, tmp_path, monkeypatch):
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512}
    config |= {"intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    config |= {"vocab_size": 1000, "max_position_embeddings": 512, "num_local_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    tried = set()
    plain = answers.job_of
    monkeypatch.setattr(answers, "job_of", lambda args, *rest: tried.add(args.expert_parallel) or plain(args, *rest))
    assert main(["plan", str(tmp_path), "--tokens", "1B", "--cluster", f"{cluster}xh100"]) == 0
    assert tried - {None} == sizes


@pytest.mark.parametrize("tensor", ["1", "2"])
def test_kernels_that_save_less_than_this_package_are_said(tensor, capsys):
    text = ask(capsys, "llama3-8b", "--cluster", "16xh100", "--tensor", tensor, "--kernels", "fused")
    assert ("This package keeps it, and needs more memory" in text) == (tensor == "2")


def test_attention_of_kernels_for_the_device_is_as_fast_as_products(capsys):
    asked = ["llama3-8b", "--sequence", "32768", "--cluster", "8xh100", "--kernels", "fused"]
    fast, slow = (ask(capsys, *asked, *more) for more in ([], ["--set", "attention_share=0.4"]))
    assert fast != slow and ask(capsys, *asked, "--set", "attention_share=0.65") == fast


def test_a_deadline_that_needs_kernels_that_save_less_names_them(capsys):
    """Llama 3 405B was trained in 78 days on 16,384 H100."""
    flags = ["--tokens", "15.6T", "--batch", "2048", "--accelerator", "h100", "--gpus-for", "80 days"]
    assert main(["plan", "llama3-405b", *flags]) == 2
    said = capsys.readouterr().err
    assert "cannot be met with h100" in said
    devices = int(said.partition("With --kernels fused")[2].partition(" of them do")[0].split()[-1].replace(",", ""))
    assert devices <= 16384


QUESTIONS = {
    "one cluster": ["llama3-8b", "--cluster", "16xh100"],
    "a pipeline": ["llama-70b", "--tokens", "1T", "--cluster", "4x8xh100"],
    "several devices": ["llama-7b", "--tokens", "300B", "--cluster", "64xh100", "--compare", "h100,b200,tpu-v5p"],
    "experts, no price": ["deepseek-v3", "--cluster", "256x8xh800", "--recompute", "full"],
    "one line": ["gpt3-175b", "--cluster", "128x8xa100-80g", "--top", "1"],
}


@pytest.mark.parametrize("wide", [80, 100])
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_terminal_cuts_and_folds_nothing(question, wide, capsys, monkeypatch):
    """What it leaves out of the table is the same in all lines, and said above, or one of the least columns."""
    whole = ask(capsys, *question).splitlines()
    assert ("77.4 GB tight" in "\n".join(whole)) == (question is QUESTIONS["one cluster"])
    monkeypatch.setenv("COLUMNS", str(wide))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    narrow = ask(capsys, *question).splitlines()
    assert max(map(len, narrow)) <= wide
    assert {word for line in narrow for word in line.split()} - {"all:"} <= {
        word + end for line in whole for word in line.split() for end in ("", ",")
    }
    rows = [line for line in narrow if re.search(r" GB( tight)? .* days", line)]
    assert len(rows) == len([line for line in whole if re.search(r" GB( tight)? .* days", line)]) > 0


def test_the_lines_to_copy_are_those_of_hydra_and_of_python(capsys):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    flags = ["--cluster", "16xh100", "--tensor", "2", "--pipeline", "4", "--offload", "optimizer"]
    text = ask(capsys, "llama3-8b", *flags)
    python, _, hydra = text.partition("to train so:\n")[2].partition("with Hydra:\n")
    command = f"printf '%s\\n' {hydra.partition(chr(10) * 2)[0].strip()}"
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout.splitlines()
    found = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(words)}
    strategy = found["trainer.strategy"]
    assert (strategy["tensor_parallel_size"], strategy["pipeline_parallel_size"]) == (2, 4)
    assert strategy["offload"] == {"optimizer": "cpu"}
    made = {}
    exec(
        dedent(python),
        {**dict.fromkeys(("dataset",)), "Strategy3D": lambda **given: given}
        | {name: lambda *_, name=name, **given: made.setdefault(name, given) for name in ("Trainer", "DataLoader")},
    )
    assert made["Trainer"]["strategy"] == {name: value for name, value in strategy.items() if name != "_target_"}
    assert made["DataLoader"]["batch_size"] >= 1


def test_a_module_of_ones_own(capsys):
    flags = ["--inputs", "2x17:int64", "--batch", "8", "--samples", "1000", "--cluster", "2xa100", "--json"]
    data = json.loads(ask(capsys, f"{HERE}.TinyGPT", "--arg", "layers=4", *flags))
    assert data["job"]["layers"] == 4
    assert data["job"]["tokens_per_sample"] == 17


def best(capsys, line):
    data = json.loads(ask(capsys, *line.split(), "--json"))
    return data["plans"][0], data


def test_the_fewest_devices_are_found(capsys):
    line = "gpt2 --tokens 10B --batch 480 --accelerator h100 --gpus-for 2.9h"
    assert best(capsys, line)[0]["cluster"]["devices"] == 3
    job = "llama-70b --tokens 1T --tensor 8 --micro 1"
    plan, _ = best(capsys, f"{job} --accelerator h100 --gpus-for 30days")
    assert plan["days"] <= 30
    fewer = best(capsys, f"{job} --cluster {plan['cluster']['nodes'] - 1}x8xh100")[0]
    assert fewer["days"] > 30


def test_a_given_cluster_is_the_limit_and_keeps_its_nodes(capsys):
    plan, _ = best(capsys, "llama-7b --cluster 1xh100 --tokens 10B --max-cost 100000")
    assert plan["cluster"]["name"] == "1x1xh100"
    plan, _ = best(capsys, "gpt2 --cluster 16x1xh100 --tokens 10B --max-cost 100000")
    assert plan["cluster"]["name"].endswith("x1xh100")


def test_what_a_plan_rests_on_is_said(capsys):
    flags = "--samples 100000 --inputs 2x17:int64 --cluster h100"
    plan, data = best(capsys, f"{HERE}.LastBlockTrained {flags}")
    whole, _ = best(capsys, f"{HERE}.TinyGPT --arg layers=4 {flags}")
    assert any("parameters are trained" in note for note in data["notes"])
    for part in ("gradients", "optimizer"):
        assert plan["memory_bytes"][0][part] < whole["memory_bytes"][0][part]
    _, data = best(capsys, "llama-7b --cluster 8xtpu-v4 --precision 32")
    assert "tpu-v4 has no fp32 rate in the catalogue: precision 32 is timed by that of bf16" in data["notes"]
    plan, data = best(capsys, "gpt2 --cluster 2x4xcpu --recompute full")
    assert 'recompute="full"' in plan["strategy"]
    notes = " ".join(data["notes"])
    assert "cpu comes 1 to a machine" in notes
    assert "TFLOP/s a device" in notes
    _, data = best(capsys, f"{HERE}.Classifier --samples 1000 --cluster 2xh100")
    assert data["job"]["batch"] == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("7b --tokens -3 --cluster h100", "--tokens '-3' must be above 0"),
        ("7b --tokens -5B --cluster h100", "--tokens '-5B' must be above 0"),
        ("7b --tokens 3 --epochs -1 --cluster h100", "--epochs -1 must be above 0"),
        ("7b --tokens 3 --epochs nan --cluster h100", "--epochs nan must be a finite number"),
        ("7b --accelerator h100 --max-cost nan", "--max-cost: budget 'nan' is not an amount"),
        ("7b --cluster h100 --set memory_gb=nan", "memory_gb must be a finite number above 0"),
        ("7b --cluster h100 --set peak_tflops.bf17=4", "has no peak for bf17: did you mean bf16"),
        ("7b --cluster 8xh100 --tensor 3", "--tensor 3 does not divide 8 devices"),
        ("7b --cluster 64xh100 --pipeline 64", "--pipeline 64 is more than its 32 blocks"),
        ("7b --cluster 8xh100 --pipeline 4 --schedule 1f1b --stages-per-rank 2", "one stage on a rank"),
        ("gpt2-xl --cluster 8xh100 --tensor 8", "--tensor 8 must divide each of 25"),
        ("7b --cluster 8xh100 --compare ,", "--compare names nothing"),
        ("7b --cluster 8xh100 --plot /proc/nowhere", "cannot be written"),
        ("7b --tokens 3 --samples 3 --cluster h100", "give one"),
        ("7b --cluster 8xh10", "did you mean h100"),
        ("lama-7b --cluster h100", "did you mean llama-7b"),
        ("7b --cluster 8x8x8xh100", "not NODESxDEVICESxNAME"),
        ("7b", "on what?"),
        ("7b --accelerator h100", "how many h100?"),
        ("7b --accelerator h100 --cluster h100", "give one"),
        ("", "which model?"),
        ("--layers 3 --cluster h100", "missing: hidden, heads"),
        ("7b --layers 3 --cluster h100", "leave out '7b' or the flag"),
        ("gpt3-175b --cluster 4xa100-40g", "does not fit on 1x4xa100-40g"),
        ("7b --tokens 1T --accelerator h100 --gpus-for 1day --max-cost 5", "too little to train within 24.0 h"),
        ("7b --tokens 1T --accelerator h100 --gpus-for 1s", "cannot be met"),
        ("7b --tokens 1T --accelerator h100 --gpus-for 5", "is not a duration"),
        ("7b --accelerator rtx-4090 --max-cost 5", "no price"),
        ("7b --accelerator h100 --max-cost -5", "must be above 0"),
        ("7b --cluster h100 --zero 7", "--zero"),
        ("7b --cluster h100 --batch 0", "at least 1"),
        ("7b --cluster h100 --tensor 0", "--tensor 0"),
        ("7b --cluster h100 --sustained -1", "must be above 0"),
        ("7b --cluster h100 --set memory=3", "did you mean memory_gb"),
        ("7b --cluster h100 --hardware /nowhere.yaml", "does not exist"),
        ("7b --cluster h100 --top 0", "at least 1"),
        ("7b --cluster h100 --compare h100,foo", "no accelerator is called 'foo'"),
        ("/nowhere/config.json --cluster h100", "cannot be read"),
        ("nowhere.Model --cluster h100", "cannot be imported"),
        (f"{HERE}.Nothing --cluster h100", "has no 'Nothing'"),
        (f"{HERE}.TinyGPT --cluster h100", "describe one batch"),
        (f"{HERE}.TinyGPT --cluster h100 --arg depth=3 --inputs 2x17:int64", "unexpected keyword"),
        (f"{HERE}.TinyGPT --cluster h100 --inputs 2by17", "SHAPE:DTYPE"),
        (f"{HERE}.TinyGPT --cluster h100 --inputs 2x17:float32", "cannot be run"),
        (f"{HERE}.NotAModule --cluster h100 --inputs 2x17:int64", "not a LightningModule"),
        ("7b --cluster h100 --frobnicate", "unrecognized arguments"),
        ("7b --cluster 4xh100+4xa100-80g", "every step waits for the slowest rank"),
        ("7b --cluster h100 --for 5h --tokens 3", "--for asks for the amount of data"),
        ("--cluster h100 --for 1s", "trains no GPT of 100m"),
        (f"{HERE}.TinyGPT --cluster h100 --kernels fused --inputs 2x17:int64", "--kernels is for models that"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, line, message):
    assert message in refused(capsys, *line.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_a_worked_example(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"lightning-3d {name} " in capsys.readouterr().out.partition("examples:")[2]


@pytest.mark.long
def test_every_example_of_the_help_works(capsys, monkeypatch, tmp_path):
    from lightning_3d.tools.commands.plan import EXAMPLE

    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "vocab_size": 32000,
                "max_position_embeddings": 2048,
                "intermediate_size": 5632,
            }
        )
    )
    lines = [line.strip() for line in EXAMPLE.splitlines() if line.strip().startswith("lightning-3d")]
    assert len(lines) >= 5
    monkeypatch.chdir(tmp_path)  # one writes plan.html
    for line in lines:
        here = line.replace("path/to", str(tmp_path)).replace("my_package.model.LitGPT", f"{HERE}.TinyGPT")
        assert main(shlex.split(here.replace("n_layer", "layers"))[1:]) == 0, capsys.readouterr().err


COMMAND_LINE = """
import atexit, sys
sys.argv = ["/somewhere/bin/lightning-3d", *sys.argv[1:]]
heavy = ("torch", "lightning", "numpy", "lightning_3d.strategy", "lightning_3d.tools.planner.search")
atexit.register(lambda: print("LOADED", *(name for name in heavy if name in sys.modules)))
from lightning_3d.cli import main
sys.exit(main())
"""


def from_the_shell(*words):
    shown = subprocess.run([sys.executable, "-c", COMMAND_LINE, *words], capture_output=True, text=True, timeout=120)
    text, _, loaded = shown.stdout.partition("LOADED")
    return shown.returncode, text, shown.stderr, loaded.split()


def test_help_and_plans_of_named_models_import_neither_torch_nor_lightning():
    code, text, _, loaded = from_the_shell("--help")
    assert (code, loaded) == (0, [])
    assert all(name in text for name in COMMANDS)
    code, text, _, loaded = from_the_shell("plan", "70b", "--cluster", "1250x8xh100")
    assert (code, loaded) == (0, ["lightning_3d.tools.planner.search"])
    assert "10000 x NVIDIA H100" in text
    assert from_the_shell("plan", "70b", "--cluster", "8xh10")[0] == 2


def test_a_module_that_uses_a_strategy_s_name_when_imported_finds_it():
    flags = ["--inputs", "2x17:int64", "--batch", "8", "--samples", "1000", "--cluster", "2xa100", "--json"]
    code, text, error, _ = from_the_shell("plan", "tests.planner.eager.Eager", *flags)
    assert code == 0, error
    assert json.loads(text)["job"]["model"] == "Eager"


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plam"])
    assert stop.value.code == 2
    assert "plan" in capsys.readouterr().err


def test_pictures(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    ask(capsys, "llama-7b", "--cluster", "8xa100-40g", "--pipeline", "4", "--plot", str(tmp_path / "pictures"))
    written = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert written == ["cost.png", "memory.png", "timetable.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (tmp_path / "pictures").iterdir())

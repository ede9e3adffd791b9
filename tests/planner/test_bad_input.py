"""Bad input is one line that says what, with the numbers, and exit code 2; what only looks odd works."""

import json

import pytest

from lightning_3d.cli import main
from lightning_3d.errors import PlannerError
from lightning_3d.module.amounts import parse_count, parse_duration
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.known_models import transformer_of
from tests.planner.test_models import SMALL

ODD = "tests.planner.odd"
IDS = "--inputs 4x16:int64 --batch 8 --samples 1000 --cluster 2xh100"
pytestmark = pytest.mark.usefixtures("no_user_files")


def code_of(words):
    try:
        return main(words)
    except SystemExit as stop:
        return stop.code


def refused(capsys, *words, command="plan"):
    code = code_of([command, *words])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == "" or "--plot" in words
    assert err.startswith(f"lightning-3d {command}: ") and err.count("\n") == 1
    return err


def answered(capsys, *words):
    code = code_of(["plan", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("price: {dollars: 3}", "did you mean dollars_per_hour"),
        ("price: {date: 2025-06}", "lacks dollars_per_hour"),
        ("price: {dollars_per_hour: '3 $'}", "price.dollars_per_hour must be"),
        ("price: {dollars_per_hour: -3}", "not -3"),
        ("price: cheap", "not 'cheap'"),
        ("peak_tflops: 100", "the peak of each dtype"),
        ("peak_tflops: {}", "the peak of each dtype"),
        ("peak_tflops: {bf16: fast}", "peak_tflops.bf16 must be a finite number above 0"),
        ("peak_tflops: {bf16: 0}", "not 0"),
        ("peak_tflops: {bf16: -1}", "not -1"),
        ("peak_tflops: {bf17: 3}", "did you mean bf16"),
        ("memory_gb: lots", "not 'lots'"),
        ("memory_gb: ", "not None"),
        ("memory_gb: -5", "not -5"),
        ("memory_gb: .nan", "not nan"),
        ("memory_gb: .inf", "not inf"),
        ("memory_gb_per_s: 0", "not 0"),
        ("memory_gb_per_s: 1.0e-300", "not 1e-300"),
        ("matrix_share: 5", "a share above 0 and at most 1"),
        ("devices_per_node: 0", "a whole number from 1"),
        ("devices_per_node: '8'", "not '8'"),
        ("devices_per_node: 2.5", "not 2.5"),
        ("link_domain: -1", "a whole number from 0"),
        ("aliases: {a: b}", "aliases must be a name or a list of them"),
        ("aliases: [[x]]", "aliases must be a name or a list of them"),
        ("title: [1, 2]", "title must be text"),
        ("runs_here: maybe", "runs_here must be true or false"),
        ("like: [h100]", "like must be the name of one other"),
        ("like: nothing", "does not exist"),
        ("name: x", "unknown field 'name'"),
    ],
)
def test_a_wrong_field_of_an_entry_is_named(capsys, tmp_path, entry, message):
    file = tmp_path / "own.yaml"
    file.write_text(f"mine:\n  {entry}\n" + ("" if entry.startswith("like") else "  like: h100\n"))
    err = refused(capsys, "gpt2", "--cluster", "2xmine", "--hardware", str(file))
    assert message in err
    assert "own.yaml: accelerator 'mine'" in err


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"mine:", b"- 1", b"x: [", b"x: {like: h100, link_domain: " + b"9" * 5000 + b"}"]
)
def test_a_file_that_is_no_catalogue_is_named(capsys, tmp_path, content):
    file = tmp_path / "own.yaml"
    file.write_bytes(content)
    assert "own.yaml" in refused(capsys, "gpt2", "--cluster", "2xx", "--hardware", str(file))


@pytest.mark.parametrize(
    ("content", "cluster"),
    [
        ("mine: {like: a100}", "2xmine"),
        ("mine: {like: H100}", "2xMINE"),
        ("mine: {like: h100, price: 3}", "2xmine"),
        ("mine: {like: h100, price: 0, watts: 0, reserved_gb: 0, start_us: 0}", "2xmine"),
        ("mine: {like: h100, aliases: lab}", "2xlab"),
        ("mine: {like: h100, aliases: [Lab]}", "2xLAB"),
        ("mine: {like: h100, aliases: [3070]}", "2x3070"),
        ("7900xtx: {like: h100}", "2x7900xtx"),
        ("7900xtx: {like: h100}", "2x4x7900xtx"),
        ("7900xtx: {like: h100}", "7900xtx"),
        ("5s: {like: h100}", "2x5s"),
        ("my gpu: {like: h100}", "2xmy gpu"),
    ],
)
def test_names_and_entries_that_only_look_odd(capsys, tmp_path, content, cluster):
    file = tmp_path / "own.yaml"
    file.write_text(content)
    answered(capsys, "gpt2", "--cluster", cluster, "--hardware", str(file))


def test_an_alias_hides_no_entry(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("mine: {like: h100, aliases: [a100-80g]}\na100: {like: h200}\n")
    catalogue = Catalogue.load(file)
    assert catalogue.find("a100-80g").name == "a100-80g"
    assert catalogue.find("a100").name == "a100"


def test_a_wrong_entry_of_the_users_folder_is_in_nobodys_way(capsys, tmp_path):
    folder = tmp_path / "user" / "lightning-3d" / "hardware"
    folder.mkdir(parents=True)
    (folder / "half.yaml").write_text("half: {memory_gb: 1000}\nworse: {like: h100, memory_gb: lots, aliases: {}}\n")
    assert "does not fit on 1x8xh100" in refused(capsys, "gpt3-175b", "--cluster", "8xh100", "--tokens", "1B")
    assert "lacks cluster_link_gb_per_s" in refused(capsys, "gpt2", "--cluster", "8xhalf")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpt2 --cluster h100 --set devices_per_node=inf", "not inf"),
        ("gpt2 --cluster h100 --set devices_per_node=nan", "not nan"),
        ("gpt2 --cluster h100 --set devices_per_node=2.7", "a whole number from 1"),
        ("gpt2 --cluster h100 --set matrix_share=5", "a share above 0 and at most 1"),
        ("gpt2 --cluster h100 --set link_share=0", "a share above 0 and at most 1"),
        ("gpt2 --cluster h100 --set peak_tflops=1e300", "1e+09"),
        ("gpt2 --cluster h100 --set memory_gb.x=5", "is not FIELD=VALUE"),
        ("gpt2 --cluster h100 --set price.date=5", "is not FIELD=VALUE"),
        ("gpt2 --cluster h100 --set price=-1", "not -1"),
        ("gpt2 --cluster h100 --price 1e308", "--price must be"),
        ("gpt2 --cluster h100 --price nan", "--price must be"),
        ("gpt2 --cluster h100 --price 3 --set price=2", "both set the price of a device"),
        ("gpt2 --cluster 99999999999999999999xh100", "larger than any"),
        ("gpt2 --cluster 100000x1000xh100", "larger than any"),
        ("gpt2 --cluster h100 --batch 99999999999999999999", "larger than any"),
        ("gpt2 --cluster h100 --tokens 1e308", "no amount of this world"),
        ("gpt2 --accelerator h100 --tokens 1e200 --gpus-for 1day", "no amount of this world"),
        ("gpt2 --cluster h100 --tokens 1T --epochs 1e308", "no amount of this world"),
        ("gpt2 --cluster h100 --tokens 1e20 --epochs 1e20", "no amount of this world"),
        ("gpt2 --cluster h100 --tokens 1T --epochs inf", "must be a finite number"),
        ("gpt2 --cluster h100 --tokens 1", "less than one step of"),
        ("gpt2 --cluster h100 --samples 7 --batch 8", "7 samples of 1,024 tokens are less than one step of 8 samples"),
        ("gpt2 --cluster h100 --tokens 1,5T", "is not an amount"),
        ("gpt2 --cluster h100 --tokens 3e9B", "is not an amount"),
        ("gpt2 --cluster h100 --tokens 15,00", "is not an amount"),
        ("gpt2 --cluster h100 --sustained 5000", "above the peak of h100, 989"),
        ("gpt2 --accelerator h100 --max-cost inf", "--max-cost: budget 'inf' is not an amount"),
        ("gpt2 --accelerator h100 --gpus-for 1e400days", "must be a finite number"),
        ("gpt2 --accelerator h100 --gpus-for 1e-300s", "no amount of this world"),
        ("gpt2 --cluster h100 --epochs 3", "--epochs multiplies --tokens or --samples"),
        ("gpt2 --cluster h100 --compare h100,a100 --accelerator h100", "both name the hardware"),
        ("gpt2 --cluster 2xh100 --pipeline 1 --schedule gpipe", "--schedule has no effect with --pipeline 1"),
        ("gpt2 --cluster 2xh100 --pipeline 1 --stages-per-rank 2", "--stages-per-rank has no effect with --pipeline 1"),
        ("gpt2 --cluster h100 --sequence 0", "--sequence 0 must be at least 1"),
        ("gpt2 --cluster h100 --sequence 99999999999999999999", "at most 1e+09 tokens"),
        ("0.0001m --cluster h100", "little more than its embeddings"),
    ],
)
def test_numbers_and_flags(capsys, line, message):
    assert message in refused(capsys, *line.split())


@pytest.mark.parametrize(("flag", "message"), [("--plot", "names no file"), ("--cluster", "on what?")])
def test_empty_words(capsys, flag, message):
    assert message in refused(capsys, "gpt2", *([] if flag == "--cluster" else ["--cluster", "h100"]), flag, "")
    assert "which model?" in refused(capsys, "", "--cluster", "h100")


def test_amounts_as_people_write_them(capsys):
    assert [parse_count(text, "x") for text in ("1,500,000", "1_500_000", "1.5 T", "2E9")] == [
        1.5e6,
        1.5e6,
        1.5e12,
        2e9,
    ]
    assert [parse_duration(text) / 86400 for text in ("1 month", "2 months", "1,000 days")] == [30, 60, 1000]
    for allowed in ("reserved_gb=0", "watts=0", "price.dollars_per_hour=2", "link_domain=0"):
        answered(capsys, "gpt2", "--cluster", "h100", "--set", allowed)
    for budget in ("$50,000", "50k", "50000"):
        answered(capsys, "gpt2", "--accelerator", "h100", "--tokens", "1B", "--max-cost", budget)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{ODD}_syntax.X {IDS}", "SyntaxError"),
        (f"{ODD}_fails.X {IDS}", "RuntimeError: of no use"),
        (f"{ODD}_opens.X {IDS}", "FileNotFoundError"),
        (f"{ODD}_exits.X {IDS}", "it calls sys.exit(3)"),
        (f"{ODD}.Exits {IDS}", "it calls sys.exit(7)"),
        (f"{ODD}.FailsToConfigure {IDS}", "configure_model of tests.planner.odd.FailsToConfigure fails: RuntimeError"),
        (f"{ODD}.Good {IDS} --attention eager", "--attention is for models"),
        (f"{ODD}.Good {IDS} --sequence 8", "leave out --sequence"),
        (f"{ODD}.Good --sequence -3 --cluster h100", "--sequence -3 must be at least 1"),
        (f"{ODD}.Tuple --sequence 8 --cluster h100", "has an example_input_array"),
        (f"{ODD}.Empty --cluster h100", "has no samples"),
        (f"{ODD}.NoStep --inputs 4x8:float32 --cluster h100", "has no training_step"),
        (f"{ODD}.NoParameters --inputs 4x8:float32 --cluster h100", "has no parameters"),
        (f"{ODD}.NoLoss {IDS}", "returns no loss"),
        (f"{ODD}.ReadsValues {IDS}", "depends on the values of tensors"),
        (f"{ODD}.AsksTheTrainer {IDS}", "without a Trainer"),
        (f"{ODD}.Good --inputs 0x16:int64 --cluster h100", "an empty batch"),
        (f"{ODD}.Good --inputs 4x0:int64 --cluster h100", "an empty batch"),
        (f"{ODD}.Good --inputs 4x16:quint8 --cluster h100", "'quint8' is not one of int64"),
        (f"{ODD}.Good --inputs 999999999999x99999999:int64 --cluster h100", "1.0e+20 elements"),
        (f"{ODD}.Good --inputs 99999999999999999999x4:int64 --cluster h100", "is not SHAPE:DTYPE"),
    ],
)
def test_a_module_that_cannot_be_planned(capsys, tmp_path, monkeypatch, line, message):
    for name, text in {
        "syntax": "def f(:\n",
        "fails": "raise RuntimeError('of no\\nuse')\n",
        "opens": "open('/nowhere/at/all')\n",
        "exits": "import sys\nsys.exit(3)\n",
    }.items():
        (tmp_path / f"odd_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    err = refused(capsys, *line.replace(f"{ODD}_", "odd_").split())
    assert message in err
    assert "describe a batch" not in err or "--inputs" not in line.split()


@pytest.mark.parametrize("name", ["Good", "NoIndex", "Tuple", "Dict"])
def test_a_module_that_only_looks_odd(capsys, name):
    inputs = "--inputs 4x16:int64" if name in ("Good", "NoIndex") else ""
    line = f"{ODD}.{name} {inputs} --batch 8 --samples 1000 --cluster 2xh100 --json"
    assert json.loads(answered(capsys, *line.split()))["job"]["tokens_per_sample"] == 16


def test_what_a_module_prints_is_not_in_the_json(capsys):
    assert json.loads(answered(capsys, f"{ODD}.Prints", *IDS.split(), "--json"))["job"]["model"] == "Prints"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"model_type": ["llama"]}', "is not one that the planner counts"),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "is not JSON that can be read"),
        (b'{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1' + b"0" * 200 + b"}", "hidden_size=1000"),
        (b"[" * 100_000, "is not JSON that can be read"),
    ],
)
def test_a_config_that_cannot_be_read(capsys, tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    assert message in refused(capsys, str(tmp_path), "--cluster", "h100")


LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SMALL}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"model_type": "gemma"}, "lacks head_dim"),
        ({"model_type": "qwen3"}, "lacks head_dim"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "lacks num_key_value_heads"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"tie_word_embeddings": "false"}, "must be true or false"),
        ({"attention_bias": 1}, "must be true or false"),
        ({"model_type": "opt"}, "lacks ffn_dim"),
        ({"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16}, "word_embed_proj_dim=16"),
        ({"model_type": "opt", "ffn_dim": 48, "do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ({"num_hidden_layers": 10**9}, "at most 100,000"),
    ],
)
def test_what_a_config_leaves_out_is_not_guessed(change, message):
    with pytest.raises(PlannerError, match=message):
        transformer_of({**LLAMA, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
        {"model_type": "gemma", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2", "mlp_bias": True, "attention_bias": True},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "opt", "ffn_dim": 48, "enable_bias": False, "word_embed_proj_dim": 32},
        {"model_type": "gpt2", "head_dim": 99, "intermediate_size": 7, "attention_bias": True},
        {"model_type": "gpt_neox", "attention_bias": False, "head_dim": 99},
    ],
)
def test_switches_count_as_transformers_builds_them(change):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = {**LLAMA, **change}
    with torch.device("meta"):
        settings = {name: value for name, value in given.items() if name != "model_type"}
        config = transformers.AutoConfig.for_model(given["model_type"], **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert transformer_of(given).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_null_is_the_default_of_the_family():
    tied = {family: {**LLAMA, "model_type": family, "tie_word_embeddings": None} for family in ("gpt2", "llama")}
    assert transformer_of(tied["gpt2"]).tied
    assert not transformer_of(tied["llama"]).tied


def test_a_dry_run_says_why_there_is_nothing_to_show(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(5)\n")
    said = refused(capsys, str(script), "--cluster", "4xcpu", command="dry-run")
    assert "called sys.exit(5) before its trainer.fit ended" in said
    said = refused(capsys, str(script), "--cluster", "4xtpu-v4", command="dry-run")
    assert "lightning_3d does not run on it" in said
    assert "cannot be split" in refused(capsys, str(script), "--cluster", "4xcpu", "--args", "'", command="dry-run")


def test_a_place_to_write_a_calibration(capsys, tmp_path):
    assert "is a folder" in refused(capsys, "--output", str(tmp_path), command="calibrate")

"""The examples run on tiny sizes, and what they train does not depend on the number of ranks."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from forked_scripts import torchrun_variables
from isolated_libraries import missing_libraries
from page_blocks import ROOT
from safetensors.torch import load_file
from transformers import LlamaConfig

from booster_core.plugin import load
from booster_core.run_settings import RunSettings

EXAMPLES = ROOT / "examples"
TRANSFORMER = "vision_transformer.py"


@pytest.fixture
def run(scripts, tmp_path):
    """Run an example on ranks in a folder of its own, and return the numbers of the last line."""

    def run_on(name, *arguments, ranks=1, through=None, plugin=None):
        script, before = (EXAMPLES / name, []) if through is None else (through, [EXAMPLES / name])
        variables = torchrun_variables(ranks) if ranks > 1 else ()
        if plugin is not None:
            settings = {"BOOSTER_SETTINGS": json.dumps({"plugin": plugin})}
            variables = [{**each, **settings} for each in variables]
        done = scripts.run(script, [[*before, *arguments]] * ranks, variables, tmp_path)
        assert set(done.codes) == {0}, done.output
        line = [line for line in done.output.splitlines() if re.search(r"\d$|images$", line)][-1]
        return [float(number) for number in re.findall(r"(?<![\w.])-?\d+\.\d+", line)]

    return run_on


def test_adapters_train_and_go_on(run, tmp_path):
    share, before, after = run("lora.py", "--plugin", "zero", "--steps", 6, ranks=2)
    assert share < 20
    assert after < before
    first = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    resumed = ["--plugin", "fsdp", "--resume", "adapters", "--out", "later", "--steps", 1]
    _, again, _ = run("lora.py", *resumed, ranks=2)
    assert again < before
    later = load_file(tmp_path / "later" / "adapter_model.safetensors")
    assert later.keys() == first.keys()


def test_a_recipe_trains_and_goes_on(run, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaConfig(vocab_size=256, tie_word_embeddings=False, **sizes).save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    options = ["--model", "tiny", "--text", "text.txt", "--length", 32, "--from-scratch", "--learning-rate", 1e-2]
    before, after = run("recipes/pretrain.py", *options, "--samples", 2, "--steps", 4, ranks=2, plugin="zero")
    assert after < before
    again, last = run("recipes/pretrain.py", *options, "--samples", 4, "--steps", 8)
    assert last < again < before


@pytest.mark.parametrize("file", sorted((EXAMPLES / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_settings_of_recipes_are_options_of_their_plugin(file):
    settings = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11").loads(
        file.read_text(encoding="utf-8")
    )
    chosen = RunSettings(**{name: settings[name] for name in ("plugin", "options", "precision") if name in settings})
    assert chosen.make_plugin(load(chosen.plugin)).name == chosen.plugin


@pytest.mark.slow  # bitsandbytes loads slowly; the plugins have tests of their own
@pytest.mark.skipif(bool(missing_libraries(["bitsandbytes"])), reason="needs bitsandbytes, which quantises the base")
def test_adapters_train_over_a_base_in_few_bits(run):
    through = ROOT / "tests" / "together" / "examples" / "with_torchvision.py"
    _, before, after = run("lora.py", "--plugin", "ddp", "--quantize", "--steps", 6, ranks=2, through=through)
    assert after < before


def test_a_stream_trains_alike_on_any_number_of_ranks(run):
    options = ["--files", 1, "--length", 64, "--hidden", 32, "--layers", 1]
    *_, before, after = run("pretrain_stream.py", "--steps", 4, "--batch-size", 4, *options)
    assert after < before
    split = ["--batch-size", 2, "--plugin", "zero", *options]
    *_, first, last = run("pretrain_stream.py", "--steps", 4, *split, ranks=2)
    assert [first, last] == pytest.approx([before, after], rel=1e-3)
    *_, later, _ = run("pretrain_stream.py", "--steps", 5, "--resume", *split, ranks=2)
    assert later < before


@pytest.mark.parametrize(
    ("options", "least"), [(["--images", 256, "--epochs", 1], 0), pytest.param([], 40, marks=pytest.mark.slow)]
)
def test_a_resnet_tells_shapes_apart(run, options, least):
    batch = ["--plugin", "ddp", "--batch-size", 32]
    loss, accuracy = run("resnet.py", *batch, *options, ranks=2)
    assert loss < 3
    assert accuracy > least  # percent, of ten shapes


def test_answers_are_learned_alike_on_any_number_of_ranks(run):
    options = ["--steps", 6, "--length", 32]
    _, before, after = run("supervised_finetuning.py", "--batch-size", 4, *options)
    assert after < before
    _, *losses = run("supervised_finetuning.py", "--batch-size", 2, "--plugin", "zero", *options, ranks=2)
    assert losses == pytest.approx([before, after], rel=1e-3)


def test_a_gan_gives_the_same_points_on_any_number_of_ranks(run, tmp_path):
    expected = run("gan.py", "--epochs", 1)
    plain = load_file(tmp_path / "generator.safetensors")
    assert run("gan.py", "--epochs", 1, "--plugin", "zero", "--batch-size", 32, ranks=2) == pytest.approx(
        expected, rel=1e-3
    )
    for name, value in load_file(tmp_path / "generator.safetensors").items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-5)


def test_a_student_under_one_plugin_learns_from_a_teacher_under_another(run, tmp_path):
    arguments = ["--plugin", "zero", "--teacher-plugin", "fsdp", "--steps", 8]
    before, after = run("distillation.py", *arguments, ranks=2)
    assert 0 < after < before
    assert (tmp_path / "student" / "config.json").exists()


@pytest.mark.parametrize("plugin", ["zero", "fsdp", "gemini"])
@pytest.mark.parametrize("name", ["grpo.py", "vision_language.py", "diffusion.py"])
def test_language_images_and_rewards_are_learned(run, name, plugin):
    before, after = run(name, "--plugin", plugin, ranks=2)
    assert after > before if name == "grpo.py" else after < before


_DIGITS = ["sklearn", "scipy", "joblib", "threadpoolctl", "narwhals"]


@pytest.mark.slow  # three epochs in a minute; the example with ResNet reads images too
@pytest.mark.skipif(bool(missing_libraries(_DIGITS)), reason="the digits are part of scikit-learn")
def test_a_vision_transformer_reads_digits(run):
    through = ROOT / "tests" / "together" / "examples" / "with_torchvision.py"
    arguments = ["--plugin", "ddp", "--epochs", 3, "--batch-size", 16]
    (accuracy,) = run(TRANSFORMER, *arguments, ranks=2, through=through)
    assert accuracy > 35  # percent, of ten digits


def test_spread_experts_train_as_those_of_one_process(run):
    expected = run("mixture_of_experts.py", "--steps", 4)
    found = run("mixture_of_experts.py", "--steps", 4, "--ep-size", 2, "--batch-size", 2, ranks=2)
    assert found == pytest.approx(expected, rel=2e-3)  # the load-balancing loss is a mean over ranks' batches
    assert expected[1] < expected[0]


def test_parts_of_long_sequences_train_as_the_whole(run):
    expected = run("long_context.py", "--length", 256, "--steps", 3)
    found = run("long_context.py", "--length", 256, "--steps", 3, "--sp-size", 2, ranks=2)
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[1] < expected[0]


def test_gemini_trains_a_model_from_disk(run, tmp_path):
    state_mib, before, after = run("gemini_from_disk.py", "--disk", tmp_path, ranks=2)
    assert state_mib > 4  # in a budget of 2
    assert after < before
    assert (tmp_path / "run" / "latest").read_text().strip() == "step-00000005"


def test_cluster_files_start_an_example_with_its_arguments():
    script = EXAMPLES / "clusters" / "pretrain.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    command = re.search(r"^srun [^\n]*? python (.+)$", script.read_text(), re.MULTILINE)[1].split()
    job = yaml.safe_load((EXAMPLES / "clusters" / "pretrain.yaml").read_text())
    roles = job["spec"]["pytorchReplicaSpecs"]
    commands = {tuple(role["template"]["spec"]["containers"][0]["command"]) for role in roles.values()}
    assert commands == {("python", *command)}
    runtime, trained = yaml.safe_load_all((EXAMPLES / "clusters" / "pretrain_trainjob.yaml").read_text())
    assert trained["spec"]["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].split("/")[0],
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert trained["spec"]["trainer"]["command"] == ["torchrun", *command]
    task = yaml.safe_load((EXAMPLES / "clusters" / "pretrain.sky.yaml").read_text())
    assert set(re.findall(r"packages/\S+", task["setup"])) == {
        f"packages/booster-{name}" for name in ("core", "runtime", "checkpoint", "zero")
    }
    (target,) = task["file_mounts"]
    assert " ".join(command) + f" --root {target}/" in task["run"]
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
    assert (ROOT / command[0]).exists()


@pytest.mark.slow  # in new interpreters
def test_the_batch_script_trains(tmp_path):
    for launcher in (ROOT / "tests" / "shared" / "launchers").iterdir():
        (tmp_path / "bin").mkdir(exist_ok=True)
        shutil.copy(launcher, tmp_path / "bin")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sbatch", "examples/clusters/pretrain.sbatch"],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "resume_training" / "latest").exists()

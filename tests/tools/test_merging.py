"""``booster merge-lora``: the folder that it writes gives the logits of the adapted model."""

import json

import peft
import pytest
import torch
from command_runs import command_runner

from booster_core import Booster
from booster_core.cli import main
from booster_testing.models import tiny_llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from transformers import LlamaForCausalLM

    root = tmp_path_factory.mktemp("merge")
    torch.manual_seed(0)
    tiny_llama(tie_word_embeddings=True).bfloat16().save_pretrained(root / "base")
    base = LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    (root / "base" / "tokenizer_config.json").write_text("{}")
    booster = Booster()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    adapted = booster.enable_lora(base, lora_config=lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    boosted, *_ = booster.boost(adapted)
    booster.save_lora_as_pretrained(boosted, root / "adapters")
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        return root, tokens, boosted.eval()(tokens).logits


def run(*arguments):
    return command_runner().invoke(main, ["merge-lora", *map(str, arguments)])


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), (None, 5e-2)])
def test_the_merged_folder_has_the_adapted_models_logits(folders, tmp_path, dtype, tolerance):
    from transformers import AutoModelForCausalLM

    root, tokens, expected = folders
    options = [] if dtype is None else ["--dtype", dtype]
    done = run(root / "adapters", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert merged.dtype == (torch.bfloat16 if dtype is None else torch.float32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(merged.dtype)[6:]
    with torch.no_grad():
        torch.testing.assert_close(merged.float()(tokens).logits, expected.float(), rtol=tolerance, atol=tolerance)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer_config.json" in names
    assert not [name for name in names if name.startswith("adapter_")]


def test_mistakes_are_told(folders, tmp_path):
    root, *_ = folders
    for arguments, text in (
        ([root / "base", tmp_path / "out"], "holds no 'adapter_config.json'"),
        ([root / "adapters", root / "base"], "is not empty"),
        ([root / "adapters", tmp_path / "out", "--base", tmp_path / "absent"], "can't be merged into"),
    ):
        done = run(*arguments)
        assert done.exit_code == 1
        assert text in done.stderr
    assert not (tmp_path / "out").exists()

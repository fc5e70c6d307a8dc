"""Fine-tuning of a causal language model: on many devices as in plain PyTorch, and resumed."""

import re

import pytest
import torch


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the arguments that name a tiny model, its tokenizer and two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("causal_lm")
    words = [f"w{number}" for number in range(30)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes)).save_pretrained(folder / "model")
    for name, num_words in (("train", 8 * 16), ("validation", 8 * 5)):  # 16 and 5 samples: ranks share them unevenly
        text = " ".join(words[(index * index) % 30] for index in range(num_words))
        (folder / f"{name}.txt").write_text(text)
    return ["--model", folder / "model", "--train", folder / "train.txt", "--validation", folder / "validation.txt"]


@pytest.fixture(scope="module")
def finetune(run_example, files, tmp_path_factory):
    """Run a script in a folder, and return the perplexities by epoch, the folder, and the model."""

    def run(script, *arguments, folder=None, nproc=None, batch_size=4):
        folder = folder or tmp_path_factory.mktemp("run")
        own = ["--length", 8, "--batch-size", batch_size, "--lr", 3e-3, *arguments]
        output = run_example(f"causal_lm/{script}", *map(str, [*files, *own]), cwd=folder, nproc=nproc)
        found = re.findall(r"^epoch (\d+): perplexity (\S+)$", output, re.MULTILINE)
        return {int(epoch): float(value) for epoch, value in found}, folder

    return run


@pytest.fixture(scope="module")
def plain(finetune):
    perplexities, folder = finetune("plain.py")
    assert perplexities[2] < perplexities[1] < 30
    return perplexities, folder


def _weights(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()


def _assert_same(run, plain):
    from booster_testing.compare import ADAPTIVE, assert_same_tensors

    assert run[0] == pytest.approx(plain[0], rel=2e-4)  # printed with four digits
    assert_same_tensors(_weights(run[1]), _weights(plain[1]), ADAPTIVE)


def test_one_process_gives_the_model_of_plain_pytorch(finetune, plain):
    _assert_same(finetune("finetune.py"), plain)


@pytest.mark.slow  # more runs of the script; plugins are compared with one process in many other tests
@pytest.mark.parametrize("plugin", ["ddp", "zero", "fsdp", "gemini"])
def test_two_ranks_give_the_model_of_plain_pytorch(finetune, plain, plugin):
    _assert_same(finetune("finetune.py", "--plugin", plugin, nproc=2, batch_size=2), plain)


@pytest.mark.slow
def test_a_run_that_is_resumed_on_two_ranks_gives_the_model_of_plain_pytorch(finetune, plain):
    first, folder = finetune("finetune.py", "--epochs", "1")
    second, _ = finetune("finetune.py", "--plugin", "zero", folder=folder, nproc=2, batch_size=2)
    assert second.keys() == {2}
    _assert_same(({**first, **second}, folder), plain)

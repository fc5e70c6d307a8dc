"""``push_to_hub`` of a boosted model: the whole model is uploaded, once, by rank 0."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file

from booster_core import Booster
from booster_core.errors import ConfigError, RankFailedError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama


class FakeHub:
    """Notes what is uploaded; there is no network in tests."""

    uploaded = None

    def __init__(self, token):
        self.token = token

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        assert private
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message, revision, create_pr):
        assert (repo_id, commit_message, revision, create_pr) == ("me/model", "Upload model", None, False)
        files = sorted(Path(folder_path).iterdir())
        tensors = [load_file(path) for path in files if path.suffix == ".safetensors"]
        FakeHub.uploaded = [path.name for path in files], {name: each for one in tensors for name, each in one.items()}
        return SimpleNamespace(commit_url="https://hub/commit")


class NoHub(FakeHub):
    def upload_folder(self, **_):
        msg = "the Hub is away"
        raise OSError(msg)


def push(plugin, hub=FakeHub, lora=None, **options):
    torch.manual_seed(0)
    booster = Booster("cpu", plugin=PLUGINS[plugin]())
    model = tiny_llama()
    if lora is not None:
        model = booster.enable_lora(model, lora_config=lora)
    model, *_ = booster.boost(model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad]))
    FakeHub.uploaded = None
    with mock.patch.object(huggingface_hub, "HfApi", hub):
        address = model.push_to_hub("model", private=True, **options)
    assert address == "https://hub/commit"
    return FakeHub.uploaded


PLUGINS = {
    **{name: lambda name=name: name for name in ("ddp", "fsdp", "zero", "gemini")},
    "tensor parallel": lambda: HybridParallelPlugin(tp_size=2),
    "pipeline": lambda: HybridParallelPlugin(pp_size=2),
}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_whole_model_is_uploaded_by_rank_0(plugin):
    (files, tensors), other = run_on_ranks(push, 2, plugin)
    assert other is None
    assert "config.json" in files
    torch.manual_seed(0)
    expected = tiny_llama().state_dict()
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_adapters_alone_are_uploaded():
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    (files, tensors), _ = run_on_ranks(push, 2, "zero", lora=lora)
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert all("lora" in name for name in tensors)


def test_a_folder_keeps_the_files(tmp_path):
    run_on_ranks(push, 2, "zero", folder=tmp_path / "kept")
    assert (tmp_path / "kept" / "config.json").exists()
    expect_on_ranks(ConfigError, "has files", push, 2, "zero", folder=tmp_path / "kept")


def test_a_failure_is_raised_on_every_rank():
    expect_on_ranks((OSError, RankFailedError), "the Hub is away", push, 2, "zero", NoHub)

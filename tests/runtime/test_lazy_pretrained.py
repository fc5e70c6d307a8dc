"""Lazy models whose values come from files: nothing is read before, and only what is kept is read at all."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from booster_checkpoint.files import safetensors_file
from booster_core import Booster
from booster_core.errors import CheckpointError, LazyInitError
from booster_core.state.shard import TensorShard, box_shape, full_box
from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, load_pretrained, materialize, take_recording
from booster_testing.models import TinyMLP, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path, request: Any) -> Path:
    torch.manual_seed(4)
    tiny_llama(**getattr(request, "param", {})).save_pretrained(tmp_path)
    return tmp_path


def from_pretrained(folder: Path, **changes: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    return joined(LlamaForCausalLM.from_pretrained(folder, **changes))


def lazily(folder: Path, **changes: Any) -> nn.Module:
    with LazyInitContext():
        return from_pretrained(folder, **changes)


def joined(model: nn.Module) -> nn.Module:
    """Wait for the threads that transformers loads with; it tells them to end and goes on."""
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()
    return model


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_state(lazy: nn.Module, eager: nn.Module) -> None:
    expected = state_of(eager)
    assert state_of(lazy).keys() == expected.keys()
    for name, tensor in state_of(lazy).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def shard_of(name: str, whole: torch.Tensor, box: Any, dtype: torch.dtype = torch.float32) -> TensorShard:
    data = torch.empty(box_shape(box), dtype=dtype)
    return TensorShard(name=name, global_shape=tuple(whole.shape), dtype=dtype, box=box, data=data)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count what is read of tensors' values."""
    counted: list[int] = []
    original = safetensors_file.SafetensorsFile.read

    def read(self: Any, key: str, box: Any, out: torch.Tensor) -> None:
        counted.append(out.nbytes)
        original(self, key, box, out)

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read", read)
    return counted


@pytest.mark.parametrize("folder", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_inside_equals_outside(folder, dtype) -> None:
    eager = from_pretrained(folder, dtype=dtype)
    before = torch.get_rng_state()
    with LazyInitContext() as context:
        lazy = from_pretrained(folder, dtype=dtype)
    assert is_lazy(lazy)
    materialize(lazy)
    assert_same_state(lazy, eager)
    assert torch.equal(torch.get_rng_state(), before)
    assert context.run_eagerly == {}
    ties = [model.lm_head.weight is model.model.embed_tokens.weight for model in (lazy, eager)]
    assert ties[0] == ties[1]


def test_what_the_files_lack_is_initialised(folder) -> None:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(8)
    eager = joined(LlamaForSequenceClassification.from_pretrained(folder, num_labels=3))
    expected_state = torch.get_rng_state()
    torch.manual_seed(8)
    with LazyInitContext():
        lazy = joined(LlamaForSequenceClassification.from_pretrained(folder, num_labels=3))
    materialize(lazy)
    assert_same_state(lazy, eager)
    assert torch.equal(torch.get_rng_state(), expected_state)


def test_sharded_files_are_read(tmp_path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_state(materialize(lazily(tmp_path)), from_pretrained(tmp_path))


def test_nothing_is_read_inside_of_the_context(folder, bytes_read) -> None:
    model = lazily(folder)
    assert sum(bytes_read) == 0
    materialize(model)
    assert sum(bytes_read) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_read_their_ranges_only(folder, dtype, bytes_read) -> None:
    eager = from_pretrained(folder, dtype=dtype)
    bytes_read.clear()
    lazy = lazily(folder, dtype=dtype)
    recording = take_recording(lazy)
    shards = []
    for name, parameter in lazy.named_parameters():
        rows, *others = full_box(tuple(parameter.shape))
        shards.append(shard_of(name, parameter, ((rows[1] // 4, rows[1] // 2), *others), dtype))
    recording.fill(shards, "cpu")
    assert sum(bytes_read) == sum(4 * shard.numel for shard in shards)
    for shard in shards:
        rows = slice(*shard.box[0])
        assert torch.equal(shard.data, eager.get_parameter(shard.name)[rows]), shard.name
    for name, buffer in eager.named_buffers():
        assert torch.equal(lazy.get_buffer(name), buffer)


def test_flat_shards_read_their_ranges_only(folder, bytes_read) -> None:
    eager = from_pretrained(folder)
    bytes_read.clear()
    parameters = dict((lazy := lazily(folder)).named_parameters())
    recording = take_recording(lazy)
    name = "model.embed_tokens.weight"
    whole = parameters.pop(name)
    shard = replace(shard_of(name, whole, full_box(tuple(whole.shape))), flat=(33, 83), data=torch.empty(50))
    others = [shard_of(other, each, tuple((0, 0) for _ in each.shape)) for other, each in parameters.items()]
    recording.fill([shard, *others], "cpu")
    assert torch.equal(shard.data, eager.get_parameter(name).flatten()[33:83])
    assert sum(bytes_read) == 200


def test_a_converted_tensor_is_read_into_its_own_dtype_first(folder) -> None:
    lazy, eager = lazily(folder, dtype=torch.bfloat16), from_pretrained(folder, dtype=torch.bfloat16)
    recording = take_recording(lazy)
    name = "model.norm.weight"
    shard = shard_of(name, eager.get_parameter(name), full_box(tuple(eager.get_parameter(name).shape)))
    recording.fill([shard], "cpu")
    assert torch.equal(shard.data, eager.get_parameter(name).float())


@pytest.mark.parametrize("folder", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"], indirect=True)
def test_load_pretrained_runs_no_initialiser(folder, monkeypatch) -> None:
    eager = from_pretrained(folder)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    with LazyInitContext() as context:
        lazy = tiny_llama(tie_word_embeddings=eager.config.tie_word_embeddings)
    report = load_pretrained(lazy, folder)
    assert report.is_complete
    ran: list[str] = []
    for entry in context.recorder.entries:
        original = entry.function
        entry.function = lambda *args, _original=original, _name=entry.name, **kwargs: (
            ran.append(_name),
            _original(*args, **kwargs),
        )[1]
    materialize(lazy)
    assert not {name for name in ran if "normal" in name or "uniform" in name}
    assert_same_state(lazy, eager)
    assert torch.equal(torch.get_rng_state(), before)


def test_load_pretrained_keeps_what_the_files_lack(tmp_path) -> None:
    from booster_checkpoint.load.source import Source

    torch.manual_seed(1)
    booster = Booster()
    booster.save_model(TinyMLP(), tmp_path / "model.safetensors")

    class Larger(TinyMLP):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

    torch.manual_seed(7)
    eager = Larger()
    torch.manual_seed(7)
    with LazyInitContext():
        lazy = Larger()
    with pytest.raises(CheckpointError, match=r"2 tensors are missing: 'head\.weight', 'head\.bias'"):
        load_pretrained(lazy, tmp_path)
    report = load_pretrained(lazy, tmp_path, strict=False)
    assert set(report.missing) == {"head.weight", "head.bias"}
    materialize(lazy)
    assert torch.equal(lazy.head.weight, eager.head.weight)
    assert torch.equal(lazy.first.weight, Source(tmp_path, "model").read_whole("first.weight"))


def test_files_that_changed_or_are_gone_are_named(folder) -> None:
    model, other = lazily(folder), lazily(folder)
    tiny_llama(hidden_size=64).save_pretrained(folder)
    with pytest.raises(LazyInitError, match=r"was changed: '.*' was \(.*, and is \(.*Keep the files"):
        materialize(model)
    (folder / "model.safetensors").unlink()
    with pytest.raises(LazyInitError, match=r"can't be read any more.*Keep the files until the model is boosted"):
        materialize(other)


def test_transformers_may_be_imported_inside_of_the_block(folder) -> None:
    script = f"""
import sys
import torch
from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy
assert "transformers.modeling_utils" not in sys.modules
with LazyInitContext():
    from transformers import LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained({str(folder)!r})
    assert type(model.lm_head.weight.data) is not torch.Tensor
assert is_lazy(model)
assert sys.modules["transformers.modeling_utils"].safe_open is sys.modules["safetensors"].safe_open
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_other_threads_read_real_tensors_meanwhile(folder) -> None:
    from transformers import modeling_utils

    found: list[torch.Tensor] = []

    def read() -> None:
        with modeling_utils.safe_open(folder / "model.safetensors", "pt") as file:
            found.append(file.get_tensor("model.norm.weight"))

    with LazyInitContext():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        read()
    assert [type(tensor) is torch.Tensor for tensor in found] == [True, False]
    assert torch.equal(found[0], torch.ones(found[0].shape))


def test_bin_files_load_inside_of_the_context(tmp_path) -> None:
    model = tiny_llama()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    assert_same_state(materialize(lazily(tmp_path)), model)

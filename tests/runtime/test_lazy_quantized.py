"""Lazy models of releases in block FP8 and MXFP4: their values, what is read for a part, and ways past the context."""

import pytest
import torch

from booster_checkpoint.files import safetensors_file
from booster_core.errors import LazyInitError
from booster_core.state.shard import TensorShard, box_shape, full_box
from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, load_pretrained, materialize, take_recording

transformers = pytest.importorskip("transformers", "5.20", reason="earlier ones dequantize less")
pytest.importorskip("accelerate", reason="transformers reads FP8 with it")

from quantized_folders import BLOCK, FAMILIES, build, change_config, read_by_transformers, write_release  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


def from_pretrained(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_transformers(family, dtype, tmp_path):
    write_release(family, tmp_path)
    expected = read_by_transformers(family, tmp_path, dtype)
    with LazyInitContext() as context:
        model = from_pretrained(tmp_path, dtype=dtype)
        other = build(family, dtype=dtype)
    load_pretrained(other, tmp_path)
    assert not hasattr(model.config, "quantization_config")
    assert not context.run_eagerly
    for lazy in (model, other):
        assert is_lazy(lazy)
        materialize(lazy)
        found = lazy.state_dict()
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], values.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_shard_reads_its_blocks_only(dtype, tmp_path, monkeypatch):
    """Also one in fp32 of a model in bf16, whose values are rounded as the model's."""
    write_release("llama", tmp_path)
    expected = read_by_transformers("llama", tmp_path, torch.bfloat16)
    with LazyInitContext():
        model = from_pretrained(tmp_path, dtype=torch.bfloat16)
    recording, shards = take_recording(model), []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        box = ((0, shape[0] // 2), *full_box(shape)[1:])
        data = torch.empty(box_shape(box), dtype=dtype)
        shards.append(TensorShard(name=name, global_shape=shape, dtype=dtype, box=box, data=data))
    read, original = [0], safetensors_file.SafetensorsFile.read

    def counted(file, key, box, out):
        read[0] += out.nbytes
        original(file, key, box, out)

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read", counted)
    recording.fill(shards, "cpu")
    wanted = 0
    for shard in shards:
        assert torch.equal(shard.data, expected[shard.name][: len(shard.data)].to(dtype)), shard.name
        blocks = [-(-size // each) for size, each in zip(shard.data.shape, BLOCK, strict=False)]
        is_quantized = "_proj" in shard.name
        wanted += shard.numel + 4 * blocks[0] * blocks[1] if is_quantized else 2 * shard.numel
    assert read[0] == wanted


def test_another_way_to_read_is_an_error(tmp_path):
    """transformers itself would take weights without their scales."""
    write_release("llama", tmp_path)
    with pytest.raises(LazyInitError, match=r"read them by another way .* Leave out `disable_mmap`"), LazyInitContext():
        from_pretrained(tmp_path, disable_mmap=True)


def test_other_forms_are_left_to_transformers(tmp_path):
    write_release("llama", tmp_path)
    change_config(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ImportError, match="GPTQ"), LazyInitContext():
        from_pretrained(tmp_path)

"""Releases in block FP8 and MXFP4: values are those that transformers dequantizes, bit for bit, also in parts."""

import json

import pytest
import torch
from engine_calls import load_module as load
from engine_calls import save_module
from safetensors.torch import load_file, save_file

from booster_checkpoint import CheckpointEngine
from booster_checkpoint.load.source import open_source
from booster_checkpoint.storage import locate
from booster_checkpoint.tools.convert import convert
from booster_core.errors import CheckpointError
from booster_core.state import TensorShard, slices_of

transformers = pytest.importorskip("transformers", "5.20", reason="earlier ones dequantize less")
pytest.importorskip("accelerate", reason="transformers reads FP8 with it")

from expert_folders import assert_same, tensors_in  # noqa: E402
from quantized_folders import BLOCK, FAMILIES, build, change_config, read_by_transformers, write_release  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("transformers_leaves_nothing"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("family", "block"), [*((family, BLOCK) for family in FAMILIES), ("llama", None)])
def test_values_are_those_of_transformers(family, block, dtype, tmp_path):
    """Without blocks, one scale serves a whole weight."""
    write_release(family, tmp_path, block=block)
    model = build(family, seed=1, dtype=dtype)
    assert load(model, tmp_path).is_complete
    assert_same(model.state_dict(), read_by_transformers(family, tmp_path, dtype))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_parts_are_those_of_the_whole(family, tmp_path):
    write_release(family, tmp_path)
    model = build(family)
    files = CheckpointEngine.open_model(tmp_path, model)
    with files:
        for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
            whole, shape = files.read_whole(name), files.tensors[name].shape
            box = tuple((size // 4, size // 4 + max(size // 2 - 3, 1)) for size in shape)
            flat = (5, whole[slices_of(box)].numel() - 7)
            data = torch.zeros(flat[1] - flat[0], dtype=torch.bfloat16)
            shard = TensorShard(name=name, global_shape=shape, dtype=data.dtype, box=box, flat=flat, data=data)
            files.read(name, shard)
            assert torch.equal(data, whole[slices_of(box)].flatten()[slice(*flat)].bfloat16())


def test_no_more_than_the_part_is_read(tmp_path):
    write_release("gpt_oss", tmp_path)
    with open_source(tmp_path, "model", dequantized=True) as source:
        read = []
        for file in source._files:
            original = file.read
            file.read = lambda key, box, out, original=original: (read.append((key, box)), original(key, box, out))
        name = "model.layers.0.mlp.experts.gate_up_proj"
        source.read(name, ((1, 2), (40, 50), (3, 9)), torch.empty(60))
    assert read == [
        (f"{name}_blocks", ((1, 2), (3, 9), (1, 2), (0, 16))),
        (f"{name}_scales", ((1, 2), (3, 9), (1, 2))),
    ]


def test_blocks_need_not_divide_a_weight(tmp_path):
    """DeepSeek-V3's latent projection has 576 rows and 5 rows of scales; the reference repeats and cuts."""
    weight, scales = torch.randn(40, 24).to(torch.float8_e4m3fn), torch.rand(3, 3)
    save_file({"weight": weight, "weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 8]})
    model = torch.nn.Linear(24, 40, bias=False)
    load(model, tmp_path)
    spread = scales.repeat_interleave(16, 0)[:40].repeat_interleave(8, 1)
    assert torch.equal(model.weight, weight.float() * spread)


def test_scales_may_be_powers_of_two_and_values_of_four_bits(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = {
        "0.weight": torch.randint(-128, 128, (24, 32), dtype=torch.int8),
        "0.scale": torch.randint(118, 132, (24, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "1.weight": torch.randn(32, 24).to(torch.float8_e4m3fn),
        "1.weight_scale_inv": torch.randint(118, 132, (2, 3), dtype=torch.uint8),
        "1.activation_scale": torch.ones(()),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, {"quant_method": "fp8", "weight_block_size": BLOCK})
    model = torch.nn.Sequential(torch.nn.Linear(64, 24, bias=False), torch.nn.Linear(24, 32, bias=False))
    assert load(model, tmp_path).is_complete
    theirs = Fp8Dequantize(None)
    for layer, scales in (("0", "0.scale"), ("1", "1.weight_scale_inv")):
        expected = theirs._dequantize_one(tensors[f"{layer}.weight"], tensors[scales], torch.float32)
        assert torch.equal(model.state_dict()[f"{layer}.weight"], expected)


def without_scales(folder):
    path = folder / "model-00002-of-00002.safetensors"
    scales = load_file(path)
    lost = next(iter(scales))
    del scales[lost]
    save_file(scales, path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][lost]
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", without_scales, r"in torch.float8_e4m3fn without its scales, .*_scale_inv'.*Download"),
        ("gpt_oss", without_scales, r"_blocks' in .* is .*MXFP4 has blocks of 16 bytes.*none is there"),
        (
            "llama",
            lambda folder: change_config(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
            r"not one for each block of `weight_block_size=\[128, 128\]`, nor one for all. Correct the entry",
        ),
        *(
            (
                "llama",
                lambda folder, method=method: change_config(folder, {"quant_method": method}),
                rf"quantized by `quant_method='{method}'`, which can't be read; .*Load a release in bf16",
            )
            for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors")
        ),
    ],
)
def test_what_can_not_be_read_is_an_error_that_leaves_the_model(family, change, message, tmp_path):
    write_release(family, tmp_path)
    change(tmp_path)
    model = build(family, seed=1)
    with pytest.raises(CheckpointError, match=message):
        load(model, tmp_path, strict=False)
    assert_same(model.state_dict(), build(family, seed=1).state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_converted_to_bf16(family, tmp_path):
    write_release(family, tmp_path / "release")
    convert(locate(tmp_path / "release"), locate(tmp_path / "plain"), "safetensors", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "plain").values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert_same(loaded.state_dict(), read_by_transformers(family, tmp_path / "release", torch.bfloat16))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_written_in_its_own_format(family, tmp_path):
    """Its configuration is that of the release; also where transformers has read the weights."""
    write_release(family, tmp_path / "release")
    expected = read_by_transformers(family, tmp_path / "release", torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "release")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    load(model, tmp_path / "release")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "release", dtype=torch.bfloat16)
    for name, each in (("ours", model), ("theirs", theirs)):
        save_module(each, tmp_path / name, shard=True)
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        assert {tensor.dtype for tensor in tensors_in(tmp_path / name).values()} == {torch.bfloat16}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert_same(loaded.state_dict(), expected)
    assert tensors_in(tmp_path / "ours").keys() == tensors_in(tmp_path / "theirs").keys()

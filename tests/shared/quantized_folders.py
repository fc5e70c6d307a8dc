"""Small releases in block FP8 and MXFP4, in transformers' layout, with random weights; what transformers reads."""

import json

import expert_folders
import torch
import transformers
from expert_folders import tensors_in
from safetensors.torch import save_file

BLOCK = (16, 8)
KEPT = ("lm_head", "embed_tokens", "norm", "mlp.gate.", "router", "bias", "sinks")
"""Layers that releases leave in bf16; the models of 2025 and 2026 name them in `modules_to_not_convert`."""


def gpt_oss():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2}
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(vocab_size=64, num_hidden_layers=2, **experts, **sizes)
    )


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))


def qwen3_moe():
    config = expert_folders.qwen3_moe().config
    config.update({"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4})
    return transformers.Qwen3MoeForCausalLM(config)


FAMILIES = {"llama": llama, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}


def build(family, seed=0, dtype=torch.bfloat16):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FAMILIES[family]().to(dtype)


def write_release(family, folder, *, block=BLOCK, settings=()):
    """Write random weights as they are released: gpt-oss in MXFP4, others in FP8 with scales for blocks or for all."""
    model = build(family)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    weights, scales = {}, {}
    for key, tensor in tensors_in(folder).items():
        if family == "gpt_oss" and key.endswith(("gate_up_proj", "down_proj")):
            shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32)
            weights[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales[f"{key}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        elif family != "gpt_oss" and tensor.dim() == 2 and not any(kept in key for kept in KEPT):
            grid = () if block is None else [-(-size // each) for size, each in zip(tensor.shape, block, strict=True)]
            weights[key] = (torch.randn(tensor.shape, generator=generator) * 40).to(torch.float8_e4m3fn)
            scales[f"{key}_scale_inv"] = torch.rand(grid, generator=generator) / 500
        else:
            weights[key] = tensor
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": weights, "model-00002-of-00002.safetensors": scales}
    for name, tensors in files.items():  # as at the edges of real files: a weight in one, its scales in the next
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    method = {"quant_method": "mxfp4"} if family == "gpt_oss" else {"quant_method": "fp8", "weight_block_size": block}
    change_config(folder, {**method, "modules_to_not_convert": ["lm_head"], **dict(settings)})


def change_config(folder, quantization):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def read_by_transformers(family, folder, dtype):
    """Return transformers' own values."""
    kind = transformers.Mxfp4Config if family == "gpt_oss" else transformers.FineGrainedFP8Config
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=kind(dequantize=True)
    )
    return model.state_dict()

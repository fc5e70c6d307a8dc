"""Fine-tune a language model by low-rank adapters, and save only these.

python examples/lora.py
torchrun --nproc-per-node 2 examples/lora.py --plugin zero --model FOLDER
torchrun --nproc-per-node 2 examples/lora.py --plugin fsdp --resume adapters    # goes on with the adapters
torchrun --nproc-per-node 2 examples/lora.py --plugin ddp --quantize    # QLoRA: the base in 4 bits, by bitsandbytes
booster plan examples/lora.py:build --devices 8 --memory 80GiB    # or `build_quantized`

Without ``--model`` the base is a small Llama over bytes with random weights, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="name of an installed plugin; none on one device")
    parser.add_argument("--model", help="folder of a pretrained model over bytes")
    parser.add_argument("--resume", help="folder of adapters to go on with")
    parser.add_argument("--quantize", action="store_true", help="keep the base in 4 bits")
    parser.add_argument("--out", default="adapters")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=64)
    return parser.parse_args()


def base_model(folder: str | None) -> torch.nn.Module:
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what `booster plan` asks for: Llama 3's sizes for 8 billion parameters, in bf16, with adapters.

    Activations are recomputed in backward, so that eight samples of 2,048 tokens fit on one card of 80 GB.
    """
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, **sizes, dtype="bfloat16")).bfloat16()
    base.gradient_checkpointing_enable()
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)


def build_quantized() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the same in 4 bits, for Llama 3.2's 1 billion: its values are made, to be quantised."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, tie_word_embeddings=True, **sizes, dtype="bfloat16")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = Booster().enable_lora(LlamaForCausalLM(config).bfloat16(), lora_config=lora, quantize=True).train()
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)


def batch() -> dict[str, torch.Tensor]:
    """Return the batch of all devices together."""
    tokens = torch.zeros(8, 2048, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    args = parse_arguments()
    launch_from_torch(seed=0)  # the same base on every rank
    booster = Booster(plugin=args.plugin)
    model = base_model(args.model)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    # Before the optimizer is made: the adapters are its parameters, the base is frozen.
    model = booster.enable_lora(
        model, pretrained_dir=args.resume, lora_config=None if args.resume else config, quantize=args.quantize
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    share = sum(map(torch.numel, trained)) / sum(map(torch.numel, model.parameters()))
    tokens = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    loader = DataLoader(samples, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.AdamW(trained, lr=1e-2), dataloader=loader)

    losses = []
    for ids, _ in zip(loader, range(args.steps), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    booster.save_lora_as_pretrained(model, args.out)  # as peft does: `PeftModel.from_pretrained(base, "adapters")`
    booster.context.coordinator.print_on_master(
        f"trained {share:.1%} of the parameters: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )


if __name__ == "__main__":
    main()

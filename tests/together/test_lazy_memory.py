"""A pretrained model that no rank could hold twice: each rank reads what it keeps, and nothing else is ever there.

Memory is anonymous memory: pages that a process has for itself. Files are read by plain reads into their place, so what
the page cache keeps of them belongs to nobody and appears in no process' resident size.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from booster_core import Booster, DistCoordinator
from booster_runtime import LazyInitContext
from booster_testing import run_on_ranks
from booster_testing.memory import peak_memory

if TYPE_CHECKING:
    from pathlib import Path

FILE_BYTES = 512 * 2**20
TENTH = {
    "vocab_size": 16000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
"""110 million parameters."""
WARM = {**TENTH, "vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2}


def values_of(number: int, shape: torch.Size) -> torch.Tensor:
    """Return values that tell tensors, and places in a tensor, apart; cheap to make."""
    return (torch.arange(shape.numel(), dtype=torch.float32) % 1021 + number).view(shape)


def make_llama(settings: dict[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**settings, max_position_embeddings=128, use_cache=False))


def write_pretrained(folder: Path, settings: dict[str, int]) -> int:
    """Write a Llama's folder, file by file; return the bytes of its parameters."""
    folder.mkdir(exist_ok=True)
    with torch.device("meta"):
        model = make_llama(settings)
    model.config.save_pretrained(folder)
    total, pending, homes = 0, dict[str, torch.Tensor](), dict[str, str]()

    def flush() -> None:
        name = f"model-{len(set(homes.values())):05d}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        homes.update(dict.fromkeys(pending, name))
        pending.clear()

    for number, (name, parameter) in enumerate(model.named_parameters()):
        pending[name] = values_of(number, parameter.shape)
        total += pending[name].nbytes
        if sum(tensor.nbytes for tensor in pending.values()) > FILE_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def boost_pretrained(folder: Path, plugin: str) -> tuple[int, int]:
    """Boost a lazy model from a folder, check what is here, and return the peak and what is kept, in bytes."""
    from transformers import LlamaForCausalLM

    with peak_memory() as memory:
        with LazyInitContext() as context:
            model = LlamaForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters())
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
    assert context.run_eagerly == {}
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    seen = set()
    for shard in booster.state_adapter(boosted).model_shards():
        expected = values_of(numbers[shard.name], torch.Size(shard.global_shape))
        part = expected[tuple(slice(*bounds) for bounds in shard.box)]
        if shard.flat is not None:
            part = part.flatten()[slice(*shard.flat)]
        assert torch.equal(shard.data, part), shard.name
        seen.add(shard.name)
    everywhere = set().union(*DistCoordinator().all_gather_object(seen))
    assert everywhere == numbers.keys()
    return memory.peak_bytes, memory.kept_bytes


def ratio_of_peaks(tmp_path: Path, settings: dict[str, int]) -> float:
    """Return the sum of all ranks' peaks, as a multiple of the model's bytes."""
    run_on_ranks(write_pretrained, 1, tmp_path / "warm", WARM)
    run_on_ranks(boost_pretrained, 4, tmp_path / "warm", "fsdp", timeout_seconds=120)
    (total,) = run_on_ranks(write_pretrained, 1, tmp_path / "model", settings, timeout_seconds=240)
    results = run_on_ranks(boost_pretrained, 4, tmp_path / "model", "fsdp", timeout_seconds=240)
    ratio = sum(peak for peak, _ in results) / total
    print(f"{total / 2**20:.0f} MiB; peaks {[round(peak / 2**20) for peak, _ in results]} MiB; ratio {ratio:.3f}")
    return ratio


@pytest.mark.slow
def test_a_tenth_of_a_billion_parameters_is_never_held_twice(tmp_path) -> None:
    assert ratio_of_peaks(tmp_path, TENTH) <= 1.3

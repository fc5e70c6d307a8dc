"""Llamas of several sizes, a plain loop that trains them, and the same under plugins and under other FSDPs."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from device_runs.cases import CannotRun
from device_smoke import PLUGINS

from booster_core import Booster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from device_runs.cases import Setting
    from torch import Tensor, nn

ATTENTION = "causal-sdpa"
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
"""Products and sums a second of dense bf16 matrices, by a part of the card's name; the first that matches."""


@dataclass(frozen=True)
class Size:
    """A Llama and its batch.

    Attributes:
        config: Of transformers' ``LlamaConfig``.
        samples: Sequences in a batch.
        length: Tokens in a sequence.
    """

    config: dict[str, Any]
    samples: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.samples * self.length


def _config(hidden: int, layers: int, inner: int, heads: tuple[int, int], vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


SIZES = {
    "tiny": Size(_config(32, 2, 48, (4, 2), 64), 2, 8),
    "110M": Size(_config(768, 12, 2048, (12, 12), 16000), 8, 1024),
    "500M": Size(_config(1536, 16, 4096, (16, 8), 32000), 8, 1024),
    "1B": Size(_config(2048, 16, 8192, (32, 8), 32000), 8, 1024),
    "3B": Size(_config(3072, 28, 8192, (24, 8), 32000), 2, 1024),
    "8B": Size(_config(4096, 32, 14336, (32, 8), 32000), 2, 1024),
}
"""1B and 3B are those of Llama 3.2, and 8B that of 3.1, with 32,000 tokens, and embedding and head of their own."""


def size_of(setting: Setting, name: str) -> Size:
    """Return a size; the smallest on the simulated accelerator."""
    return SIZES[name if setting.is_real else "tiny"]


def make_llama(setting: Setting, size: Size, dtype: torch.dtype = torch.bfloat16, *, attention: str = ATTENTION) -> Any:
    """Return a Llama with random weights, made on the device, in a dtype.

    Its attention is transformers' ``sdpa`` under another name: for ``sdpa`` transformers reads the positions of each
    batch on the host, a wait for the device in every forward.
    """
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    config = LlamaConfig(use_cache=False, attn_implementation=attention, max_position_embeddings=4096, **size.config)
    torch.manual_seed(0)
    with _default_dtype(dtype), torch.device(setting.device):
        return LlamaForCausalLM(config)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every run."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def make_batch(setting: Setting, size: Size, samples: int = 0, length: int = 0) -> dict[str, Tensor]:
    """Return a batch of the size, or of other numbers of samples and tokens, on the device."""
    shape = (samples or size.samples, length or size.length)
    tokens = torch.randint(size.config["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(setting.device)
    return {"input_ids": tokens, "labels": tokens}


def count_flops(model: nn.Module, size: Size) -> float:
    """Return the operations of a step: 6 for each parameter of a product and token, and causal attention's."""
    products = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    attention = 6 * size.config["num_hidden_layers"] * size.config["hidden_size"] * size.length
    return float(size.tokens * (6 * products + attention))


def peak_flops() -> float | None:
    """Return what the card can do a second; ``None`` of one that is not known."""
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


FULLY_SHARD, TRANSFORMERS = "fully_shard", "transformers' FSDP2"
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, gradient_as_bucket_view": ("ddp", {"gradient_as_bucket_view": True}),
    "fsdp": ("fsdp", {}),
    "zero 1": ("zero", {"stage": 1}),
    "zero 2": ("zero", {"stage": 2}),
    "gemini": ("gemini", {}),
    "hybrid": ("hybrid", {}),
}
"""Plugins by the name that figures give them."""


def make_plugin(name: str, **options: Any) -> Any:
    """Return a plugin of `CONTENDERS`, with further options."""
    plugin, own = CONTENDERS[name]
    module, attribute = PLUGINS[plugin].split(":")
    return getattr(import_module(module), attribute)(**own, **options)


def plain_step(model: Any, optimizer: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a loop's step, as one writes it without us."""

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def boosted_step(booster: Booster, model: Any, optimizer: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return the same step with a Booster, whose objects these are."""

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def boost(
    setting: Setting, plugin: Any, precision: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[dict[str, Tensor]], Tensor]:
    """Boost a model, and return its step.

    Collective: every rank of the world.
    """
    booster = Booster(setting.device, precision, plugin)
    trained, wrapped, *_ = booster.boost(model, optimizer)
    return boosted_step(booster, trained, wrapped)


def make_step(setting: Setting, name: str, model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return the step of a contender that trains a bf16 model in pure bf16: all do the same arithmetic.

    Args:
        setting: The device.
        name: Of `CONTENDERS`, "plain", or another library's FSDP.
        model: The model, which becomes the contender's.

    Collective: every rank of the world.
    """
    if name in CONTENDERS:
        return boost(setting, make_plugin(name), "pure-bf16", model, make_optimizer(model))
    if name == FULLY_SHARD:
        _fully_shard(setting, model)
    elif name == TRANSFORMERS:
        _shard_by_transformers(setting, model)
    return plain_step(model, make_optimizer(model))


def _mesh(setting: Setting) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(setting.device, (setting.world_size,))


def _fully_shard(setting: Setting, model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(setting)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _shard_by_transformers(setting: Setting, model: Any) -> None:
    """Shard by what ``DistributedConfig(fsdp_size=...)`` calls, which itself shards nothing over one rank."""
    try:
        from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
    except ImportError as error:
        msg = f"transformers has no FSDP2 of its own here: {error}"
        raise CannotRun(msg) from error
    if [*inspect.signature(apply_fully_sharded_data_parallelism).parameters] != ["model", "fsdp_mesh"]:
        msg = "this version of transformers shards over meshes that it makes itself, of two ranks or more"
        raise CannotRun(msg)
    apply_fully_sharded_data_parallelism(model, _mesh(setting))

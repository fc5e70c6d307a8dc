"""States whose every value is given, saved in every form, and the digests of the files.

No value passes through arithmetic, so the bytes are those of the formats alone, on any machine and with any torch.
"""

import hashlib
import json
import random
import socket
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from adapted_models import Replicas
from engine_calls import EngineCalls
from folder_storage import FolderStorage, StorageHooks
from resumable import NumberedSamples
from synthetic_state import TENSORS, SyntheticAdapter, value_of
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import booster_runtime
from booster_core import Booster
from booster_core.plugin.hooks import register_hooks, unregister_hooks
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import as_bytes
from booster_testing.models import tiny_llama

WIDE = [("wide", (700, 500), torch.float32), ("narrow", (600, 300), torch.float32)]
"""More than one file of a MiB, for ``size_per_shard=1``."""
STEP = "run/step-00000005"
TABLE = Path(__file__).parents[1] / "checkpoint" / "golden_digests.json"
"""The digests of all files, as `digests` finds them."""
_BY_RANKS = {f"{STEP}/{name}" for name in ("manifest.json", "training_state.json", "training_state.safetensors")}
"""Files with the random states of each rank, or with their checksums."""


class Momentum(torch.optim.Optimizer):
    """An optimizer whose options no version of torch adds to."""

    def __init__(self, params, lr=0.25):
        super().__init__(params, {"lr": lr, "momentum": 0.5})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(momentum, alpha=group["lr"])


class Halving(LRScheduler):
    """A scheduler whose state no version of torch adds to."""

    def get_lr(self):
        return [base * 0.5**self.last_epoch for base in self.base_lrs]

    def state_dict(self):
        return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch}


class Small(nn.Module):
    """Weights, a tied one, a buffer, and a weight without dimensions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.second = nn.Linear(24, 8, bias=False)
        self.tied = self.second
        self.gain = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.tied(torch.tanh(self.first(x))) * self.gain


class Counter:
    """A registered object with a tensor and a number."""

    def state_dict(self):
        return {"seen": 7, "mean": value_of("mean", (3,), torch.float32)}

    def load_state_dict(self, state):
        del state


@torch.no_grad()
def fill(module, kind):
    """Give every parameter and buffer the values of its name and of a kind."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.copy_(value_of(f"{kind}/{name}", tuple(tensor.shape), tensor.dtype))


def on_host(hosts):
    """Return a patch that tells this rank the name of its host; ``None`` leaves all on one."""
    name = "host" if hosts is None else f"host-{hosts[DistCoordinator().rank]}"
    return mock.patch.object(socket, "gethostname", return_value=name)


def save_layout(base, layout, hosts=None, use_async=False):
    """Save a model and an optimizer in a layout, in every form of a model and an optimizer.

    Args:
        base: A folder, or a URL of ours.
        layout: One of `synthetic_state.LAYOUTS`.
        hosts: The number of each rank's host.
        use_async: Write in the background.

    Collective: every rank.
    """
    ranks = DistCoordinator()
    with on_host(hosts):
        io, io_of_wide = EngineCalls(bucket_bytes=1024), EngineCalls(bucket_bytes=256 << 10)
        adapter = SyntheticAdapter(TENSORS, layout, ranks.rank, ranks.world_size)
        wide = SyntheticAdapter(WIDE, layout, ranks.rank, ranks.world_size, states=("exp_avg",))
        options = {"use_async": use_async}
        io.save_model(adapter, f"{base}/sharded", shard=True, **options)
        io.save_optimizer(adapter, f"{base}/sharded", shard=True, **options)
        io_of_wide.save_model(wide, f"{base}/files", shard=True, size_per_shard=1, **options)
        io_of_wide.save_optimizer(wide, f"{base}/files", shard=True, size_per_shard=1, **options)
        io.save_model(adapter, f"{base}/prefixed", shard=True, prefix="named", **options)
        io.save_model(adapter, f"{base}/model.safetensors", **options)
        io.save_model(adapter, f"{base}/cast.safetensors", dtype=torch.bfloat16, **options)
        io.save_optimizer(adapter, f"{base}/optimizer.safetensors", **options)
        io.save_model(adapter, f"{base}/model.bin", use_safetensors=False, **options)
        io_of_wide.save_model(wide, f"{base}/bin", shard=True, size_per_shard=1, use_safetensors=False, **options)
        io.close()
        io_of_wide.close()


def save_at_url(base, function, *args):
    """Save as a function of this module does, at URLs whose storage keeps files below a folder.

    Collective: every rank.
    """
    hooks = StorageHooks(FolderStorage(base))
    register_hooks(hooks)
    try:
        globals()[function]("ours://at", *args)
    finally:
        unregister_hooks(hooks)


def boosted(plugin, module, *, has_states=True):
    """Boost a model, an optimizer, a scheduler and a loader.

    Args:
        plugin: The plugin.
        module: The model; it gets the values of its names.
        has_states: Whether the optimizer gets states, in place of none; for a plugin that keeps whole parameters.
    """
    booster = Booster("cpu", None, plugin)
    fill(module, "weights")
    decay = [module.first.weight, module.second.weight]
    rest = [module.first.bias, module.gain]
    optimizer = Momentum([{"params": decay}, {"params": rest, "lr": 0.125}])
    scheduler = Halving(optimizer)
    loader = booster.prepare_dataloader(NumberedSamples(48), 2, shuffle=True, seed=5)
    names = {parameter: name for name, parameter in module.named_parameters()}
    model, boosted_optimizer, _, loader, scheduler = booster.boost(module, optimizer, None, loader, scheduler)
    for parameter, name in names.items() if has_states else ():
        momentum = value_of(f"momentum/{name}", tuple(parameter.shape), torch.float32)
        optimizer.state[parameter] = {"step": 3, "momentum": momentum}
    return booster, model, boosted_optimizer, loader, scheduler


def seed_everything():
    """Give Python's, NumPy's and torch's generators states that are the same on every rank."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the global generator is meant
    torch.manual_seed(3)


def save_run(base, hosts=None, use_async=False):
    """Save a step, a scheduler, an average, adapters and a pretrained folder.

    Args:
        base: A folder, or a URL of ours.
        hosts: The number of each rank's host.
        use_async: Write in the background what can be.

    Collective: every rank.
    """
    with on_host(hosts):
        plugin = Replicas() if DistCoordinator().world_size > 1 else None
        module = Small()
        booster, model, optimizer, loader, scheduler = boosted(plugin, module)
        booster.register_for_checkpointing(Counter())
        average = booster_runtime.ema(booster, model, 0.5)
        fill(module, "later")  # the average keeps what was before
        extra = {"note": "ü", "scores": [1, 2.5, None], "tensor": value_of("extra", (5,), torch.bfloat16)}
        seed_everything()
        booster.save_checkpoint(
            f"{base}/run",
            step=5,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            dataloader=loader,
            ema=average,
            extra=extra,
            metric=0.5,
            use_async=use_async,
        )
        booster.save_lr_scheduler(scheduler, f"{base}/scheduler.json")
        average.save(f"{base}/average", shard=True, use_async=use_async)
        booster.wait()


def language_model():
    """Return a model of transformers whose values are those of its names."""
    model = tiny_llama()
    fill(model, "weights")
    return model


def with_adapters(add=None):
    """Return a model of peft's with two adapters, whose values are those of its names.

    Args:
        add: Adds the first; `peft.get_peft_model` by default.
    """
    import peft

    config = peft.LoraConfig(r=3, target_modules=["first", "second"])
    adapted = (add or peft.get_peft_model)(Small(), config)
    adapted.add_adapter("other", config)
    fill(adapted, "weights")
    return adapted


def save_transformers(base, hosts=None):
    """Save a transformers model with its configuration files, and adapters as peft does.

    Collective: every rank.
    """
    with on_host(hosts):
        plugin = Replicas() if DistCoordinator().world_size > 1 else None
        booster = Booster("cpu", None, plugin)
        model, *_ = booster.boost(language_model())
        booster.save_model(model, f"{base}/pretrained", shard=True)
        model.save_pretrained(f"{base}/saved")
        booster = Booster("cpu", None, plugin and Replicas())
        model, *_ = booster.boost(with_adapters(lambda base, config: booster.enable_lora(base, lora_config=config)))
        booster.save_lora_as_pretrained(model, f"{base}/lora")


def digests(base):
    """Return the digests of all files below a folder, by path; what no run shares with another is replaced by name.

    In a manifest these are the time, versions, and facts of ranks and plugin. Of a file of ``torch.save`` the values
    that torch reads from it count: its bytes contain a name that torch chooses.
    """
    base, found = Path(base), {}
    for path in sorted(base.rglob("*")):
        name = path.relative_to(base).as_posix()
        if not path.is_file() or path.name == "lease.json":
            continue
        content = path.read_bytes()
        if path.suffix == ".bin":
            content = _values_of(torch.load(path, weights_only=True))
        elif path.name == "manifest.json":
            content = _without_facts_of_the_run(json.loads(content))
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def named(found, world_size):
    """Return digests of files under the names of the table, which tells numbers of ranks apart where they matter."""
    return {f"{name} ({world_size} ranks)" if name in _BY_RANKS else name: digest for name, digest in found.items()}


def expected(kind, world_size=1):
    """Return what the table has for ``"layout"``, ``"run"`` or ``"transformers"``, saved by a number of ranks."""
    table, ours = json.loads(TABLE.read_text())[kind], f"({world_size} ranks)"
    return {name: digest for name, digest in table.items() if not name.endswith(" ranks)") or name.endswith(ours)}


def _values_of(state):
    described = hashlib.sha256()
    for name, value in state.items():
        described.update(f"{name} ".encode())
        if isinstance(value, torch.Tensor):
            described.update(f"{value.dtype} {tuple(value.shape)}".encode())
            described.update(as_bytes(value.contiguous()))
        else:
            described.update(_values_of(value) if isinstance(value, dict) else repr(value).encode())
    return described.digest()


_OF_THE_RUN = ("mesh", "plugin", "saved_at", "world_size", "written_by", "xxh3")


def _without_facts_of_the_run(manifest):
    for name in _OF_THE_RUN:
        manifest[name] = f"<{name}>" if name in manifest else None
    return json.dumps(manifest, sort_keys=True).encode()

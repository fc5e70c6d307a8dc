"""Step time of tensor parallelism relative to a Llama under DTensor's ``parallelize_module``, on 2 gloo ranks.

Ranks have one thread. Both split the embedding and the head by vocabulary, compute the loss of sharded logits, and
step fused AdamW; transformers' own plan gathers the logits. They share the same processes and alternate,
so that other load on the machine affects all equally; the result is the ratio of the slower rank's times within a turn.
A last contender runs our step without communication.

    python benchmarks/tensor_parallel.py --hidden 384 --dtype bf16
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _results import compare
from _side_by_side import take_turns
from torch import nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.mesh import RankGroup
from booster_hybrid.policy.find import policy_for
from booster_hybrid.tensor_parallel.plan import parallelize
from booster_testing import close_ranks, peak_memory, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

BARS = {384: None, 1024: 0.85}
LAYERS, VOCABULARY, HEAD = 6, 8000, 64
SAMPLES, LENGTH = 4, 64
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(hidden: int, dtype: torch.dtype) -> nn.Module:
    """Return a Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype)


def make_tokens() -> torch.Tensor:
    """Return the batch, shape ``(4, 64)``, the same on every rank."""
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def ours(hidden: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a step under the plugin."""
    model = make_model(hidden, dtype)
    plugin = HybridParallelPlugin(tp_size=dist.get_world_size(), parallel_output=True)
    booster = Booster("cpu", "bf16" if dtype == torch.bfloat16 else "fp32", plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    batch = make_tokens()

    def step() -> None:
        loss = boosted(input_ids=batch, labels=batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_step(model: Any, groups: list[dict[str, Any]]) -> Callable[[], None]:
    """Return a step of a plain loop over a model that computes its own loss."""
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    batch = make_tokens()

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def silent(hidden: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return our step without all-reduces: its results are wrong, but its computation is complete."""
    model: Any = make_model(hidden, dtype)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = RankGroup(alone[dist.get_rank()], dist.get_rank(), dist.get_world_size())
    parallelize(model, policy_for(model), group, parallel_output=True)
    return plain_step(model, [{"params": list(model.parameters())}])


def by_hand(hidden: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a step of the model under ``parallelize_module``, written as torch's tutorials do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model: Any = make_model(hidden, dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    parameters = list(model.parameters())
    # One parameter group can't contain both kinds.
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, fused=True)
    batch = make_tokens()
    labels = nn.functional.pad(batch, (0, 1), value=-100)[:, 1:].flatten()

    def step() -> None:
        with loss_parallel() if mesh.size() > 1 else nullcontext():
            logits = model(input_ids=batch).logits
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_transformers(hidden: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a step of the model that transformers has split by its own plan."""
    from torch.distributed.tensor import DTensor
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    split: Any = DistributedConfig(tp_size=dist.get_world_size())
    with tempfile.TemporaryDirectory() as folder:
        first = [folder]
        dist.broadcast_object_list(first)
        if not dist.get_rank():
            make_model(hidden, dtype).save_pretrained(folder)
        dist.barrier()
        model: Any = LlamaForCausalLM.from_pretrained(first[0], distributed_config=split, dtype=dtype)
        dist.barrier()
    parameters = list(model.train().parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return plain_step(model, [{"params": group} for group in groups if group])


STEPS = {"ours": ours, "by hand": by_hand, "transformers": of_transformers, "silent": silent}


def timed(hidden: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps by round; each is the slower rank's.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    return take_turns({name: make(hidden, dtype) for name, make in STEPS.items()}, rounds, warmup=3)


def peak_bytes(name: str, hidden: int, dtype: torch.dtype) -> int:
    """Return the peak of resident memory, relative to that before the model was built.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    with peak_memory() as used:
        step = STEPS[name](hidden, dtype)
        for _ in range(4):
            step()
    return used.peak_bytes


def main() -> int:
    """Print ratios; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, choices=BARS, nargs="+", default=list(BARS))
    parser.add_argument("--dtype", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory", action="store_true", help="measure peaks of memory too")
    asked = parser.parse_args()
    met = True
    for hidden in asked.hidden:
        for name in asked.dtype:
            case = (hidden, FORMATS[name])
            seconds, *_ = run_on_ranks(timed, asked.ranks, *case, asked.rounds, timeout_seconds=900)
            what = f"tp={asked.ranks}, Llama of {LAYERS} layers, hidden {hidden}, {name}"
            own, silence = seconds["ours"], "the same compute without communication"
            met &= compare(what, own, seconds["by hand"], yardstick="parallelize_module", bar=BARS[hidden])
            compare(what, own, seconds["transformers"], yardstick="transformers' own plan", bar=None)
            compare(what, own, seconds["silent"], yardstick=silence, bar=None)
            if asked.memory:
                peaks = []
                for kind in ("ours", "by hand"):
                    close_ranks()  # a new process each: freed memory may stay in the old process
                    peaks.append([max(run_on_ranks(peak_bytes, asked.ranks, kind, *case, timeout_seconds=900))])
                compare(f"peak memory, {what}", *peaks, yardstick="parallelize_module", bar=None, unit="B")
    close_ranks()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

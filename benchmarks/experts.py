"""Step time of a mixture whose experts are spread over ranks, relative to replicas and to transformers' own exchange.

All contenders train the same Qwen3-MoE on the same batches, a batch for each rank, and step fused AdamW. ``spread`` is
``ep_size`` of all ranks, ``replicated`` the same plugin with every expert on every rank, and ``transformers`` has its
``AllToAllEP`` around each module of local experts, with the other gradients averaged in one all-reduce. They share the
same processes and alternate; the result is the ratio of the slower rank's times within a turn.

    python benchmarks/experts.py --ranks 2 --rounds 20
"""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _results import compare
from _side_by_side import take_turns
from torch import nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import close_ranks, peak_memory, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS, VOCABULARY = 256, 256, 16, 2, 4, 4000
SAMPLES, LENGTH = 4, 128


def make_model() -> nn.Module:
    """Return a mixture with random weights, the same on every rank."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        decoder_sparse_step=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def make_tokens() -> torch.Tensor:
    """Return this rank's batch."""
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))


def under_plugin(ep_size: int) -> Callable[[], None]:
    """Return a step under the plugin."""
    model = make_model()
    booster = Booster("cpu", plugin=HybridParallelPlugin(ep_size=ep_size))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    batch = make_tokens()

    def step() -> None:
        loss = boosted(input_ids=batch, labels=batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def spread() -> Callable[[], None]:
    """Return a step with experts spread over all ranks."""
    return under_plugin(dist.get_world_size())


def replicated() -> Callable[[], None]:
    """Return a step with every expert on every rank."""
    return under_plugin(1)


def by_transformers() -> Callable[[], None]:
    """Return a step with transformers' exchange of tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    share, spread_parameters = EXPERTS // size, set()
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            for parameter in module.parameters():
                parameter.data = parameter.data[rank * share : (rank + 1) * share].clone()
                spread_parameters.add(parameter)
            module.num_experts = share
            module.forward = AllToAllEP(module, mesh["ep"], mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shared = [parameter for parameter in model.parameters() if parameter not in spread_parameters]
    batch = make_tokens()

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in shared if parameter.grad is not None])
        dist.all_reduce(flat)
        flat /= size
        for parameter, part in zip(shared, flat.split([each.numel() for each in shared]), strict=True):
            parameter.grad = part.view(parameter.shape)
        for parameter in spread_parameters:
            if parameter.grad is not None:
                parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS = {"spread": spread, "replicated": replicated, "transformers": by_transformers}


def timed(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps by round; each is the slower rank's.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    return take_turns({name: make() for name, make in STEPS.items()}, rounds, warmup=3)


def peak_bytes(name: str) -> int:
    """Return the peak of resident memory, relative to that before the model was built.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    with peak_memory() as used:
        step = STEPS[name]()
        for _ in range(4):
            step()
    return used.peak_bytes


def main() -> None:
    """Print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--memory", action="store_true", help="measure peaks of memory too")
    asked = parser.parse_args()
    seconds, *_ = run_on_ranks(timed, asked.ranks, asked.rounds, timeout_seconds=900)
    what = f"ep={asked.ranks}, {EXPERTS} experts, {LAYERS} layers, hidden {HIDDEN}, fp32"
    compare(what, seconds["spread"], seconds["replicated"], yardstick="replicated experts", bar=None)
    compare(what, seconds["spread"], seconds["transformers"], yardstick="transformers' AllToAllEP", bar=None)
    for kind in ("spread", "replicated") if asked.memory else ():
        close_ranks()  # a new process each: freed memory may stay in the old process
        peak = max(run_on_ranks(peak_bytes, asked.ranks, kind, timeout_seconds=900))
        print(f"  peak of {kind:10} {peak / 2**20:8.1f} MiB", flush=True)
    close_ranks()


if __name__ == "__main__":
    main()

"""Reinforcement learning in the manner of GRPO: a policy writes, a reward judges, a frozen reference holds it back.

torchrun --nproc-per-node 2 examples/grpo.py --plugin zero

The reward is the share of even tokens, in place of a verifier. The reference is on the host while the policy writes and
learns. Both are small Llamas with random weights, so that nothing has to be downloaded.
Reference: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300).
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster, launch_from_torch
from booster_runtime import offload_states, reduce, reload_states

VOCABULARY, PROMPT = 32, 4


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return those of the tokens after the prompt, shape ``(samples, new)``."""
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1].float()
    return log_softmax(logits, dim=-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", help="none on one device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="per rank and step")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--new", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--kl", type=float, default=0.01, help="weight of the distance from the reference")
    args = parser.parse_args()
    launch_from_torch(seed=0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, pad_token_id=0, **sizes))
    of_reference = Booster(plugin=args.plugin)
    reference, *_ = of_reference.boost(copy.deepcopy(policy).eval().requires_grad_(False))  # noqa: FBT003
    booster = Booster(plugin=args.plugin)
    policy, optimizer, *_ = booster.boost(policy, torch.optim.AdamW(policy.parameters(), lr=3e-3))

    rewards = []
    for _ in range(args.steps):
        # Write.
        offload_states(of_reference, reference)
        prompts = torch.randint(VOCABULARY, (args.prompts, PROMPT), device=booster.device)
        policy.eval()
        with torch.no_grad():
            tokens = policy.generate(
                input_ids=prompts.repeat_interleave(args.group, dim=0),
                attention_mask=torch.ones_like(prompts).repeat_interleave(args.group, dim=0),
                max_new_tokens=args.new,
                do_sample=True,
            )
        # Judge: an answer's advantage is over the others to the same prompt.
        reload_states(of_reference, reference)
        with torch.no_grad():
            held = log_probabilities(reference, tokens)
        offload_states(of_reference, reference)
        reward = (tokens[:, PROMPT:] % 2 == 0).float().mean(dim=1).view(args.prompts, args.group)
        spread = reward.std(dim=1, keepdim=True) + 1e-4
        advantage = ((reward - reward.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
        # Learn.
        policy.train()
        own = log_probabilities(policy, tokens)
        distance = (held - own).exp() - (held - own) - 1
        loss = (args.kl * distance - (own - own.detach()).exp() * advantage).mean()
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        reload_states(of_reference, reference)
        rewards.append(reduce(booster, reward.mean()).item())
    booster.save_model(policy, "policy", shard=True)
    booster.context.coordinator.print_on_master(f"reward {rewards[0]:.4f} to {rewards[-1]:.4f}")


if __name__ == "__main__":
    main()

"""Muon for the matrices and AdamW for the rest, over ranks that have parts of matrices, layers and sequences.

Compared with plain torch in one process. Muon updates whole matrices, which come together for its step.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, in_fp64
from handwritten_gpts import Config, FusedGPT, batch, loss_of, policy
from hybrid_runs import ULYSSES
from matrix import matrix
from ranked import on_ranks
from torch.nn import functional

from booster_core.errors import BoosterError
from booster_hybrid import HybridParallelPlugin, gathered_matrices
from booster_testing.models import tiny_llama


def gpt(layers=2):
    """Return a model in fp64: Muon's steps in bf16 make much of other roundings in fp32."""
    return FusedGPT(Config(n_layer=layers)).double()


def llama_batch(number, replica):
    return {"input_ids": torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(10 * number + replica))}


def llama_loss(outputs, batch):
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def matrices_of(model):
    layers = model.transformer.h if isinstance(model, FusedGPT) else model.model.layers
    return [parameter for parameter in layers.parameters() if parameter.dim() == 2]


def muon_and_adamw(model):
    matrices = matrices_of(model)
    held = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def with_policy(**options):
    """Return a plugin for a GPT; transformers' models have a policy and dummy inputs."""
    return HybridParallelPlugin(custom_policy=policy(), example_batch=batch(0, 0), **options)


GPT = Case(build=gpt, batch=batch, loss=loss_of, optimizer=muon_and_adamw, steps=4)
LLAMA = replace(GPT, build=partial(in_fp64, tiny_llama), batch=llama_batch, loss=llama_loss)
"""Has two queries for a key, of which there are fewer than ranks."""
OF_PIPELINE = {"pp_size": 2, "num_microbatches": 2}
MESHES = {
    "tp": (GPT, Setting(with_policy, {"tp_size": 2})),
    "tp uneven": (GPT, Setting(with_policy, {"tp_size": 4}, 4)),
    "tp zero-1": (GPT, Setting(with_policy, {"tp_size": 2, "zero_stage": 1}, 4)),
    "tp offloaded": (GPT, Setting(with_policy, {"tp_size": 2, "zero_stage": 1, "cpu_offload": True}, 4)),
    "tp zero-2": (GPT, Setting(with_policy, {"tp_size": 2, "zero_stage": 2}, 4)),
    "tp zero-3": (GPT, Setting(with_policy, {"tp_size": 2, "zero_stage": 3}, 4)),
    "all_to_all": (
        GPT,
        Setting(with_policy, {**ULYSSES, "zero_stage": 1}),
    ),
    "pp": (GPT, Setting(with_policy, OF_PIPELINE)),
    "pp zero-1": (GPT, Setting(with_policy, {**OF_PIPELINE, "zero_stage": 1}, 4)),
    "tp pp": (
        replace(GPT, build=partial(gpt, 4)),
        Setting(with_policy, {**OF_PIPELINE, "tp_size": 2, "pp_style": "zbv"}, 4),
    ),
    "zero-3": (GPT, Setting(HybridParallelPlugin, {"zero_stage": 3})),
    "shared keys": (
        LLAMA,
        Setting(HybridParallelPlugin, {"tp_size": 4, "sequence_parallelism_mode": "split_gather"}, 4),
    ),
}


@matrix(["tp", "pp zero-1"], mesh=MESHES)
def test_training_equals_one_process_through_a_checkpoint(mesh, tmp_path):
    assert_equals_one_process(*MESHES[mesh], checkpoint=tmp_path / "run")


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def test_norms_and_factors_are_those_of_whole_parameters(tmp_path):
    case = replace(GPT, optimizer=adafactor, max_norm=None)
    assert_equals_one_process(case, Setting(with_policy, {"tp_size": 2}), checkpoint=tmp_path / "run")


def test_copies_on_stages_that_have_other_matrices_each_are_owned_by_the_same_ranks():
    tied = partial(tiny_llama, tie_word_embeddings=True, num_hidden_layers=3)
    case = replace(LLAMA, build=partial(in_fp64, tied), optimizer=adafactor, max_norm=None, steps=2)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, {**OF_PIPELINE, "zero_stage": 1}, 4))


@on_ranks(2)
def test_a_step_that_fails_on_one_rank_raises_on_all_and_leaves_groups_as_they_were():
    class Failing(torch.optim.Muon):
        """Runs out of memory, from some time on."""

        fails = False

        def step(self, closure=None):
            if self.fails:
                msg = "no memory is left"
                raise RuntimeError(msg)
            return super().step(closure)

    model = gpt()
    booster = Setting(with_policy, {"tp_size": 2}).make_booster()
    model, optimizer, *_ = booster.boost(model, Failing(matrices_of(model)))
    booster.backward(model(**batch(0, 0))[1], optimizer)
    before = [list(group["params"]) for group in optimizer.param_groups]
    optimizer.unwrap().fails = torch.distributed.get_rank() == 1
    match = "no memory is left" if torch.distributed.get_rank() else "Failing has failed on another rank"
    with pytest.raises(RuntimeError if torch.distributed.get_rank() else BoosterError, match=match):
        optimizer.step()
    assert all(
        one is other
        for group, kept in zip(optimizer.param_groups, before, strict=True)
        for one, other in zip(group["params"], kept, strict=True)
    )


@on_ranks(2)
def test_steps_of_muon_send_no_pickles_after_the_first_one():
    model = gpt()
    booster = Setting(with_policy, {"tp_size": 2}).make_booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.Muon(matrices_of(model), lr=0.02))
    counts, send = [], gathered_matrices.all_gather_object
    with mock.patch.object(gathered_matrices, "all_gather_object", wraps=send) as sent:
        for number in range(3):
            sent.reset_mock()
            booster.backward(model(**batch(number, 0))[1], optimizer)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sent.call_count)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]

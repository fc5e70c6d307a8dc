"""The engine asks for every block before it uses it: a memory that takes each away at once changes no bit."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, tokens, train_boosted
from matrix import matrix
from ranked import on_ranks

from booster_gemini import GeminiPlugin
from booster_gemini import plugin as plugin_module
from booster_runtime import full_gradient, set_full_gradient
from booster_runtime.collectives import Pending
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero.engine import Memory, Role

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),  # keeps state that is not elementwise
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
}


class RestlessMemory(Memory):
    """Takes a buffer out of memory as soon as nobody uses it, and brings it back to another address.

    Who reads it in between gets NaN. Changes are lost where a release does not tell of them.

    Attributes:
        uses: How many uses of each buffer there are.
        reserved: Bytes that were reserved and not freed.
        faults: Buffers that a use has changed which should only read, and those that are in use between steps.
    """

    moves = True

    def __init__(self):
        super().__init__()
        self.uses, self.faults, self.reserved = {}, [], 0
        self._kept, self._here, self._changed = {}, {}, set()

    def add(self, buffer):
        key = buffer.key
        assert key not in self.uses, f"{key} was added twice"
        self._kept[key], self.uses[key] = buffer.tensor.clone(), 0
        buffer.point(None)

    def drop(self, buffer):
        del self._kept[buffer.key], self.uses[buffer.key]
        self._changed.discard(buffer.key)  # what takes its place has a copy
        self._here.pop(buffer.key, None)

    def fetch(self, buffer):
        key = buffer.key
        self.uses[key] += 1

        def arrive():
            if key not in self._here:
                self._here[key] = self._kept[key].clone()
                buffer.point(self._here[key])

        return Pending(finish=arrive)

    def release(self, buffer, *, changed):
        key = buffer.key
        self.uses[key] -= 1
        assert self.uses[key] >= 0, f"{key} was released more often than fetched"
        if key not in self._here:
            return
        if changed:
            self._kept[key] = self._here[key]
        if not self.uses[key]:
            here = self._here.pop(key)
            if not torch.equal(here.view(torch.uint8), self._kept[key].view(torch.uint8)):
                self._changed.add(key)
            self._kept[key] = self._kept[key].clone()
            here.view(torch.uint8).fill_(255)  # NaN
            buffer.point(None)

    def forget(self, buffer):
        key = buffer.key
        assert self.uses[key] == 0, f"{key} is in use"
        self._kept[key].view(torch.uint8).fill_(255)

    def reserve(self, num_bytes):
        self.reserved += num_bytes

    def free(self, num_bytes):
        self.reserved -= num_bytes
        assert self.reserved >= 0, "more was freed than reserved"

    def end_step(self):
        self.faults += [f"{key} was changed in a use that should only read" for key in self._changed]
        self.faults += [f"{key} is in use between steps" for key, uses in self.uses.items() if uses]


def train(make_memory, precision, name, folder):
    """Train; return the training, and the parameters after a step with gradients that were set."""
    case = Case(
        build=tiny_llama,
        batch=tokens(2, 8),
        optimizer=lambda model: OPTIMIZERS[name](list(model.parameters())),
        micro_batches=2,
    )

    def step_twice_as_far(booster, model, optimizer):
        booster.backward(model(**case.batch(6, dist.get_rank())).loss, optimizer)
        for each, _ in model.unwrap().named_parameters():
            doubled = 2 * full_gradient(booster, model, each)
            set_full_gradient(booster, model, each, doubled)
            assert torch.equal(full_gradient(booster, model, each), doubled)
        optimizer.step()
        return whole_model(booster, model)

    setting = Setting(GeminiPlugin, {"min_chunk_bytes": 8192}, precision=precision)
    with mock.patch.object(plugin_module, "make_memory", make_memory):
        found = train_boosted(case, setting, step_twice_as_far, folder)
    return found.trained, found.told


def compare(precision, name, folder=None):
    """Assert that training is the same with a memory that moves, and return the roles of its buffers."""
    memories = []

    def make_restless(*_):
        memories.append(RestlessMemory())
        return memories[-1]

    still, last = train(plugin_module.make_memory, precision, name, folder and folder / "still")
    moved, moved_last = train(make_restless, precision, name, folder and folder / "moved")
    assert (moved.losses, moved.norms) == (still.losses, still.norms)
    expected = [*still.gradients, still.parameters, last]
    for found, values in zip([*moved.gradients, moved.parameters, moved_last], expected, strict=True):
        assert_same_tensors(found, values, EXACT)
    for memory in memories:
        assert memory.faults == []
        assert not any(memory.uses.values())
    assert memories[-1].reserved == 0
    return {role for _, role in memories[-1].uses}


@matrix(["None-1"], precision=[None, "bf16", "fp16"], world_size=[1, 2])
@on_ranks("world_size")
def test_blocks_that_come_and_go_change_no_bit(world_size, precision):
    assert compare(precision, "adamw") == {*Role}


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adafactor", "muon"])
@on_ranks(2)
def test_other_optimizers_find_their_state_too(name):
    compare(None, name)


@pytest.mark.parametrize("precision", [pytest.param(None, marks=pytest.mark.slow), "bf16"])
@on_ranks(2)
def test_state_is_saved_and_loaded_from_where_it_is(precision, tmp_path):
    compare(precision, "adamw", tmp_path)

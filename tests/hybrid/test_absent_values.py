"""What a stage can't know has a form and no values: reads raise, and modules that are not run return it."""

from __future__ import annotations

import contextlib
import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import AbsentValueError
from booster_hybrid.pipeline.absent import ActivationMeta, MetaCache, absent_like, is_absent
from booster_hybrid.pipeline.stage_forward import AbsentCalls, StageForwardMode


def absent(*shape, dtype=torch.float32, grad=False):
    return absent_like(ActivationMeta.of(torch.empty(shape, dtype=dtype, requires_grad=grad)), "layer 'layers.0'")


def stage_run():
    return StageForwardMode(MetaCache(), None)


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "dlpack": torch.from_dlpack,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": torch.unique,
    "iteration": lambda x: [float(each) for each in x.flatten()],
    "text": lambda x: f"{x.sum():.3f}",
    "closure": lambda x: torch.vmap(lambda each: each + x[0])(torch.ones(3, 4)),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_running", [True, False])
def test_reads_raise(read, is_running):
    run = stage_run() if is_running else contextlib.nullcontext()
    with pytest.raises(AbsentValueError, match=r"layer 'layers\.0', which another pipeline stage has"), run:
        READS[read](absent(3, 4))


def test_descriptions_are_those_of_a_tensor():
    tensor = absent(3, 4, grad=True)
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((3, 4), torch.float32, True)
    assert "absent (3, 4)" in repr(tensor)
    assert copy.deepcopy(tensor).form == tensor.form
    with stage_run():
        assert "absent (3, 4)" in str(tensor)
        assert tensor.size(0) == 3


FUNCTIONS = {
    "add": lambda x, known: x + known,
    "matmul": lambda x, known: known @ x.transpose(-1, -2),
    "unpacked": lambda x, _: sum(row * 2 for row in x),
    "reduced": lambda x, _: x.max(-1),
    "gathered": lambda x, known: known.gather(-1, (x > 0).long()),
    "kept rows": lambda x, known: x[known[:, 0] > 0],
    "cast": lambda x, _: x.half(),
    "in place": lambda x, known: x.mul_(2).add_(known),
    "indexed write": lambda x, known: x.index_put_((torch.tensor([0]),), known[0]),
    "no gradient": lambda x, _: x.detach(),
    "composite": lambda x, _: nn.functional.gumbel_softmax(x, hard=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_absent_values_of_the_right_form(name):
    known = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    real = torch.randn(3, 4, requires_grad=name not in ("in place", "indexed write"))
    expected = pytree.tree_leaves(FUNCTIONS[name](real, known))
    run = stage_run()
    for _ in range(2):
        with run:
            found = pytree.tree_leaves(FUNCTIONS[name](absent(3, 4, grad=real.requires_grad), known))
        for one, two in zip(found, expected, strict=True):
            assert is_absent(one)
            assert ActivationMeta.of(one) == ActivationMeta.of(two)


def test_what_looks_at_forms_alone_is_known():
    with stage_run():
        x = absent(3, 4, dtype=torch.float64)
        found = [torch.zeros_like(x), x.new_ones(2), torch.ones(2).to(x), torch.arange(x.shape[1]), torch.rand_like(x)]
    assert not any(map(is_absent, found))
    assert [each.dtype for each in found] == [torch.float64, torch.float64, torch.float64, torch.int64, torch.float64]


def test_absent_values_are_written_into_no_memory_that_has_some():
    known = torch.zeros(3, 4)
    with pytest.raises(AbsentValueError, match=r"layer 'layers\.0'.* into a tensor .* \(by `__setitem__`"), stage_run():
        known[0] = absent(4)
    assert torch.equal(known, torch.zeros(3, 4))
    with pytest.raises(AbsentValueError, match="by `add_`"), stage_run():
        known.add_(absent(4))


class Tower(nn.Module):
    """Cuts patches by sizes that it reads, normalizes with statistics that it writes, and keeps what it has made."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.num_runs, self.last = 0, None

    def forward(self, patches, sizes=None, *, flag=True):
        self.num_runs += 1
        hidden = self.last = self.norm(self.linear(patches))
        if sizes is not None:
            parts = torch.split(hidden, [int(each) for each in sizes])
            hidden = torch.stack([part.mean(0) for part in parts])
        if hidden.isnan().any():
            hidden = hidden * 2
        return {"hidden": hidden.t(), "flag": flag, "pair": (hidden.half(), None)}


def forms(output):
    return [(leaf.shape, leaf.dtype, leaf.stride()) for leaf in (output["hidden"], output["pair"][0])]


@pytest.mark.parametrize("sizes", [None, [3, 2], [1, 1, 3], [5]])
def test_a_module_that_is_not_run_returns_what_a_real_run_would(sizes):
    tower = Tower()
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    calls = AbsentCalls(tower, tower.forward, "module 'tower'")
    arguments = (torch.randn(5, 4), None if sizes is None else torch.tensor(sizes))
    with stage_run() as run:
        found = [calls.result(run, arguments, {"flag": False}) for _ in range(3)]
    assert run.errors == []
    assert tower.last is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower.state_dict().items())
    assert tower.num_runs == (1 if sizes is None else 3)  # what it reads may be another the next time
    expected = tower(*arguments, flag=False)
    for each in found:
        assert forms(each) == forms(expected)
        assert all(map(is_absent, (each["hidden"], each["pair"][0])))
        assert each["flag"] is False
        assert each["pair"][1] is None


def test_hooks_inside_are_shown_that_values_are_absent():
    tower, seen = Tower(), []
    tower.linear.register_forward_hook(lambda _, __, output: seen.append(output))
    calls = AbsentCalls(tower, tower.forward, "module 'tower'")
    with stage_run() as run:
        for _ in range(2):
            calls.result(run, (torch.randn(5, 4),), {})
    assert [(each.shape, is_absent(each)) for each in seen] == [((5, 6), True)] * 2

"""What a stage can't know has a form and no values: reads raise, and modules that are not run return it."""

import contextlib
import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import AbsentValueError
from booster_hybrid.pipeline.absent import (
    ActivationMeta,
    ResultForms,
    absent_like,
    is_absent,
    letting_through,
    noting_errors,
)
from booster_hybrid.pipeline.stage_forward import AbsentCalls


def absent(*shape, dtype=torch.float32):
    return absent_like(ActivationMeta.of(torch.empty(shape, dtype=dtype)), "layer 'layers.0'")


def stage_run():
    return letting_through(ResultForms())


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
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_running", [True, False])
def test_reads_raise(read, is_running):
    run = stage_run() if is_running else contextlib.nullcontext()
    with pytest.raises(AbsentValueError, match=r"layer 'layers\.0', which another pipeline stage has"), run:
        READS[read](absent(3, 4))


def test_descriptions_are_those_of_a_tensor():
    tensor = absent(3, 4)
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((3, 4), torch.float32, False)
    assert "absent (3, 4)" in repr(tensor)
    assert ActivationMeta.of(copy.deepcopy(tensor)) == ActivationMeta.of(tensor)
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
    "composite": lambda x, known: nn.functional.layer_norm(x, (4,), known[0]),
    "mapped": lambda x, known: torch.vmap(lambda each: each + x[0])(known),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_absent_values_of_the_right_form(name):
    known = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    real = torch.randn(3, 4)
    expected = pytree.tree_leaves(FUNCTIONS[name](real, known))
    forms = ResultForms()
    for _ in range(2):
        with letting_through(forms):
            found = pytree.tree_leaves(FUNCTIONS[name](absent(3, 4), known))
        for one, two in zip(found, expected, strict=True):
            assert is_absent(one)
            assert ActivationMeta.of(one) == ActivationMeta.of(two)


def test_what_looks_at_forms_alone_is_known():
    with stage_run():
        x = absent(3, 4, dtype=torch.float64)
        found = [torch.zeros_like(x), x.new_ones(2), torch.ones(2).to(x), torch.arange(x.shape[1]), torch.rand_like(x)]
    assert not any(map(is_absent, found))
    assert [each.dtype for each in found] == [torch.float64, torch.float64, torch.float64, torch.int64, torch.float64]


def test_random_functions_draw_as_many_numbers_as_with_values():
    known = torch.ones(3, 4)
    for draw in (nn.functional.dropout, torch.rand_like, torch.bernoulli, lambda x: x.normal_()):
        after = []
        for each in (known.clone(), absent(3, 4)):
            torch.manual_seed(0)
            with stage_run():
                draw(each)
            after.append(torch.rand(()))
        assert after[0] == after[1]


def test_absent_values_are_written_into_no_memory_that_has_some():
    known = torch.zeros(3, 4)
    with pytest.raises(AbsentValueError, match=r"layer 'layers\.0'.* into a tensor .* \(by `copy_`"), stage_run():
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
        return {"hidden": hidden.t(), "flag": flag, "pair": (hidden.half(), None)}


def forms(output):
    return [(leaf.shape, leaf.dtype, leaf.stride()) for leaf in (output["hidden"], output["pair"][0])]


@pytest.mark.parametrize("sizes", [None, [3, 2], [1, 1, 3], [5]])
def test_a_module_that_is_not_run_returns_what_a_real_run_would(sizes):
    tower = Tower()
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    calls = AbsentCalls(tower, tower.forward, "module 'tower'")
    arguments = (torch.randn(5, 4), None if sizes is None else torch.tensor(sizes))
    results, errors = ResultForms(), []
    with noting_errors(errors):
        found = [calls.result(results, arguments, {"flag": False}) for _ in range(3)]
    assert errors == []
    assert tower.last is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower.state_dict().items())
    assert tower.num_runs == (1 if sizes is None else 3)  # what it reads may be another the next time
    expected = tower(*arguments, flag=False)
    for each in found:
        assert forms(each) == forms(expected)
        assert all(map(is_absent, (each["hidden"], each["pair"][0])))
        assert each["flag"] is False
        assert each["pair"][1] is None

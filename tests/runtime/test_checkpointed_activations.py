"""Activation checkpointing by itself: gradients, random numbers, memory, names, and wrong use."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError
from booster_runtime import disable_activation_checkpointing, enable_activation_checkpointing
from booster_runtime.activations import disable_activation_offload, enable_activation_offload
from booster_testing import peak_memory
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return x + self.dropout(torch.tanh(self.inner(x)))


class Stack(nn.Module):
    def __init__(self, num_blocks=4, width=8, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_stack(**changes):
    torch.manual_seed(2)
    return Stack(**changes)


def step(model, x=None):
    torch.manual_seed(11)
    model.zero_grad()
    model(torch.ones(3, 8) if x is None else x).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("by", "every", "expected"),
    [
        (None, 1, [2, 2, 2, 2]),
        (None, 3, [2, 1, 1, 2]),
        ("Block", 2, [2, 1, 2, 1]),
        (Block, 1, [2, 2, 2, 2]),
        (lambda name, module: name.endswith("1"), 1, [1, 2, 1, 1]),
        ([Block], 1, [2, 2, 2, 2]),
        (2, 1, [1, 1, 2, 1]),
        ([0, 1], 1, [2, 2, 1, 1]),
    ],
)
def test_chosen_modules_run_twice_and_gradients_are_equal(by, every, expected):
    model = make_stack()
    if isinstance(by, int):  # a module, or several
        by = model.blocks[by]
    elif by == [0, 1]:
        by = list(model.blocks[:2])
    names = enable_activation_checkpointing(model, by, every=every)
    assert_same_tensors(step(model), step(make_stack()), EXACT)
    assert [block.num_calls for block in model.blocks] == expected
    assert names == [f"blocks.{index}" for index, calls in enumerate(expected) if calls == 2]


def test_dropout_draws_in_backward_what_it_drew_in_forward():
    model = make_stack(dropout=0.5)
    enable_activation_checkpointing(model)
    assert_same_tensors(step(model), step(make_stack(dropout=0.5)), EXACT)


def test_dropout_draws_anew_where_the_random_state_is_not_preserved():
    model = make_stack(dropout=0.5)
    enable_activation_checkpointing(model, preserve_random_state=False)
    actual, expected = step(model), step(make_stack(dropout=0.5))
    assert any(not torch.equal(actual[name], expected[name]) for name in expected)


def test_a_copy_computes_with_its_own_parameters():
    model = make_stack()
    enable_activation_checkpointing(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(torch.ones(3, 8)).any()
    step(twin)
    assert model.blocks[0].inner.weight.grad is None


def test_it_can_be_taken_back():
    model = make_stack()
    own = model.blocks[1].forward = lambda x: x  # a forward of the module's own
    enable_activation_checkpointing(model)
    disable_activation_checkpointing(model)
    assert model.blocks[1].forward is own
    assert "forward" not in vars(model.blocks[0])
    enable_activation_checkpointing(model)


def test_memory_held_for_backward_falls():
    x = torch.ones(8192, 64)
    nbytes = x.numel() * x.element_size()

    def num_kept(model):
        step(model, x)  # what is allocated and imported once
        with peak_memory() as memory:
            out = model(x)
        assert out.requires_grad
        return memory.kept_bytes / nbytes

    plain, saving = make_stack(num_blocks=12, width=64), make_stack(num_blocks=12, width=64)
    enable_activation_checkpointing(saving)
    # Each of 12 blocks keeps its input and what tanh gave, or its input alone.
    assert num_kept(plain) == pytest.approx(24, abs=1.5)
    assert num_kept(saving) == pytest.approx(12, abs=1.5)


def test_blocks_inside_of_blocks_are_not_found_by_default():
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert enable_activation_checkpointing(model) == ["0", "1"]


# ---- operations that are kept


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("keep", "num_products", "num_tanhs"),
    [
        (None, 8, 8),
        ("expensive", 4, 8),
        ([aten.addmm], 4, 8),
        ([aten.addmm.default, aten.tanh.default], 4, 4),
        ([aten.convolution], 8, 8),
    ],
)
def test_what_is_kept_is_computed_once(keep, num_products, num_tanhs):
    num_calls = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            num_calls[operation.overloadpacket] += 1
            return operation(*args, **(kwargs or {}))

    model = make_stack(dropout=0.5)
    enable_activation_checkpointing(model, keep=keep)
    with Counted():
        gradients = step(model)
    assert_same_tensors(gradients, step(make_stack(dropout=0.5)), EXACT)
    assert num_calls[aten.addmm] == num_products + 1, "and the head's"
    assert num_calls[aten.tanh] == num_tanhs


@pytest.mark.parametrize("attention_dropout", [0.0, 0.5])
def test_attention_that_draws_is_computed_again_and_draws_the_same(attention_dropout):
    class Attention(Block):
        def forward(self, x):
            heads = self.inner(x).view(1, 1, *x.shape)
            dropped = attention_dropout if self.training else 0.0
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropped)
            return super().forward(attended.view(x.shape))

    def make():
        torch.manual_seed(2)
        return nn.Sequential(*(Attention(dropout=0.5) for _ in range(3)))

    model = make()
    enable_activation_checkpointing(model, keep="expensive")
    assert_same_tensors(step(model), step(make()), EXACT)


def test_random_operations_are_computed_again_even_if_they_are_named():
    class Noisy(Block):
        def forward(self, x):
            return super().forward(x * torch.rand_like(x))

    def make():
        torch.manual_seed(2)
        return nn.Sequential(*(Noisy(dropout=0.5) for _ in range(3)))

    model = make()
    enable_activation_checkpointing(model, keep=[aten.rand_like, aten.addmm])
    assert_same_tensors(step(model), step(make()), EXACT)


# ---- on the host; tests/together/devices has what this does on a device


@pytest.mark.parametrize("enable", [enable_activation_offload, partial(enable_activation_checkpointing, offload=True)])
def test_on_the_cpu_everything_stays_and_copies_work(enable):
    model = make_stack(dropout=0.5)
    assert enable(model, every=2) == ["blocks.0", "blocks.2"]
    twin = copy.deepcopy(model)
    expected = step(make_stack(dropout=0.5))
    assert_same_tensors(step(model), expected, EXACT)
    assert_same_tensors(step(twin), expected, EXACT)


def test_one_function_changes_a_module():
    model = make_stack()
    enable_activation_offload(model, every=4)
    with pytest.raises(
        ConfigError, match=r"offloaded already, such as 'blocks.0'.*`disable_activation_offload\(model\)`"
    ):
        enable_activation_checkpointing(model)
    with pytest.raises(ConfigError, match=r"'blocks\.0\.inner' is inside of 'blocks\.0'"):
        enable_activation_checkpointing(model, "Linear")
    disable_activation_offload(model)
    assert enable_activation_checkpointing(model, every=4) == ["blocks.0"]


# ---- what a user can get wrong


def by_itself():
    """Return a model that is checkpointed by transformers, whose method has another name in later versions."""
    model = tiny_llama()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def checkpointed():
    model = make_stack()
    enable_activation_checkpointing(model, every=4)
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (make_stack, {"by": "Layer"}, ConfigError, r"`by='Layer'`. Classes of its modules: Linear \(5\), Block \(4\)"),
        (make_stack, {"by": ["Block", "Layer"]}, ConfigError, "No module of the model is meant by 'Layer'"),
        (make_stack, {"by": ["Block", "Linear"]}, ConfigError, r"'blocks\.(\d)\.inner' is inside of 'blocks\.\1'"),
        (make_stack, {"by": make_stack().head}, ConfigError, "is not part of the model"),
        (make_stack, {"by": 3}, TypeError, "`by` is a module class"),
        (lambda: lambda: None, {}, TypeError, r"needs a torch\.nn\.Module"),
        (checkpointed, {}, ConfigError, r"1 module\(s\) are checkpointed already, such as 'blocks.0'"),
        (by_itself, {}, ConfigError, "'model.layers.0' is checkpointed by the model itself"),
        *((make_stack, {"every": every}, ConfigError, "is not a number of modules") for every in (0, -1, 0.5, True)),
        (make_stack, {"keep": "matmul"}, ConfigError, "`keep='matmul'` is not known. Use 'expensive'"),
        (make_stack, {"keep": []}, ConfigError, "`keep` has no operations"),
        (make_stack, {"keep": [torch.tanh]}, TypeError, "`keep` has operations, such as .*; got `<built-in"),
        (make_stack, {"keep": [aten.add_.Tensor]}, ConfigError, "`aten.add_.Tensor`, which writes to its arguments"),
    ],
)
def test_what_cannot_be_checkpointed_raises_and_changes_nothing(make, options, error, message):
    model = make()
    before = {module for module in model.modules() if "forward" in vars(module)} if isinstance(model, Stack) else set()
    with pytest.raises(error, match=message):
        enable_activation_checkpointing(model, **options)
    if isinstance(model, Stack):
        assert {module for module in model.modules() if "forward" in vars(module)} == before


@pytest.mark.parametrize("least_bytes", [0, -1, 0.5, True])
def test_least_bytes_must_be_positive(least_bytes):
    with pytest.raises(ConfigError, match="is not a positive number of bytes"):
        enable_activation_offload(make_stack(), least_bytes=least_bytes)

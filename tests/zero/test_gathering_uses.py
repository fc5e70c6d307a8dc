"""Any use of a parameter finds its values: gradients equal those of one process, however the model goes about it."""

import contextlib
import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from driven_runs import assert_same_loop
from gathering_plugin import GatheringPlugin
from matrix import matrix, named
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero.engine import Bucket
from booster_zero.engine.stand_ins import holds_values

CLOSE = tolerance_for(torch.float32)
WIDTH = 12


class Scale(torch.autograd.Function):
    """Multiplies by a matrix; backward takes it from what was saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Reverse(torch.autograd.Function):
    """Passes a parameter on, with its gradient reversed."""

    @staticmethod
    def forward(ctx, weight):
        del ctx
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return -grad


class Chain(torch.autograd.Function):
    """Multiplies by one matrix after another; backward takes all of them from what was saved."""

    @staticmethod
    def forward(ctx, x, *weights):
        inputs = [x]
        for weight in weights:
            inputs.append(inputs[-1] @ weight.t())
        ctx.save_for_backward(*inputs[:-1], *weights)
        return inputs[-1]

    @staticmethod
    def backward(ctx, grad):
        half = len(ctx.saved_tensors) // 2
        inputs, weights = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        grads = []
        for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
            grads.append(grad.t() @ x)
            grad = grad @ weight
        return grad, *reversed(grads)


class Layers(nn.Module):
    """Four layers and a vector; subclasses use them in their own ways. Input and output of shape ``(N, 12)``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(WIDTH))


class OfOthers(Layers):
    """Uses its children's parameters by functions, and by views of them."""

    def forward(self, x):
        first, second, third, fourth = self.layers
        x = torch.tanh(nn.functional.linear(x, first.weight, first.bias))
        rows = second.weight[: WIDTH // 2]
        x = torch.tanh(torch.cat([x @ rows.t(), x @ second.weight[WIDTH // 2 :].t()], dim=1) + second.bias)
        x = torch.tanh(torch.addmm(input=third.bias, mat1=x, mat2=third.weight.T))
        return torch.einsum("ni,oi->no", x, torch.stack([fourth.weight, fourth.weight]).mean(0)) * self.gain


class InCustomFunctions(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(Scale.apply(x, layer.weight) + Reverse.apply(layer.bias))
        return x * self.gain


class InOneCustomFunction(nn.Module):
    """Passes parameters of several chunks to one function, which saves them after it has used the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        return torch.tanh(Chain.apply(torch.tanh(x), *[layer.weight for layer in self.layers]))


class UsedAgain(nn.Module):
    """Has no parameters of its own, and uses each of its children's twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias) * layer.bias)
            x = torch.tanh(x @ layer.weight)
        return x


class Repeated(Layers):
    def forward(self, x):
        for layer in [*self.layers, *self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        return x * self.gain


class Branching(Layers):
    """Takes another way for an odd number of samples; leaves layers unused."""

    def forward(self, x):
        for layer in self.layers[:2] if len(x) % 2 else self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * self.gain


class Attention(nn.Module):
    """Reads the weight of a child that it never calls."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.0)

    def forward(self, x):
        x = torch.stack([x, x.flip(1), 2 * x])
        return self.layer(self.attention(x, x, x)[0]).mean(0)


class Recurrent(nn.Module):
    """Has weights that torch lists in one call."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        self.weighed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.weighed(self.cells(torch.stack([x, x.flip(1), 2 * x]))[0].mean(0))


class Checkpointed(Layers):
    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.reentrant)
        return x * self.gain


class UnderOthersHooks(Layers):
    """Keeps what is saved elsewhere, in its own way."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x * self.gain


class InOtherFormats(Layers):
    """Has views of its parameters in other formats saved: complex ones, conjugates and their parts, and bits."""

    def forward(self, x):
        first, second, third, fourth = self.layers
        weight = torch.view_as_complex(first.weight.view(WIDTH, WIDTH // 2, 2))
        z = torch.view_as_complex(x.view(-1, WIDTH // 2, 2))
        x = torch.tanh(torch.view_as_real(z @ weight.t()[:, : WIDTH // 2]).flatten(1))
        x = torch.tanh(second(x) * torch.view_as_complex(third.bias.view(-1, 2)).conj().imag.repeat(2))
        rotated = torch.view_as_complex(third.weight.view(WIDTH, WIDTH // 2, 2))[1:].conj()
        z = torch.view_as_complex(x.view(-1, WIDTH // 2, 2)) @ rotated.t()
        x = torch.tanh(torch.cat([z.real, z.imag[:, :1]], dim=1))
        signs = Signed.apply(x, fourth.weight.detach().view(torch.int32))
        return torch.tanh(fourth(signs)) * self.gain


class Signed(torch.autograd.Function):
    """Multiplies by the signs of numbers that are given as bits; backward takes the bits from what was saved."""

    @staticmethod
    def forward(ctx, x, bits):
        ctx.save_for_backward(bits)
        return x @ (1.0 - 2.0 * (bits < 0)).t()

    @staticmethod
    def backward(ctx, grad):
        (bits,) = ctx.saved_tensors
        return grad @ (1.0 - 2.0 * (bits < 0)), None


class Sparse(Layers):
    """Multiplies by a sparse matrix of constant places, whose values are a parameter."""

    def forward(self, x):
        places = torch.arange(WIDTH).repeat(2, 1)
        matrix = torch.sparse_coo_tensor(places, self.gain * 1.5, (WIDTH, WIDTH), check_invariants=True)
        constant = torch.eye(WIDTH).to_sparse()
        for layer in self.layers:
            x = torch.sparse.mm(matrix, torch.tanh(layer(x)).t()).t()
            x = torch.tanh(torch.mm(constant, x.t()).t() + layer.bias)
        return x


MODELS = {
    "of others": OfOthers,
    "custom functions": InCustomFunctions,
    "one custom function": InOneCustomFunction,
    "used again": UsedAgain,
    "repeated": Repeated,
    "branching": Branching,
    "attention": Attention,
    "recurrent": Recurrent,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "under others' hooks": UnderOthersHooks,
    "in other formats": InOtherFormats,
    "sparse": Sparse,
}


def make(name):
    torch.manual_seed(5)
    return MODELS[name]()


def batch(step, size):
    return torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(step))


def boost(model, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    booster = Booster(plugin=GatheringPlugin(**{"chunk_bytes": 256, **options}))
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    return booster, boosted, optimizer


def rows_of(step, replica):
    """Return four samples, and three in every other step."""
    return batch(10 * step + replica, 1)[step % 2 :]


def gathered(_booster, model, _optimizer):
    return [chunk.is_gathered for chunk in model.gatherer.layout.buckets]


@matrix(
    ["one custom function", "repeated", "attention", "checkpointed, reentrant", "in other formats", "sparse"],
    name=list(MODELS),
)
def test_gradients_equal_one_process(name):
    case = Case(build=partial(make, name), batch=rows_of, steps=4)
    for chunks in assert_equals_one_process(case, Setting(GatheringPlugin, {"chunk_bytes": 256}), tell=gathered):
        assert len(chunks) > 2
        assert sum(chunks) <= 1


def train_once(booster, model, optimizer):
    x = batch(0, 1)
    loss = model(x).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def goes_on_after(event):
    """Return what two steps give, with an event in between."""
    results = []
    for happens in (False, True):
        booster, model, optimizer = boost(make("of others"))
        losses = [train_once(booster, model, optimizer)]
        if happens:
            event(model, booster)
        losses += [train_once(booster, model, optimizer) for _ in range(2)]
        results.append(losses)
    assert results[0] == results[1]


class Broken(nn.Module):
    def forward(self, x):
        raise ArithmeticError(x.shape)


def raise_inside(model, booster):
    inner = model.unwrap()
    handle = inner.layers[2].register_forward_pre_hook(lambda *_: Broken()(torch.ones(1)))
    second = inner.register_forward_pre_hook(lambda *_: inner.layers[2](torch.ones(1, WIDTH)))
    with pytest.raises(ArithmeticError):
        model(batch(1, 1))
    handle.remove()
    second.remove()


def forward_only(model, booster):
    model(batch(1, 1))


def evaluate(model, booster):
    model.eval()
    with torch.inference_mode():
        before = model(batch(1, 1))
        assert torch.equal(before, model.unwrap()(batch(1, 1)))
    with torch.no_grad():
        assert torch.equal(model(batch(1, 1)), before)
    model.train()


def run_part(model, booster):
    model.unwrap().layers[1](batch(1, 1))


@matrix(["forward_only"], event=named([raise_inside, forward_only, evaluate, run_part], lambda event: event.__name__))
def test_training_goes_on_after(event):
    run_on_ranks(goes_on_after, 2, event)


def backward_twice(run):
    loss = run.loss(0)
    run.backward(loss, retain_graph=True)
    run.backward(loss)
    run.step()


def test_backward_twice_adds_up():
    case = Case(build=partial(make, "repeated"), batch=rows_of)
    assert_same_loop(backward_twice, case, Setting(GatheringPlugin, {"chunk_bytes": 256}))


def backward_after_the_step():
    _, model, optimizer = boost(make("repeated"))
    loss = model(batch(0, 1)).square().mean()
    optimizer.backward(loss, retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="as it was in forward, but it has been changed in place"):
        optimizer.backward(loss)


def test_a_graph_from_before_the_step_is_refused():
    run_on_ranks(backward_after_the_step, 2)


def teach():
    """A frozen teacher inside of the loss of a student, both boosted; gradients flow through the teacher."""
    results = []
    for is_boosted in (False, True):
        teacher, student = make("repeated").requires_grad_(requires_grad=False), make("of others")
        names = [n for n, _ in student.named_parameters()]
        if is_boosted:
            booster = Booster(plugin=GatheringPlugin(chunk_bytes=256))
            teacher = booster.boost(teacher).model
            student, optimizer, *_ = booster.boost(student, torch.optim.SGD(student.parameters(), lr=0.1))
        with torch.no_grad():
            target = teacher(batch(0, 1))
        loss = (teacher(student(batch(0, 1))) - target).square().mean()
        if is_boosted:
            booster.backward(loss, optimizer)
            found = {n: full_gradient(booster, student, n) for n in names}
        else:
            loss.backward()
            found = {n: p.grad for n, p in student.named_parameters()}
        results.append({n: gradient for n, gradient in found.items() if gradient is not None})
    assert_same_tensors(results[1], results[0], CLOSE)


def test_a_teacher_and_a_student_live_side_by_side():
    run_on_ranks(teach, 2)


def generate():
    from booster_testing.models import tiny_llama

    torch.manual_seed(0)
    original = tiny_llama(use_cache=True, pad_token_id=0).eval()
    prompt = torch.arange(5).view(1, 5)
    expected = original.generate(prompt, max_new_tokens=6, do_sample=False)
    model = Booster(plugin=GatheringPlugin(chunk_bytes=4096)).boost(original).model
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)


def test_a_model_generates():
    run_on_ranks(generate, 2)


def read_and_write_whole_parameters():
    _, model, _ = boost(make("repeated"))
    expected = make("repeated").state_dict()
    with model.whole_parameters(writes=True):
        for name, parameter in model.unwrap().named_parameters():
            assert torch.equal(parameter, expected[name])
            with torch.no_grad():
                parameter.mul_(2)
    state = model.state_dict()
    assert all(torch.equal(state[name], 2 * tensor) for name, tensor in expected.items())
    model.load_state_dict(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"'gain' is kept in shards .* `isnan` finds no values"):
        model.unwrap().gain.isnan()


def test_whole_parameters_can_be_read_and_written():
    run_on_ranks(read_and_write_whole_parameters, 2)


def transform():
    expected, original = make("repeated"), make("repeated")
    _, model, _ = boost(original)
    found = [torch.func.grad(lambda x, net=net: net(x).square().mean())(batch(0, 1)) for net in (expected, model)]
    assert_same_tensors({"x": found[1].detach()}, {"x": found[0].detach()}, CLOSE)


def test_inputs_are_differentiated_by_a_function_transform():
    run_on_ranks(transform, 2)


def read_after_own_backward(name):
    _, model, _ = boost(make(name))
    model(batch(0, 1)).square().mean().backward()
    for parameter in model.unwrap().parameters():
        with pytest.raises(ConfigError, match="is kept in shards"):
            parameter.sum()


@pytest.mark.parametrize("name", ["of others", "checkpointed"])
def test_a_backward_that_the_script_calls_leaves_no_values_behind(name):
    run_on_ranks(read_after_own_backward, 2, name)


def give_other_memory():
    _, model, _ = boost(make("repeated"))
    model.unwrap().layers[0].weight.data = torch.zeros(WIDTH, WIDTH)


def test_other_memory_of_a_parameter_is_refused():
    expect_on_ranks(
        ConfigError, r"'layers.0.weight' is kept in shards .* `.data = ...` finds no values", give_other_memory, 2
    )


def gathers_of_a_step(frac):
    """Return how many chunks are gathered in a step, how many there are, and the parameters after it."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(16))
    booster, wrapped, optimizer = boost(model, chunk_bytes=16 * 16 * 4, release_fraction=frac)
    counted = []
    gather = Bucket.start_gather
    for _ in range(2):
        counted.clear()
        for chunk in wrapped.gatherer.layout.buckets:
            chunk.start_gather = lambda chunk=chunk: (counted.append(chunk), gather(chunk))
        booster.backward(wrapped(torch.ones(2, 16)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return len(counted), len(wrapped.gatherer.layout.buckets), wrapped.state_dict()


def test_parameters_that_are_not_sharded_are_gathered_once_a_step():
    results = {frac: run_on_ranks(gathers_of_a_step, 2, frac)[0] for frac in (0.0, 0.5, 1.0)}
    # Backward needs all weights but the first layer's, and the one that forward used last is still there.
    assert [count for count, _, _ in results.values()] == [8, 8 + 2, 8 + 6]
    for _, num_chunks, state in results.values():
        assert num_chunks == 8
        assert all(torch.equal(tensor, results[1.0][2][name]) for name, tensor in state.items())


def memory_between_uses():
    """Return how many bytes of parameters are alive at most while a model runs, by its hooks, and in all."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    booster, wrapped, optimizer = boost(model, chunk_bytes=64 * 64 * 4, max_prefetch=1)
    counted = []
    for layer in model:
        layer.register_forward_hook(
            lambda *_: counted.append(sum(chunk.whole is not None for chunk in wrapped.gatherer.layout.buckets))
        )
    for _ in range(2):
        loss = wrapped(torch.randn(2, 64)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return max(counted), len(wrapped.gatherer.layout.buckets)


def test_few_chunks_are_whole_at_a_time():
    for most, num_chunks in run_on_ranks(memory_between_uses, 2):
        assert num_chunks == 12
        assert most <= 3  # in use, kept for what comes right after, and on its way


def accumulate(is_split):
    booster, model, optimizer = boost(make("repeated"))
    for micro in range(2):
        with booster.no_sync(model) if is_split and micro == 0 else contextlib.nullcontext():
            booster.backward(model(batch(micro, 1)).square().mean(), optimizer)
        # Gradients are in the shards, also while they accumulate.
        assert not any(holds_values(parameter.grad) for parameter in model.unwrap().parameters())
    optimizer.step()
    return model.state_dict()


def compare_accumulation():
    first, second = accumulate(is_split=True), accumulate(is_split=False)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_gradients_accumulate_in_shards():
    run_on_ranks(compare_accumulation, 2)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forward_without_backward():
    """Return how many bytes twenty forwards leave behind at least, whose outputs nobody runs backward from."""
    _, model, _ = boost(make("repeated"))
    x = torch.randn(2**15, WIDTH)  # 1.5 MiB, and as much for each of twelve outputs that tanh saves
    resident = [resident_bytes()]
    for _ in range(3):  # the C library may take some for later in one of them, but not in all
        for _ in range(20):
            model(x)
        resident.append(resident_bytes())
    return min(after - before for before, after in pairwise(resident))


def test_a_forward_without_a_backward_leaves_nothing_behind():
    for left in run_on_ranks(forward_without_backward, 2):
        assert left < 2 * 12 * 1.5 * 2**20, "less than two forwards keep"


def differentiate_twice():
    results = []
    for is_boosted in (False, True):
        model = make("repeated")
        if is_boosted:
            _, model, _ = boost(model)
        x = batch(0, 1).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append({"first": first.detach(), "second": second})
    assert_same_tensors(results[1], results[0], CLOSE)


def test_inputs_are_differentiated_twice():
    run_on_ranks(differentiate_twice, 2)

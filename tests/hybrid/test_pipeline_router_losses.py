"""A loss over the routers of all layers, or over all hidden states, is that of one process under pipelines."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, itself, noise, own_loss, zoo_case
from hybrid_runs import stages
from matrix import matrix, named
from model_zoo import deepened
from ranked import on_ranks

from booster_hybrid import HybridParallelPlugin

MICROBATCHES = 4


def of_hidden_states(outputs, _batch):
    """Take a loss of what all layers have in between."""
    return sum((number + 1) * state.float().square().mean() for number, state in enumerate(outputs.hidden_states))


def assert_parity(name, settings, options, num_ranks=2, **changes):
    """Compare with a model of the zoo with four layers, which sees a microbatch at a time."""
    name = f"transformers/{name}"
    functions = {"build": partial(deepened, name, **settings), "loss": own_loss}
    case = zoo_case(name, **{**functions, "samples": 2 * MICROBATCHES, "steps": 1, **changes})
    options = {"num_microbatches": MICROBATCHES, "example_batch": case.batch(0, 0), **options}
    parts = 1 if case.outputs else MICROBATCHES
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options, num_ranks), parts=parts)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(4, {"pp_size": 4}, marks=pytest.mark.slow),
        (2, {"pp_size": 2, "pp_style": "zbv"}),
        (2, {"pp_size": 2, "checkpoint_ratio": 1.0}),
        pytest.param(4, {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["pp4", "zbv", "recomputed", "tp2pp2"],
)
def test_all_routers_are_balanced(num_ranks, options):
    assert_parity("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}, options, num_ranks)


@matrix(["gpt2_lm"], name=["llama", "gpt2_lm", "bert_masked_lm"])
def test_hidden_states_of_all_layers_arrive(name):
    assert_parity(name, {"output_hidden_states": True}, {"pp_size": 4}, 4, loss=of_hidden_states, outputs=True)


samples = noise(4, 4)


EXAMPLE = samples(0, 0)[:2]


@on_ranks(2)
def test_what_hooks_have_seen_of_a_layer_that_fails_without_values_counts_once():
    class ToldLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            scores = self.router(x)
            assert self.out.weight.abs().sum() > 0
            return x + self.out(x) * scores

    class Told(torch.nn.Module):
        """Layers whose inner results a hook collects, and which run with values alone."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([ToldLayer() for _ in range(4)])
            self.seen = []
            for layer in self.layers:
                layer.router.register_forward_hook(self.see)

        def see(self, _router, _args, output):
            self.seen.append(output)

        def forward(self, x):
            self.seen.clear()
            for layer in self.layers:
                x = layer(x)
            return x.square().mean() + sum(each.square().mean() for each in self.seen) / len(self.seen)

    case = Case(build=Told, batch=samples, loss=itself, steps=2)
    assert_equals_one_process(case, stages(EXAMPLE))


@on_ranks(2)
def test_hooks_may_change_what_modules_inside_of_layers_return():
    def widen(_router, _args, output):
        return torch.cat([output, output], -1).double()

    class WidenedLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.out = torch.nn.Linear(4, 2), torch.nn.Linear(4, 4)

        def forward(self, x):
            return x + self.out(x.float()) * self.router(x.float())

    class Widened(torch.nn.Module):
        """Layers that run only with what a hook makes of an inner module's output: another width and format."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([WidenedLayer() for _ in range(4)])
            for layer in self.layers:
                layer.router.register_forward_hook(widen)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x = x * (2 if x.dtype == torch.float64 else 3)
            return x.square().mean()

    case = Case(build=Widened, batch=samples, loss=itself, steps=2)
    assert_equals_one_process(case, stages(EXAMPLE))


@matrix(
    ["1f1b-0", "zbv-1", "1f1b-2"],
    style=named(
        [{"pp_style": style} for style in ("1f1b", "gpipe", "interleaved", "zbv")], lambda each: each["pp_style"]
    ),
    stage=[0, 1, 2, 3],
)
@on_ranks(2)
def test_what_joins_backward_without_the_loss_counts_once(style, stage):
    class Attach(torch.autograd.Function):
        """Lets a loss take part in backward without being in the loss, as DeepSeek's remote code does."""

        @staticmethod
        def forward(_ctx, hidden, _loss):
            return hidden.clone()

        @staticmethod
        def backward(_ctx, gradient):
            return gradient, torch.ones((), dtype=gradient.dtype)

    class AttachingLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.out = torch.nn.Linear(4, 3), torch.nn.Linear(4, 4)

        def forward(self, x):
            shares = self.router(x).softmax(-1)
            return x + Attach.apply(self.out(x) * shares[..., :1], shares.square().sum(-1).mean())

    class Attaching(torch.nn.Module):
        """Layers that attach the loss of their router, and a decay that a hook on a parameter adds."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([AttachingLayer() for _ in range(4)]).double()
            weight = self.layers[0].out.weight
            weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.double())
            return x.square().mean()

    case = Case(build=Attaching, batch=samples, loss=itself, steps=2, micro_batches=2)
    assert_equals_one_process(case, stages(EXAMPLE, num_microbatches=4, zero_stage=stage, **style))

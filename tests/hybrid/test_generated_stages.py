"""Generated models, cut into stages: each computes what one process does with the same draws, or raises.

A model draws by `Generated.draw`, which notes what came. What several stages know must be equal, and a plain model that
is given the noted values is what losses and gradients are compared with.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from stages_in_process import cut, run
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from booster_core.errors import AbsentValueError, BoosterError
from booster_hybrid.pipeline.absent import is_absent, is_in_trial

WIDTH = 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_recomputed = False

    def forward(self, x, mask=None):
        x = checkpoint(self._inner, x, use_reentrant=False) if self.is_recomputed else self._inner(x)
        return x if mask is None else x * mask

    def _inner(self, x):
        return torch.tanh(self.linear(x))


class Entry(nn.Module):
    """Drops of what only the first stage has, and then draws what others use as well, as masked autoencoders do."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self._draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x):
        hidden = self.linear(x)
        dropped = self._draw("dropped", lambda: nn.functional.dropout(hidden.detach() * 0 + 1, 0.4))
        return hidden * dropped, self._draw("order", lambda: torch.rand(x.shape[0], 1)) > 0.5


SOURCES = {
    "of_torch": lambda like: torch.randn(like.shape[0], 1),
    "of_form": torch.randn_like,
    "of_bernoulli": lambda like: torch.bernoulli(torch.full_like(like, 0.5)),
    "in_place": lambda like: torch.empty_like(like).uniform_(0.5, 1.5),
    "of_numpy": lambda like: torch.from_numpy(np.random.rand(like.shape[0], 1)).float(),  # noqa: NPY002 - as models do
    "of_python": lambda like: torch.full((like.shape[0], 1), random.random()),
}

PLACES = ("before", "between", "after", "in_entry", "in_layer")
SHAPES = ("plain", "residual", "skip", "skip of the entry", "mask", "index", "write", "written_view", "detached")


class Generated(nn.Module):
    def __init__(self, source=None, place="before", shape="plain", num_layers=4):
        super().__init__()
        self.source, self.place, self.shape = source, place, shape
        self.entry = Entry(self.draw)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.exit = nn.Linear(WIDTH, WIDTH)
        self.replayed, self.noted = None, {}

    def draw(self, name, make):
        if self.replayed is not None:
            return self.replayed[name]
        value = make()
        if not is_absent(value) and not is_in_trial():
            with torch._C.DisableTorchFunction():
                self.noted[name] = value.detach().clone()
        return value

    def noise(self, name, like):
        return 0 if self.source is None else self.draw(name, lambda: SOURCES[self.source](like))

    def between(self, number, before, hidden):
        if self.shape == "residual":
            hidden = before + hidden
        elif self.shape == "residual in place":
            before += hidden
            hidden = before
        elif self.shape == "write":
            hidden = hidden * 1
            hidden *= 1.5
        elif self.shape == "written_view":
            hidden = hidden * 1
            hidden[:, :2].mul_(1.5)
        return hidden + (self.noise(f"between {number}", hidden) if self.place == "between" else 0)

    def joined(self, hidden, entered, states):
        if self.shape == "skip":
            return hidden + states[0]
        if self.shape == "detached":
            return hidden * states[0].detach()
        if self.shape == "index":
            return hidden + hidden.gather(-1, states[0].argmax(-1, keepdim=True))
        return hidden + entered if self.shape == "skip of the entry" else hidden

    def forward(self, x, returns_states=False, shift=0, uses_early=False):
        hidden, order = self.entry(x)
        noise = self.noise("before", hidden) if self.place in ("before", "after") else 0
        hidden = entered = hidden + noise
        mask = hidden > 0 if self.shape == "mask" else None
        states = []
        for number, layer in enumerate(self.layers):
            before, hidden = hidden, layer(hidden, mask)
            states.append(hidden)
            hidden = self.between(number, before, hidden)
        hidden = self.joined(hidden, entered, states) + shift
        if uses_early:
            hidden = hidden + states[0]
        if self.place == "after":
            hidden = hidden - noise + self.noise("late", hidden)
        out = self.exit(hidden) * (order if self.place == "in_entry" else 1)
        return {"out": out, "states": states} if returns_states else {"out": out}


def criterion(outputs, batch):
    return (outputs["out"] - batch["x"]).square().mean()


def made(*args, is_training=True, is_recomputed=False, **kwargs):
    torch.manual_seed(3)
    model = Generated(*args, **kwargs).train(is_training)
    for layer in model.layers:
        layer.is_recomputed = is_recomputed
    return model


def batches(count=2, **more):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, WIDTH, generator=generator), **more} for _ in range(count)]


def parts(model, **options):
    """Cut a model; what it noted in the dry run is forgotten."""
    plan, staged = cut(model, batches(1)[0], **options)
    for each in staged:
        each.model.noted.clear()
    return plan, staged


def merged(staged, noted):
    """Return what the stages drew for one microbatch; what several know must be equal."""
    found = {}
    for each in staged:
        for name, value in each.model.noted.items():
            torch.testing.assert_close(found.setdefault(name, value), value, rtol=0, atol=0, msg=name)
        each.model.noted.clear()
    assert found or not noted
    return found


def compare(model, pp_size=2, style="1f1b", given=None, trains=True):
    plan, staged = parts(model, pp_size=pp_size, style=style, trains=trains)
    expected = Generated(model.source, model.place, model.shape, len(model.layers)).train(model.training)
    expected.load_state_dict(model.state_dict())
    drawn = []
    for number, batch in enumerate(given or batches()):
        results, gradients = run(plan, staged, [batch], criterion, seed=number, trains=trains)
        drawn.append(merged(staged, model.source))
        expected.replayed = drawn[-1]
        outputs = expected(**batch)
        loss = criterion(outputs, batch)
        torch.testing.assert_close(results[0][0]["out"], outputs["out"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(results[0][1], loss, rtol=1e-6, atol=1e-7)
        if trains:
            loss.backward()
    if trains:
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients.get(name), parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    for name, value in drawn[0].items():
        assert not torch.equal(value, drawn[1][name]), f"{name} is the same in two batches"


PIPELINES = ((2, "1f1b"), (4, "1f1b"), (2, "interleaved"), (2, "zbv"))


@pytest.mark.parametrize("source", SOURCES)
def test_draws_outside_of_layers_are_those_of_one_process(source):
    # every source, and every place, in each pipeline
    for number, place in enumerate(PLACES, list(SOURCES).index(source)):
        compare(made(source, place), *PIPELINES[number % len(PIPELINES)])


@pytest.mark.parametrize("how", ["attribute", "list", "buffer"])
@pytest.mark.parametrize("by", ["model", "criterion"])
def test_what_layers_leave_in_their_modules_is_absent_on_other_stages(how, by):
    class Keeping(Layer):
        """Leaves what it computes in an attribute or a buffer."""

        def __init__(self):
            super().__init__()
            old = torch.zeros(3, WIDTH)
            if how == "buffer":
                self.register_buffer("states", old)
            else:
                self.states = [old] if how == "list" else old

        def forward(self, x, mask=None):
            x = super().forward(x, mask)
            if how == "buffer":
                self.states.copy_(x.detach())
            else:
                self.states = [x] if how == "list" else x
            return x

    class Reading(Generated):
        """Reads what its first layer has left, where it is told to."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Keeping() for _ in range(4))

        def forward(self, x, reads=False):
            out = super().forward(x)["out"]
            return {"out": out + pytree.tree_leaves(self.layers[0].states)[0] if reads else out}

    torch.manual_seed(3)
    model = Reading()
    plan, staged = parts(model)
    run(plan, staged, batches(), criterion)

    def reads(outputs, batch):
        last = staged[1].model
        return criterion(outputs, batch) + sum(
            each.sum() for layer in last.layers for each in pytree.tree_leaves(layer.states)
        )

    with pytest.raises(AbsentValueError, match=r"what layer 'layers\.0' writes into 'layers\.0\.states'"):
        run(plan, staged, batches(reads=by == "model"), reads if by == "criterion" else criterion)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_that_pass_by_layers_are_those_of_one_process(shape):
    for pp_size, style in PIPELINES:
        compare(made("of_form", "between", shape), pp_size, style)


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("shape", ["plain", "residual", "write", "written_view"])
def test_a_residual_outside_of_layers_is_one_tensor_at_a_boundary(pp_size, shape):
    plan, _ = parts(made(shape=shape, num_layers=8), pp_size=pp_size)
    assert [boundary.names for boundary in plan.cuts.needs[True].boundaries] == [(), *[("x",)] * (pp_size - 1)]


@pytest.mark.parametrize(("pp_size", "style"), PIPELINES)
def test_a_residual_in_place_is_that_of_one_process(pp_size, style):
    """The input of a stage's first layer is written to, which is none that was received then."""
    compare(made("of_form", "before", "residual in place", is_training=False), pp_size, style, trains=False)


@pytest.mark.parametrize(("is_training", "is_recomputed"), [(False, False), (True, True)])
def test_modes(is_training, is_recomputed):
    for place, shape in itertools.product(PLACES, ("plain", "residual", "mask")):
        compare(
            made("of_torch", place, shape, is_training=is_training, is_recomputed=is_recomputed), trains=is_training
        )


def test_evaluation_in_inference_mode():
    model = made("of_form", "between", "residual", is_training=False)
    plan, staged = parts(model)
    with torch.inference_mode():
        ((outputs, _),), _ = run(plan, staged, batches(1), criterion, trains=False)
        model.replayed = merged(staged, model.source)
        torch.testing.assert_close(outputs["out"], model(**batches(1)[0])["out"])


def test_entries_that_come_later_are_used():
    compare(made("of_torch", "after"), given=batches(2, shift=torch.ones(3, 1)))


@pytest.mark.parametrize("pp_size", [2, 4])
def test_values_that_the_example_did_not_need_raise(pp_size):
    plan, staged = cut(made(), batches(1)[0], pp_size=pp_size)
    run(plan, staged, batches(), criterion)
    with pytest.raises(AbsentValueError, match=r"layer 'layers\.0', which another pipeline stage has"):
        run(plan, staged, batches(1, uses_early=True), criterion)


def test_outputs_that_the_example_did_not_ask_for_raise_when_they_are_read():
    plan, staged = cut(made(), batches(1)[0], pp_size=2)
    ((outputs, _),), _ = run(plan, staged, batches(1, returns_states=True), criterion)  # nothing reads them
    assert [is_absent(each) for each in outputs["states"]] == [True, True, False, False]
    with pytest.raises(AbsentValueError, match=r"layer 'layers\.0'"):
        run(plan, staged, batches(1, returns_states=True), lambda out, _: out["states"][0].mean())


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_what_a_model_returns_in_one_mode_alone_is_sent_in_that_mode(pp_size, mode, known):
    class OfOneMode(Generated):
        """Returns what its layers made in one mode alone, as models that keep memories for generation do."""

        def forward(self, x):
            return super().forward(x, returns_states=self.training is mode)

    model = OfOneMode().train(known)
    plan, staged = parts(model, pp_size=pp_size)
    assert [len(boundary.outputs) for boundary in plan.cuts.needs[not mode].boundaries] == [0] * pp_size
    for is_training in (True, False):
        for each in (model, *(one.model for one in staged)):
            each.train(is_training)
        ((outputs, _),), _ = run(plan, staged, batches(1), criterion, trains=is_training)
        model.replayed = merged(staged, model.source)
        expected = model(**batches(1)[0])
        assert outputs.keys() == expected.keys() == ({"out", "states"} if is_training is mode else {"out"})
        torch.testing.assert_close(outputs, expected)


def test_the_example_leaves_nothing_in_lists_and_dicts_of_a_model():
    class Remembering(Generated):
        """Adds what its layers made to a list and a dict that it has."""

        def __init__(self):
            super().__init__()
            self.before, self.by_name = [torch.ones(1)], {"first": torch.ones(1)}

        def forward(self, x):
            outputs = super().forward(x, returns_states=True)
            self.before.append(outputs["states"][0].detach())
            self.by_name["last"] = outputs["states"][-1].detach()
            return {"out": outputs["out"]}

    model = Remembering()
    (one,), (first,) = model.before, model.by_name.values()
    cut(model, batches(1)[0])
    assert model.before[0] is one
    assert model.by_name["first"] is first
    assert (len(model.before), len(model.by_name)) == (1, 1)


def test_a_read_that_the_model_catches_raises_all_the_same():
    class Swallowing(Generated):
        """Catches whatever goes wrong when it looks at a layer's output."""

        def forward(self, x, looks=False):
            hidden, _ = self.entry(x)
            scale = 1.0
            for layer in self.layers:
                hidden = layer(hidden)
                if looks:
                    try:
                        scale = float(hidden.detach().abs().max())
                    except Exception:  # noqa: BLE001 - the model's own
                        scale = 2.0
            return {"out": self.exit(hidden) * scale}

    torch.manual_seed(3)
    plan, staged = cut(Swallowing(), batches(1)[0])
    run(plan, staged, batches(), criterion)
    with pytest.raises(AbsentValueError, match=r"`(item|__float__)` needs values of layer 'layers\.0'"):
        run(plan, staged, batches(1, looks=True), criterion)


def test_the_end_of_a_stage_is_no_exception_that_a_model_catches():
    class Catching(Generated):
        """Catches every error of its layers."""

        def forward(self, x):
            hidden, _ = self.entry(x)
            for layer in self.layers:
                try:
                    hidden = layer(hidden)
                except Exception:  # noqa: BLE001 - the model's own
                    hidden = hidden * 0
            return {"out": self.exit(hidden)}

    torch.manual_seed(3)
    model = Catching()
    plan, staged = parts(model)
    ((outputs, _),), _ = run(plan, staged, batches(1), criterion)
    model.replayed = merged(staged, None)

    torch.testing.assert_close(outputs["out"], model(**batches(1)[0])["out"])


@pytest.mark.parametrize(
    "of_model",
    [
        lambda model: sum(each.square().sum() for each in model.parameters()),
        lambda model: model.layers[0].linear.weight.square().sum(),
        lambda model: model.layers[0](torch.ones(2, WIDTH)).sum(),
    ],
    ids=["all parameters", "a parameter of another stage", "a layer of another stage"],
)
def test_a_criterion_that_reads_what_other_stages_have_raises(of_model):
    plan, staged = cut(made(), batches(1)[0])
    with pytest.raises(BoosterError, match="which another pipeline stage has"):
        run(plan, staged, batches(1), lambda outputs, batch: criterion(outputs, batch) + of_model(staged[-1].model))

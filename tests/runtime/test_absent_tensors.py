"""What a tensor whose values are not here lets through, and what it sees: the table of operations, on this torch."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from booster_core.errors import ConfigError
from booster_runtime.memory import AbsentTensors, absent, is_absent


def test_a_torch_without_the_key_is_named_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(absent, "_BIT", None)
    weight = nn.Parameter(torch.ones(2))
    assert not is_absent(weight)
    with pytest.raises(ConfigError, match=r"has no dispatch key TESTING_ONLY_GenericWrapper.*plugin='zero'"):
        AbsentTensors([weight], lambda *_: None, dtype=weight.dtype, device=weight.device)


class Other(torch.Tensor):
    """A library's subclass of tensors, which torch asks before ours."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Reversed(torch.autograd.Function):
    """The usual identity with a gradient of its own."""

    @staticmethod
    def forward(ctx, weight):
        del ctx
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return -gradient


class Scene:
    """A layer and a loss of it, whose parameter's values are then taken away."""

    def __init__(self):
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3, bias=False)
        self.p, self.x = self.layer.weight, torch.randn(2, 4)
        self.values, self.uses = self.p.data, []
        self.factor = torch.randn(3, 4, requires_grad=True)
        self.loss = (self.p * self.factor).sum()
        self.scaled = (self.p * 2).sum()
        self.arrives = False
        self.absent = AbsentTensors([self.p], self.on_use, dtype=self.p.dtype, device=self.p.device)
        self.absent.hide()

    def on_use(self, position, what):
        self.uses.append(what)
        if not self.arrives:
            msg = f"tensor {position} is not here, and `{what}` needs it"
            raise ConfigError(msg)
        self.absent.show([self.values])


def under(manager, function):
    with manager:
        return function()


def step(optimizer_class, **options):
    def operation(scene):
        scene.p.grad = torch.ones(3, 4)
        optimizer_class([scene.p], lr=0.1, **options).step()

    return operation


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


ONE = torch.ones(3, 4)
READS = {
    "float": lambda s: float(s.p.detach().sum()),
    "tolist": lambda s: s.p.tolist(),
    "numpy": lambda s: s.p.detach().numpy(),
    "asarray": lambda s: np.asarray(s.p.data),
    "element": lambda s: s.p[0, 1].item(),
    "data": lambda s: s.p.data.sum(),
    "data_ptr": lambda s: s.p.data_ptr(),
    "untyped_storage": lambda s: bytes(s.p.untyped_storage()),
    "operator": lambda s: torch.ops.aten.sum.default(s.p),
    "equal": lambda s: torch.equal(s.p, s.p),
    "parameters_to_vector": lambda s: nn.utils.parameters_to_vector([s.p]),
    "foreach": lambda s: torch._foreach_norm([s.p]),
    "deepcopy": lambda s: copy.deepcopy(s.p),
    "AveragedModel": lambda s: torch.optim.swa_utils.AveragedModel(s.layer),
    "state_dict": lambda s: s.layer.state_dict(),
    "torch.save": lambda s: torch.save(s.p, io.BytesIO()),
    "torch.save of the module": lambda s: torch.save(s.layer, io.BytesIO()),
    "pickle": lambda s: pickle.dumps(s.p),
    "linear": lambda s: functional.linear(s.x, s.p),
    "another subclass first": lambda s: torch.mm(s.x.as_subclass(Other), s.p.t()),
    "without torch functions": lambda s: under(
        torch._C.DisableTorchFunctionSubclass(), lambda: functional.linear(s.x, s.p)
    ),
    "custom function": lambda s: Product.apply(s.x, s.p),
    "custom function that views": lambda s: Reversed.apply(s.p),
    "inference_mode": lambda s: under(torch.inference_mode(), s.p.sum),
    "under a dispatch mode": lambda s: under(FlopCounterMode(display=False), s.p.sum),
    "func.grad": lambda s: torch.func.grad(lambda w: (w * w).sum())(s.p),
    "vmap": lambda s: torch.vmap(lambda row: row.sum())(s.p),
    "functional_call": lambda s: torch.func.functional_call(s.layer, {"weight": s.p}, (s.x,)),
    "to another dtype": lambda s: s.layer.to(torch.bfloat16),
    "saved by autograd": lambda s: s.loss.backward(),
}
WRITES = {
    "fill_": lambda s: s.p.fill_(1),
    "copy_": lambda s: s.p.copy_(ONE),
    "clamp_": lambda s: s.p.clamp_(0),
    "lerp_": lambda s: s.p.lerp_(ONE, 0.5),
    "add": lambda s: s.p.__iadd__(1),
    "init": lambda s: nn.init.normal_(s.p),
    "reset_parameters": lambda s: s.layer.reset_parameters(),
    "fill_ of data": lambda s: s.p.data.fill_(1),
    "elements of data": lambda s: s.p.data.__setitem__(..., 1.0),
    "data =": lambda s: setattr(s.p, "data", ONE),
    "element": lambda s: s.p.__setitem__((0, 1), 5.0),
    "out=": lambda s: torch.add(ONE, 1, out=s.p),
    "vector_to_parameters": lambda s: nn.utils.vector_to_parameters(torch.ones(12), [s.p]),
    "foreach": lambda s: torch._foreach_add_([s.p], 1.0),
    "SGD": step(torch.optim.SGD, foreach=True),
    "SGD, a loop": step(torch.optim.SGD, foreach=False),
    "AdamW, fused": step(torch.optim.AdamW, fused=True),
    "load_state_dict": lambda s: s.layer.load_state_dict({"weight": ONE}),
    "set_": lambda s: s.p.set_(ONE),
    "operator": lambda s: torch.ops.aten.fill_.Scalar(s.p, 1.0),
}


def check_seen(operation, is_write):
    scene = Scene()
    with (
        torch.set_grad_enabled(not is_write),
        pytest.raises(Exception, match=r"tensor 0 is not here, and `.+` needs it"),
    ):
        operation(scene)
    assert is_absent(scene.p)
    assert scene.uses


@pytest.mark.parametrize("name", READS)
def test_a_read_is_seen(name):
    check_seen(READS[name], is_write=False)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name):
    check_seen(WRITES[name], is_write=True)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "call",
    [lambda s: torch.distributed.all_reduce(s.p), lambda s: torch.distributed.group.WORLD.allreduce([s.p]).wait()],
)
def test_a_collective_is_seen(call):
    check_seen(call, is_write=True)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_seen():
    check_seen(lambda s: torch.jit.script(s.layer)(s.x), is_write=False)


DESCRIPTIONS = {
    "shape": lambda p: (tuple(p.shape), p.numel(), len(p), p.dim(), p.stride(), p.is_contiguous()),
    "format": lambda p: (p.dtype, p.device, p.layout, p.element_size(), p.is_floating_point()),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad, p.grad_fn),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor)),
    "container": lambda p: ({p: 1}[p], [p].index(p)),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_is_that_of_the_tensor(name):
    scene = Scene()
    assert DESCRIPTIONS[name](scene.p) == DESCRIPTIONS[name](nn.Parameter(scene.values))
    assert not scene.uses


def test_what_needs_no_values_works():
    scene, seen = Scene(), []
    p = scene.p
    assert repr(p) == "Parameter(shape=(3, 4), dtype=torch.float32, values are not here)"
    p.grad = ONE
    p.grad = None
    p.requires_grad_(requires_grad=False).requires_grad_()
    p.register_post_accumulate_grad_hook(seen.append)
    assert scene.layer.state_dict(keep_vars=True)["weight"] is p
    torch.optim.SGD([nn.Parameter(ONE)], lr=0.1).add_param_group({"params": [p]})
    scene.layer.zero_grad()
    (gradient,) = torch.autograd.grad(scene.scaled, [p], retain_graph=True)
    scene.scaled.backward(inputs=[p])
    assert torch.equal(p.grad, gradient)
    assert len(seen) == 1
    assert not scene.uses


@pytest.mark.parametrize("name", [name for name in READS if "save" not in name and name != "pickle"])
def test_a_use_that_brings_values_goes_on_with_them(name):
    scene = Scene()
    scene.arrives = True
    found = READS[name](scene)
    plain = Scene()
    plain.absent.show([plain.values])
    expected = READS[name](plain)
    assert type(scene.p) is nn.Parameter
    assert len(scene.uses) == 1
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(found, (float, list)):
        assert found == expected


def test_backward_finds_what_autograd_saved():
    scene = Scene()
    scene.arrives = True
    scene.loss.backward()
    assert torch.equal(scene.factor.grad, scene.values)


def test_tensors_keep_their_objects_versions_and_hooks():
    scene = Scene()
    hooked = []
    scene.p.register_hook(hooked.append)
    identity, version = id(scene.p), scene.p._version
    scene.absent.show([scene.values])
    scene.absent.hide()
    scene.absent.show([scene.values])
    assert (id(scene.layer.weight), scene.p._version, type(scene.p)) == (identity, version, nn.Parameter)
    scene.scaled.backward()
    assert len(hooked) == 1


def test_nothing_is_kept_alive():
    scene = Scene()
    tensor, owner, values = weakref.ref(scene.p), weakref.ref(scene.absent), weakref.ref(scene.values)
    scene.values = scene.loss = scene.scaled = None
    gc.collect()
    assert values() is None, "hidden tensors hold no memory"
    p = scene.p
    del scene
    gc.collect()
    assert owner() is None
    with pytest.raises(ConfigError, match="whose boosted model is gone"):
        p.sum()
    del p
    gc.collect()
    assert tensor() is None


def test_a_compiled_function_brings_values_at_each_call():
    scene = Scene()
    scene.arrives = True
    calls = []
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.tanh(x) + scene.p, backend=lambda graph, _: (calls.append(graph), graph.forward)[1]
    )
    for number in range(3):
        scene.absent.hide()
        assert torch.equal(compiled(ONE), torch.tanh(ONE) + scene.values)
        assert len(scene.uses) == number + 1
    assert len(calls) <= 2, "it is not compiled again"

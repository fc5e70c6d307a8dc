"""What the probe of split layers finds that no name shows, and that it leaves the user's modules as they were."""

import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from booster_core.errors import ConfigError
from booster_hybrid import ModuleRule, ShardingPolicy, Style
from booster_hybrid.probe.in_process import on_ranks
from booster_hybrid.probe.probe import ReadOutsideError, check_policy

CPU = torch.device("cpu")
WIDTH, HEADS, VOCABULARY = 8, 4, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True, dropout_p=0.1)
        return self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, is_interleaved=False, gain=1.0, width=WIDTH):
        super().__init__()
        self.is_interleaved, self.gain = is_interleaved, gain
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        up = self.up(x)
        one, two = (up[..., ::2], up[..., 1::2]) if self.is_interleaved else up.chunk(2, -1)
        return x + self.down(one * two.sigmoid() * self.gain)


class Block(nn.Module):
    def __init__(self, *gated):
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(), Gated(*gated), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.mlp(x + self.drop(self.attention(self.norm(x))))


class Model(nn.Module):
    """Blocks in a list, another one outside of it, an embedding, and a head that may use the embedding's table."""

    def __init__(self, head=None, blocks=None):
        super().__init__()
        self.tokens, self.blocks, self.neck = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(), Gated()
        self.blocks.extend(blocks or (Block(), Block()))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head_of = head

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        x = self.neck(x)
        return self.head(x) if self.head_of is None else self.head_of(self, x)


ATTENTION = {
    "qkv": ModuleRule("blocks.*.attention.qkv", Style.COLUMN, HEADS, num_blocks=3, scaled=("num_heads",)),
    "out": ModuleRule("blocks.*.attention.out", Style.ROW, HEADS),
    "norm": ModuleRule("blocks.*.attention.norm", Style.SUMMED_GRADIENT),
}
MLP = {
    "up": ModuleRule("blocks.*.mlp.up", Style.COLUMN, num_blocks=2),
    "down": ModuleRule("blocks.*.mlp.down", Style.ROW),
}
NECK = {"neck up": ModuleRule("neck.up", Style.COLUMN, num_blocks=2), "neck down": ModuleRule("neck.down", Style.ROW)}
ENDS = {"tokens": ModuleRule("tokens", Style.VOCABULARY), "head": ModuleRule("head", Style.HEAD)}
RIGHT = {**ATTENTION, **MLP, **NECK, **ENDS}


def changed(**rules):
    """Return the right rules with others in their place, or without those that are ``None``."""
    merged = {**RIGHT, **{name.replace("_", " "): rule for name, rule in rules.items()}}
    return tuple(rule for rule in merged.values() if rule is not None)


def check(model, rules, size=2, **options):
    ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    policy = ShardingPolicy(tuple(rules), ("blocks",))
    return check_policy(model, policy, size, CPU, batch=lambda: ids, **options).unchecked


def picture(model):
    """Return all that undoing has to put back."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            plain = isinstance(value, (int, float, str, bool))
            inside = tuple((each, id(one)) for each, one in value.items()) if isinstance(value, dict) else None
            found[name, key] = value if plain else inside or id(value)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (
            id(each),
            each.dtype,
            each.shape,
            each.data_ptr(),
            each.requires_grad,
            id(each.grad),
            each._version,
        )
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_right_rules_pass_and_are_undone(size):
    model = Model()
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    before = picture(model)
    assert check(model, RIGHT.values(), size) == {}
    assert picture(model) == before


WRONG = {
    "fused projections": changed(qkv=ModuleRule("blocks.*.attention.qkv", Style.COLUMN, HEADS, scaled=("num_heads",))),
    "heads that are not counted": changed(qkv=ModuleRule("blocks.*.attention.qkv", Style.COLUMN, HEADS, num_blocks=3)),
    "a gradient that is not summed": changed(norm=None),
    "gate and up": changed(up=ModuleRule("blocks.*.mlp.up", Style.COLUMN)),
    "outside of lists": changed(neck_up=ModuleRule("neck.up", Style.COLUMN)),
    "without its row": changed(down=None),
    "without its column": changed(up=None),
    "a row that gathers": changed(up=ModuleRule("blocks.*.mlp.up", Style.COLUMN_GATHER)),
    "a norm that is whole": changed(norm=None, pre=ModuleRule("blocks.*.norm", Style.SUMMED_GRADIENT)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found_and_undone(name):
    model = Model()
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    before, drawn = picture(model), torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"sharding policy of Model changes"):
        check(model, WRONG[name])
    assert picture(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)


def test_zeros_hide_no_wrong_rule():
    model = Model()
    for block in model.blocks:
        nn.init.zeros_(block.attention.out.weight)
        nn.init.zeros_(block.mlp.down.weight)
    with pytest.raises(ConfigError, match=r"layer 'blocks\.0'.*by up to.*'blocks\.0\.mlp\.up'.*`num_blocks=2`"):
        check(model, WRONG["gate and up"])


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return self.value


class Hidden(Slotted):
    """Tells what it is by nothing that can be looked into."""

    __slots__ = ()

    def __init__(self, value):
        super().__init__({}.get if value else [].append)

    def __bool__(self):
        return self.value.__name__ == "get"


class Called:
    """Asks a function."""

    def __init__(self, function):
        self.function = function

    def __bool__(self):
        return bool(self.function())


@pytest.mark.parametrize(
    "switch",
    [bool, Slotted, Hidden, lambda value: Called(lambda: value), lambda value: Called(lambda it=value: it), np.array],
    ids=["plain", "slots", "hidden", "closure", "default", "numpy"],
)
def test_layers_that_differ_by_an_attribute_are_all_checked(switch):
    model = Model(blocks=[Block(switch(False)), Block(switch(True))])
    with pytest.raises(ConfigError, match=r"changes what layer 'blocks\.1' computes"):
        check(model, RIGHT.values())


@pytest.mark.parametrize(
    "patch",
    [
        lambda up: setattr(up, "forward", lambda x: functional.linear(x, up.weight, up.bias).flip(-1)),
        lambda up: up.register_forward_hook(lambda _, __, y: y / y.square().mean(-1, keepdim=True)),
        lambda up: setattr(up, "forward", types.MethodType(lambda self, x: nn.Linear.forward(self, x).cumsum(-1), up)),
    ],
    ids=["function", "hook", "method"],
)
def test_a_patched_layer_is_checked_as_it_is(patch):
    model = Model()
    patch(model.blocks[1].mlp.up)
    with pytest.raises(ConfigError, match=r"changes what layer 'blocks\.1' computes"):
        check(model, RIGHT.values())


def test_closures_call_the_modules_that_are_split():
    class Closed(nn.Module):
        """Calls its modules by a function that holds them, as minGPT's blocks do."""

        def __init__(self):
            super().__init__()
            self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})
            m = self.mlp
            self.mlpf = lambda x: m.down(torch.relu(m.up(x)))

        def forward(self, x):
            return x + self.mlpf(x)

    model = nn.Sequential(Closed(), Closed())
    rules = ModuleRule("*.mlp.up", Style.COLUMN, num_blocks=2), ModuleRule("*.mlp.down", Style.ROW)
    with pytest.raises(ConfigError, match=r"changes what layer '0' computes"):
        check_policy(model, ShardingPolicy(rules), 2, CPU)
    right = ModuleRule("*.mlp.up", Style.COLUMN), rules[1]
    assert check_policy(model, ShardingPolicy(right), 2, CPU).unchecked == {}


HEAD_OF = {
    "attribute": lambda model, x: functional.linear(x, model.tokens.weight),
    "product": lambda model, x: x @ model.tokens.weight.t(),
    "data": lambda model, x: functional.linear(x, model.tokens.weight.data),
    "penalty": lambda model, x: model.head(x).sum() + torch.stack([model.tokens.weight.norm()]).sum(),
}


@pytest.mark.parametrize("name", HEAD_OF)
def test_a_split_table_that_something_else_reads_is_refused(name):
    with pytest.raises(ConfigError, match=r"splits 'tokens\.weight', which `.*` reads outside of the module"):
        check(Model(HEAD_OF[name]), RIGHT.values())


def test_a_policy_is_offered_that_leaves_the_table_whole():
    model = Model(HEAD_OF["attribute"])
    with pytest.raises(ReadOutsideError) as caught:
        check(model, RIGHT.values())
    kept = caught.value.policy
    assert [rule for rule in RIGHT.values() if rule not in kept.rules] == [ENDS["tokens"]]
    assert check(model, kept.rules) == {}


def test_the_format_of_a_split_table_may_be_asked():
    assert check(Model(lambda model, x: model.head(x.to(model.tokens.weight.dtype))), RIGHT.values()) == {}


class Crossed(Gated):
    """Takes more than hidden states."""

    def forward(self, x, other):
        return super().forward(x) + other


def test_layers_of_a_narrow_lazy_model_are_called_as_it_calls_them():
    class Scaled(Gated):
        """Has a scale of its own, as norms in transformers."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x * self.scale)

    class BoundarySpec(Model):
        def forward(self, ids):
            one, two = self.blocks
            x = self.tokens(ids)
            return self.head(two(one(x), x))

    model = BoundarySpec(blocks=(Scaled(), Crossed())).bfloat16()
    for each in model.parameters():
        each.data = torch.zeros((), dtype=torch.bfloat16).expand(each.shape)
    down = ModuleRule("blocks.*.down", Style.ROW)
    assert check(model, (ModuleRule("blocks.*.up", Style.COLUMN, num_blocks=2), down)) == {}
    with pytest.raises(ConfigError, match=r"changes what layer 'blocks\.[01]' computes"):
        check(model, (ModuleRule("blocks.*.up", Style.COLUMN), down))


class Noisy(Gated):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class Broken(Gated):
    def forward(self, x):
        raise RuntimeError(len(x))


IN_SEQUENCE = ModuleRule("*.up", Style.COLUMN, num_blocks=2), ModuleRule("*.down", Style.ROW)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Crossed, "no batch showed how it is called"), (Noisy, "other outputs in each call"), (Broken, "RuntimeError: 2")],
)
def test_a_layer_that_cannot_be_checked_is_named_with_the_reason(kind, reason):
    unchecked = check_policy(nn.Sequential(kind(), kind()), ShardingPolicy(IN_SEQUENCE), 2, CPU).unchecked
    assert list(unchecked) == ["0", "1"]
    assert reason in unchecked["0"]


def test_layers_split_in_pairs_are_checked_together():
    def check_pair(*between):
        model = nn.Sequential(nn.Linear(WIDTH, 8), *between, nn.Linear(8, WIDTH))
        rules = ModuleRule("0", Style.COLUMN), ModuleRule(f"{len(between) + 1}", Style.ROW)
        return check_policy(model, ShardingPolicy(rules), 2, CPU).unchecked

    assert check_pair() == {}
    with pytest.raises(ConfigError, match=r"sharding policy of Sequential changes"):
        check_pair(nn.Softmax(-1))


def test_a_rule_that_no_call_reaches_is_named():
    class Idle(Model):
        def forward(self, ids):
            kept, self.neck = self.neck, nn.Identity()
            try:
                return super().forward(ids)
            finally:
                self.neck = kept

    rules = (*RIGHT.values(),)
    model = Idle()
    model.blocks[0].other = Gated()
    unchecked = check(model, (*rules, ModuleRule("blocks.0.other.up", Style.COLUMN, num_blocks=2)))
    assert unchecked == {"blocks.0.other.up": "no call of the model reached it"}


def test_ranks_that_call_different_collectives_are_told():
    def run(rank):
        tensor = torch.zeros(2 + rank.rank)
        rank.all_reduce(tensor).wait()

    with pytest.raises(ConfigError, match="different collectives"):
        on_ranks(2, run)


def test_each_rank_within_a_process_finds_what_it_has_changed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer, names = model[0], [*vars(model[0])]
    layer.notes = ["first"]

    def run(rank):
        assert (layer.notes, len(layer._forward_hooks), layer.out_features) == (["first"], 0, 2)
        layer.notes.append(rank.rank)
        layer.out_features = rank.rank
        handle = layer.register_forward_hook(lambda *_: rank.rank)
        for key in model._modules:  # goes on although others run
            rank.all_reduce(torch.zeros(1)).wait()
            assert model._modules[key] is model[int(key)]
        found = layer.notes[1:], layer.out_features, model[0](torch.zeros(2))
        handle.remove()
        return found

    assert on_ranks(3, run, model.modules()) == [([rank], rank, rank) for rank in range(3)]
    assert (layer.notes, len(layer._forward_hooks), layer.out_features) == (["first"], 0, 2)
    assert [*vars(layer)] == [*names, "notes"]


def test_a_rank_that_fails_ends_those_that_wait_for_it():
    left, error = [], ValueError("of the layer")

    def run(rank):
        if rank.rank == 2:
            raise error
        try:
            rank.all_reduce(torch.zeros(1)).wait()
        except BaseException:  # noqa: BLE001 - as a layer may
            left.append(rank.rank)
            rank.all_reduce(torch.zeros(1)).wait()
            left.append("went on")

    before = threading.enumerate()
    with pytest.raises(ValueError, match="of the layer"):
        on_ranks(3, run)
    assert left == [0, 1]
    assert threading.enumerate() == before


def test_ranks_within_a_process_run_under_what_their_caller_has_entered():
    """As the planner's mode, without which they would compute with memory that nobody has written."""
    seen = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append("operation")
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("function")
            return func(*args, **(kwargs or {}))

    def run(rank):
        seen.clear()
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        rank.all_reduce(torch.zeros(1)).wait()
        return {*seen}, product.dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with Operations(), Functions(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = on_ranks(2, run)
    assert [each[1:] for each in found] == [(torch.bfloat16, False, False)] * 2
    assert all(each[0] == {"operation", "function"} for each in found)
    with torch.inference_mode():
        assert on_ranks(1, run)[0][3]


def test_a_lock_around_a_split_layer_is_told_and_does_not_hang(monkeypatch):
    monkeypatch.setattr("booster_hybrid.probe.in_process._TURN_SECONDS", 0.2)
    lock = threading.Lock()

    def run(rank):
        with lock:
            rank.all_reduce(torch.zeros(1)).wait()

    before = threading.enumerate()
    with pytest.raises(ConfigError, match=r"waits for more than .* for a lock"):
        on_ranks(2, run)
    assert threading.enumerate() == before
    assert lock.acquire(blocking=False)


def test_ranks_within_a_process_leave_torchs_modes_as_they_were():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def run(rank):
        with Mode(), torch.compiler.set_stance("force_eager"):
            rank.all_reduce(torch.zeros(1)).wait()
        return is_in_torch_dispatch_mode(), torch.get_default_device()

    with torch.device("meta"):
        assert on_ranks(2, run) == [(True, torch.device("meta"))] * 2
    assert not is_in_torch_dispatch_mode()
    assert sys.modules["torch._dynamo.eval_frame"]._stance.stance == "default"

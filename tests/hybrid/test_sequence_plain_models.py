"""Plain PyTorch models, whose layers attend by torch's function, with split sequences: as one process, or refused."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, train_boosted
from hybrid_runs import RING, boosted
from matrix import matrix
from model_zoo import get_model
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import enable_activation_checkpointing
from booster_testing import expect_on_ranks
from booster_testing.compare import tolerance_for

HIDDEN, HEADS = 16, 4


def causal(batch, length):
    return torch.ones(length, length).tril().bool().expand(batch, 1, -1, -1)


def of_heads(length):
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])[:, None, None].double()
    return -slopes * (torch.arange(length)[:, None] - torch.arange(length)).abs()


def padding(batch, length):
    mask = torch.ones(batch, 1, 1, length).bool()
    mask[0, ..., -3:] = False
    return mask


FORMS = {
    "(T, T)": lambda batch, length: causal(batch, length)[0, 0],
    "(T, T) added": lambda batch, length: of_heads(length)[0],
    "(H, T, T)": lambda batch, length: of_heads(length),
    "(1, T, T)": lambda batch, length: causal(batch, length)[0],
    "(1, 1, T, T)": lambda batch, length: causal(batch, length)[:1],
    "(B, 1, 1, T)": padding,
    "(B, 1, T, T)": lambda batch, length: causal(batch, length) & padding(batch, length),
    "(B, H, T, T)": lambda batch, length: of_heads(length).expand(batch, -1, -1, -1),
}


def rotated(states, angles):
    first, second = states.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    """Attention and a feed-forward part; what it does with positions is its kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out, self.mlp = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.0)

    def attend(self, hidden, angles, scale, mask):
        batch, length, _ = hidden.shape
        parts = self.qkv(self.norm(hidden)).view(batch, length, 2 * HEADS, -1).transpose(1, 2)
        query, key, value = parts.split([HEADS, HEADS // 2, HEADS // 2], 1)
        if self.kind == "makes positions":
            angles = torch.arange(length)[:, None] * 0.5
        if self.kind != "takes none":
            query, key = rotated(query, angles.to(query)), rotated(key, angles.to(query))
        if self.kind == "multiplies":
            scores = (query @ key.repeat_interleave(2, 1).transpose(-1, -2)).softmax(-1)
            found = scores @ value.repeat_interleave(2, 1)
        else:
            masked = {"is_causal": True} if mask is None else {"attn_mask": mask}
            found = nn.functional.scaled_dot_product_attention(query, key, value, **masked, enable_gqa=True)
        return found.transpose(1, 2).flatten(2) * scale

    def forward(self, hidden, angles, scale, mask=None):
        if self.kind == "checkpoints a function":
            found = checkpoint(self.attend, hidden, angles, scale, mask, use_reentrant=False)
        else:
            found = self.attend(hidden, angles, scale, mask)
        hidden = hidden + self.dropout(self.out(found))
        if self.kind == "sums positions":
            hidden = hidden.cumsum(1)
        return hidden + nn.functional.gelu(self.mlp(hidden))


class Model(nn.Module):
    left_out = None

    def __init__(self, kind, form=None):
        super().__init__()
        self.form = form
        self.embedding, self.positions = nn.Embedding(32, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Layer(kind) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 32)

    def states(self, tokens):
        """Return the states before the layers, and after each."""
        positions = torch.arange(tokens.shape[1])
        hidden = self.embedding(tokens) + self.positions(positions)
        angles = positions[:, None] / torch.tensor([1.0, 7.0])[: HIDDEN // 2 // HEADS][None]
        scale = torch.linspace(0.5, 1.5, HIDDEN).expand(len(tokens), 1, HIDDEN)
        masks = [] if self.form is None else [FORMS[self.form](*tokens.shape)]
        states = [hidden]
        for index, block in enumerate(self.blocks):
            states.append(states[-1] if index == self.left_out else block(states[-1], angles, scale, *masks))
        return states

    def forward(self, tokens):
        return self.head(self.states(tokens)[-1])


def make(kind, model_class=Model, form=None):
    return model_class(kind, form).double()


POLICY = ShardingPolicy(layers=("blocks",))
EXAMPLE = {"custom_policy": POLICY, "example_batch": torch.arange(60).view(3, 20) % 32}


def setting_of(mode):
    return Setting(HybridParallelPlugin, {"sp_size": 2, "sequence_parallelism_mode": mode, **EXAMPLE})


def split(model, mode):
    return boosted(model, sp_size=2, sequence_parallelism_mode=mode, **EXAMPLE)[1]


# As many positions as samples, features or heads tell no more than others along which dimension to split.
SIZES = ((3, 11), (3, 2), (16, 16), (3, HIDDEN), (2, HEADS), (3, 3))


def tokens(number, replica):
    return torch.randint(32, SIZES[number], generator=torch.Generator().manual_seed(1 + 10 * number + replica))


def loss_of(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def case_of(kind, **more):
    functions = {"build": partial(make, kind), "batch": tokens, "loss": loss_of}
    return Case(**{**functions, "tolerance": tolerance_for(torch.float64), **more})


@matrix(["ring_attn"], mode=["all_to_all", "ring_attn"])
@on_ranks(2)
def test_layers_that_call_torch_attention_train_as_on_one_process(mode):
    def checkpoint_layers(step, model, _optimizer):
        if step == 0:
            enable_activation_checkpointing(model, Layer)

    for kind, before_step in (("takes none", None), ("takes angles", None), ("takes angles", checkpoint_layers)):
        assert_equals_one_process(case_of(kind, steps=len(SIZES), before_step=before_step), setting_of(mode))


# sequences may be as long as hidden states are wide
@matrix(1, form=list(FORMS), length=[10, HIDDEN], mode=["ring_attn", "all_to_all"])
@on_ranks(2)
def test_masks_mean_what_they_mean_on_one_process(form, length, mode):
    def batch(number, _replica):
        return torch.randint(32, (3, length), generator=torch.Generator().manual_seed(1 + number))

    case = case_of("takes none", build=partial(make, "takes none", form=form), batch=batch, steps=1, outputs=True)
    assert_equals_one_process(case, setting_of(mode))


@pytest.mark.parametrize("kind", ["makes positions", "sums positions", "checkpoints a function", "multiplies"])
def test_layers_that_differ_on_parts_of_a_sequence_are_refused(kind):
    message = "(changes what Model computes|'Layer' of Model does not call its attention)"
    expect_on_ranks(ConfigError, message, train_boosted, 2, case_of(kind), setting_of("ring_attn"))


@raises_on_ranks(ConfigError, "Enable it after `boost`|enable it after `boost`", 2)
def test_checkpointing_before_boost_is_refused():
    model = make("takes none")
    enable_activation_checkpointing(model, Layer)
    split(model, "ring_attn")


@on_ranks(2)
def test_what_no_example_has_shown_is_split_where_its_sizes_tell_how():
    _, model, _ = boosted(make("takes angles"), **RING, custom_policy=POLICY, unchecked="allow")
    length = HIDDEN + 2
    model(torch.zeros(3, length, dtype=torch.long))
    message = rf"`angles` of 'Layer' has shape \({length}, 2\) with hidden states of {length} samples"
    with pytest.raises(ConfigError, match=message):
        model(torch.zeros(length, length, dtype=torch.long))


@raises_on_ranks(
    ConfigError, "`angles` of 'Layer' has 20 entries along dimension 0, which runs over the 12 positions", 2
)
def test_positions_of_another_number_than_the_hidden_states_have_are_refused():
    block = split(make("takes angles"), "ring_attn").unwrap().blocks[0]
    block(torch.zeros(3, 12, HIDDEN).double(), torch.zeros(20, 2), torch.ones(3, 1, HIDDEN))


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize(
    ("index", "what"), [(0, "without the list's first one"), (1, "without calling the last layer")]
)
@on_ranks(2)
def test_a_model_that_leaves_out_its_first_or_last_layer_is_refused(mode, index, what):
    """Leave a layer out, as training with stochastic depth does."""

    class Skipping(Model):
        def forward(self, tokens):
            return self.head(self.states(tokens)[-1].mean(1))

    model = split(make("takes angles", Skipping), mode)
    model.unwrap().left_out = index
    with pytest.raises(ConfigError, match=f"Skipping .*{what}"):
        model(torch.zeros(3, 16, dtype=torch.long))


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn", "split_gather"])
@on_ranks(2)
def test_layerdrop_of_transformers_is_named_in_training(mode):
    def train(layerdrop):
        model = zoo.seeded().train()
        model.model.decoder.layerdrop = layerdrop
        booster, model, optimizer = boosted(model, **options, example_batch=batch)
        for _ in range(20):
            booster.backward(zoo.loss(model(**batch), batch), optimizer)

    options = {"tp_size" if mode == "split_gather" else "sp_size": 2, "sequence_parallelism_mode": mode}
    zoo = get_model("transformers/opt")
    batch = zoo.share(0, 0, 2)
    train(0.0)
    message = r"without (the list's first one|calling the last layer).* such as `layerdrop`"
    with pytest.raises(ConfigError, match=message):
        train(0.5)


@raises_on_ranks(ConfigError, "It returns what its layers have in between", 2)
def test_a_model_that_returns_what_layers_have_in_between_is_refused():
    class Deep(Model):
        """Also returns what its first layer has made, as for a loss on each layer."""

        def forward(self, tokens):
            states = self.states(tokens)
            return self.head(states[-1]), states[1:2]

    split(make("takes angles", Deep), "ring_attn")

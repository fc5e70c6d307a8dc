"""What a script does to a boosted model by methods of its own class is right, or raises on every rank and says what."""

import torch
import torch.distributed as dist
from cases import Case, Setting
from driven_runs import Run
from matrix import matrix
from named_plugins import plugin_named
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core.errors import ConfigError
from booster_testing.models import tiny_llama

PLUGINS = ["ddp", "zero", "gemini", "fsdp", "hybrid"]
CASTS = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "to meta": lambda model: model.to("meta"),
    "share_memory": lambda model: model.share_memory(),
}
STRUCTURE = {
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(20),
    "another head": lambda model: setattr(model, "lm_head", nn.Linear(32, 16, bias=False)),
    "a head of the same shape": lambda model: setattr(
        model, "lm_head", nn.Linear(*model.lm_head.weight.T.shape, False)
    ),
    "a further layer": lambda model: model.model.layers.append(nn.Linear(16, 16)),
    "tied": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
}


def tokens(number, rank):
    return torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(10 * number + rank))


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


CASE = Case(build=tiny_llama, batch=tokens, loss=loss)


@matrix(1, plugin=[name for name in PLUGINS if name != "ddp"], how=CASTS)
@raises_on_ranks(ConfigError, "would move or cast '.*before `boost`", 2)
def test_a_move_of_parameters_that_are_laid_out_is_refused(plugin, how):
    CASTS[how](Run(CASE, Setting(lambda: plugin_named(plugin))).model)


@matrix(1, plugin=[name for name in PLUGINS if name != "gemini"], how=STRUCTURE)
@raises_on_ranks(ConfigError, r"are others than at `boost`: '.*before `boost`", 2)
def test_other_parameters_than_at_boost_are_refused(plugin, how):
    """Change a model; FSDP's can't be resized to begin with."""
    if (plugin, how) == ("fsdp", "resize_token_embeddings"):
        how = "a further layer"
    run = Run(CASE, Setting(lambda: plugin_named(plugin)))
    run.backward(run.loss(0))
    run.step()
    with torch.no_grad():
        STRUCTURE[how](run.net)
    run.loss(1)


@matrix(1, plugin=["fsdp", "gemini"])
@raises_on_ranks(ConfigError, "`resize_token_embeddings`, comes before `boost`", 2)
def test_parameters_in_shards_are_not_resized(plugin):
    run = Run(CASE, Setting(lambda: plugin_named(plugin)))
    run.net.resize_token_embeddings(20)


@on_ranks(2)
def test_a_model_that_is_changed_to_be_evaluated_is_the_scripts_own():
    run = Run(CASE, Setting(lambda: plugin_named("ddp")))
    STRUCTURE["another head"](run.net)
    with torch.no_grad():
        run.loss(dist.get_rank())

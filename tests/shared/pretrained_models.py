"""A tiny model of transformers, trained for a step, and loaded by ``from_pretrained``."""

import torch
from torch import nn

from booster_testing.models import tiny_llama


def tokens():
    return torch.arange(24).view(4, 6) % 16


def make_model():
    torch.manual_seed(0)
    model = tiny_llama()
    model.generation_config.max_length = 7
    return model


def trained_in_one_process():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    return model


def load(folder, **options):
    """Return what stock transformers loads, which lacks nothing."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind
    return model


class Saves(nn.Linear):
    """A model of another library, with a method of that name of its own."""

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), f"{folder}/own.pt")

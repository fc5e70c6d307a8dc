"""``generate`` of split models on devices: the tokens of one process, on every rank of a replica."""

import torch
from device_smoke import make_model
from matrix import matrix
from simulated_device import run_on_devices

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin

PROMPT = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3]])
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
DRAWN = {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 0}
SETTINGS = {
    "tp": {"tp_size": 2},
    "split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "ulysses": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "ring": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    "zero 3": {"zero_stage": 3},
}


def texts(model, device, seed):
    """Return greedy tokens, those of beams, and drawn ones."""
    prompt = PROMPT.to(device)
    mask = torch.ones_like(prompt)
    found = [model.generate(prompt, attention_mask=mask, **GREEDY)]
    found.append(model.generate(prompt, attention_mask=mask, num_beams=2, **GREEDY))
    torch.manual_seed(seed)
    found.append(model.generate(prompt, attention_mask=mask, **DRAWN))
    assert all(each.device.type == device for each in found)
    return [each.tolist() for each in found]


def model_to_generate():
    """Return a model whose tokens are no tie: its weights are larger than those of a new one."""
    model = make_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return model


def generate(options):
    device = "simulated"
    expected = texts(model_to_generate().to(device), device, 5)
    model, *_ = Booster(device, plugin=HybridParallelPlugin(**options)).boost(model_to_generate())
    rank = torch.distributed.get_rank()
    is_replica = "zero_stage" in options  # each rank generates texts of its own
    found = texts(model.eval(), device, 5 if is_replica or rank == 0 else 6)
    assert found == expected
    assert found[0] != found[2]


@matrix(["tp", "ring", "zero 3"], name=SETTINGS)
def test_tokens_are_those_of_one_process(name, simulated_device):
    run_on_devices(generate, 2, simulated_device, SETTINGS[name], timeout_seconds=240.0, group_timeout_seconds=120.0)

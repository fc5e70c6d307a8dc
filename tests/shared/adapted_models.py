"""What tests of adapters share: values that are no zeros, packed bases, and replicas that train adapters."""

import torch
from reference_plugins import ReferencePlugin

from booster_core.plugin import Capability


class Replicas(ReferencePlugin):
    """Also declares that it trains adapters."""

    api_version = 2
    capabilities = ReferencePlugin.capabilities | {Capability.LORA}


def perturbed(model):
    """Give every adapter values, of which half are zeros when it is made."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def bits(number, storage=torch.uint8):
    """Return the settings of a base in 4 or 8 bits."""
    import transformers

    if number == 4:
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=storage,
        )
    return transformers.BitsAndBytesConfig(load_in_8bit=True)

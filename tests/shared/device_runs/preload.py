"""Imported once by the server that ranks are forked from; none of it may touch a device."""

import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

from device_runs.cases import all_cases

all_cases()

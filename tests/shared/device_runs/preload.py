"""Imported once by the server that ranks are forked from; none of it may touch a device.

transformers imports torchao where it is installed, and that opens CUDA, after which a process can't be forked: here it
is not found. The ranks that need it import it.
"""

import sys

sys.modules["torchao"] = None  # as if it were not installed

import torch  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401

from device_runs.cases import all_cases  # noqa: E402

all_cases()
del sys.modules["torchao"]

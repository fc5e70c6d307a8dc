"""The small test models of Colossal-AI, DeepSpeed and Accelerate, rebuilt from what they exercise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.own_build import WIDTH, own

if TYPE_CHECKING:
    from model_zoo.registry import Batch

_CLASSES = 4


class CheckpointedNet(nn.Module):
    """Colossal-AI's simple net: an embedding, norms, a tied projection, and recomputed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.first, self.first_norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.last, self.last_norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.table.weight

    def _layers(self, x: Tensor) -> Tensor:
        return self.last_norm(torch.relu(self.last(self.first_norm(torch.relu(self.first(x))))))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(checkpoint(self._layers, self.table(tokens), use_reentrant=False))


class NestedNet(nn.Module):
    """Colossal-AI's nested model: the same submodule class at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH)})
        self.last = nn.ModuleDict({"inner": nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH)})})

    def forward(self, x: Tensor) -> Tensor:
        return self.last["inner"]["inner"](torch.tanh(self.first["inner"](x)))


class HangingParameter(nn.Module):
    """Colossal-AI's hanging parameter: a parameter of the root that is used in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) @ self.weight.t() @ self.weight)


class RepeatedLayers(nn.Module):
    """Colossal-AI's repeated layers: forward calls them several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.middle, self.middle, self.first, self.last, self.middle):
            x = torch.tanh(layer(x))
        return x


class LinearStack(nn.Module):
    """DeepSpeed's stack of linear layers without activations.

    Args:
        num_layers: Number of hidden layers.
        unused: Have a layer that forward never calls.
    """

    def __init__(self, num_layers: int = 4, *, unused: bool = False) -> None:
        super().__init__()
        self.input_layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        self.output_layer = nn.Linear(WIDTH, _CLASSES)
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_layer(x)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(x)


class FrozenLinearStack(LinearStack):
    """DeepSpeed's frozen model: every second layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[::2]:
            layer.requires_grad_(requires_grad=False)


class MultiOutput(nn.Module):
    """DeepSpeed's model with several outputs, each with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, _CLASSES, bias=False)

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        return [self.inner(first), self.inner(second)]


class DenseExperts(nn.Module):
    """DeepSpeed's mixture of experts, each of which sees each sample; the residual kind adds a dense layer.

    Args:
        residual: Add a dense layer, weighted by a coefficient.
    """

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense = nn.Linear(WIDTH, WIDTH) if residual else None
        self.coefficient = nn.Linear(WIDTH, 2) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = sum(weights[:, [number]] * torch.tanh(expert(x)) for number, expert in enumerate(self.experts))
        if self.dense is None or self.coefficient is None:
            return torch.as_tensor(mixed)
        shares = self.coefficient(x).softmax(-1)
        return mixed * shares[:, :1] + self.dense(x) * shares[:, 1:]


class ConvolutionNet(nn.Module):
    """DeepSpeed's AlexNet for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Linear(16 * 2 * 2, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Regression(nn.Module):
    """Accelerate's regression model: two parameters with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


class BatchNormNet(nn.Module):
    """Accelerate's test model: batch norm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class UnusedSubmodules(nn.Module):
    """Accelerate's model with submodules of which forward uses only the parameters of some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fourth = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first.weight.t() + self.first.bias)
        return self.fourth(x @ self.second.weight.t())


class SharedBetweenBlocks(nn.Module):
    """Accelerate's blocks with shared layers and a buffer that is computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleDict({"shared": shared, "own": nn.Linear(WIDTH, WIDTH)}) for _ in range(2))
        self.register_buffer("last_input", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block["own"](torch.tanh(block["shared"](x))))
        return x * (1 + self.last_input)


def _classified(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["labels"])


def _both_classified(output: list[Tensor], batch: Batch) -> Tensor:
    return cross_entropy(output[0], batch["labels"]) + 0.5 * cross_entropy(output[1], batch["labels"])


_LABELED = {
    "batch": batch_of(x=normal(WIDTH), labels=numbers(_CLASSES)),
    "loss": _classified,
    "loss_only": ("labels",),
}

MODELS = (
    own("colossalai_simple_net", CheckpointedNet, batch=batch_of(tokens=numbers(20, 6))),
    own("colossalai_nested", NestedNet),
    own("colossalai_hanging_parameter", HangingParameter),
    own("colossalai_repeated_layers", RepeatedLayers),
    own("deepspeed_linear_stack", LinearStack, **_LABELED),
    own("deepspeed_unused_parameters", lambda: LinearStack(unused=True), **_LABELED),
    own("deepspeed_frozen", FrozenLinearStack, **_LABELED),
    own(
        "deepspeed_multi_output",
        MultiOutput,
        batch=batch_of(first=normal(WIDTH), second=normal(WIDTH), labels=numbers(_CLASSES)),
        loss=_both_classified,
        loss_only=("labels",),
    ),
    own("deepspeed_experts", lambda: DenseExperts(residual=False)),
    own("deepspeed_residual_experts", lambda: DenseExperts(residual=True)),
    own(
        "deepspeed_convolution_net",
        ConvolutionNet,
        **{**_LABELED, "batch": batch_of(x=normal(3, 16, 16), labels=numbers(_CLASSES))},
    ),
    own("accelerate_regression", Regression),
    own("accelerate_batch_norm", BatchNormNet, couples_samples=True, double=True),
    own("accelerate_unused_submodules", UnusedSubmodules),
    own("accelerate_shared_between_blocks", SharedBetweenBlocks),
)

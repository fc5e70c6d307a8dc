"""Two plugins that are correct and short: data parallelism, and a pipeline whose one stage is the whole model."""

import contextlib
import weakref

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Capability,
    ModelWrapper,
    OptimizerWrapper,
    PipelinePlugin,
    like,
    place_model,
    unwrap_model,
)
from booster_core.state import MASTER, NamedTensors, ReplicatedStateAdapter, TensorShard, full_box
from booster_runtime.strategy import Strategy

_NUM_MICROBATCHES = 2


class ReferenceOptimizer(OptimizerWrapper):
    """Average gradients over ranks, and step on fp32 masters where compute is in low precision.

    Between steps the parameters have the masters' values, rounded to the compute format.

    Args:
        optim: The optimizer inside.
        model: The user's model.
        rounded_to: The compute format, where masters are kept.
        **kwargs: As for `OptimizerWrapper`.

    Attributes:
        is_accumulating: Whether `ReferencePlugin.no_sync` of this model is active.
        masters: The true values of trained parameters, where they are kept.
    """

    def __init__(self, optim, model, rounded_to, **kwargs):
        super().__init__(optim, **kwargs)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.rounded_to = rounded_to
        self.masters = {}
        self.is_accumulating = False
        self.has_local_gradients = False
        own = weakref.ref(self)  # the collector can't follow what autograd holds

        def notice(parameter):
            del parameter
            optimizer = own()
            if optimizer is not None:
                optimizer.has_local_gradients = True

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(notice)
        if rounded_to is not None:
            self.masters = {parameter: parameter.detach().clone() for parameter in self.parameters}
            self.round_parameters()

    def backward(self, loss, inputs=None, *, retain_graph=False):
        super().backward(loss, inputs, retain_graph=retain_graph)
        if not self.is_accumulating:
            self.average()

    def gradients(self):
        self.average()
        return super().gradients()

    def update_parameters(self, closure=None):
        self.average()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)
            result = super().update_parameters(closure)
            for parameter, master in self.masters.items():
                master.copy_(parameter)
        self.round_parameters()
        return result

    @contextlib.contextmanager
    def accumulating(self):
        """Leave the gradients of backward inside this context as they are."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    def average(self):
        """Average gradients that ranks have changed since the last call; what was averaged before stays as it is.

        Collective: every rank of the world.
        """
        if not self.has_local_gradients:
            return
        self.has_local_gradients = False
        is_used = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int32)
        dist.all_reduce(is_used)
        for parameter, count in zip(self.parameters, is_used.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.reduce(parameter.grad)

    def reduce(self, gradient):
        """Average a gradient over ranks, in place.

        Collective: every rank of the world.
        """
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()

    def round_parameters(self):
        """Give the parameters their masters' values, rounded."""
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master.to(self.rounded_to))


class ReferenceStateAdapter(ReplicatedStateAdapter):
    """Shows a replicated model, and the masters of its parameters where they are kept.

    Args:
        model: The boosted model.
        optimizer: Its optimizer.
        coordinator: Tells rank and number of ranks.
    """

    def __init__(self, model, optimizer, coordinator):
        super().__init__(model, optimizer, coordinator)
        self.model = model
        self.is_owner = coordinator.rank == 0
        self.boosted_optimizer = optimizer
        name_of = NamedTensors.of(unwrap_model(model)).name_of
        masters = {} if optimizer is None else optimizer.masters
        self.parameter_of = {name_of[id(parameter)]: parameter for parameter in masters}
        self._loads_masters_of = None

    def optimizer_shards(self):
        yield from super().optimizer_shards()
        if self._loads_masters_of is None:
            yield from self.master_shards()

    def master_shards(self):
        """Yield the masters; rank 0 owns all."""
        if self.boosted_optimizer is None:
            return
        for name, parameter in self.parameter_of.items():
            data = self.boosted_optimizer.masters[parameter]
            shape = tuple(data.shape)
            yield TensorShard(
                name=name,
                state=MASTER,
                global_shape=shape,
                dtype=data.dtype,
                box=full_box(shape),
                data=data,
                is_owner=self.is_owner,
            )

    def prepare_optimizer_load(
        self,
        tensors,
        scalars,
        groups,
    ):
        # The adapter for runs without masters takes the file's masters as parameters.
        super().prepare_optimizer_load(tensors, scalars, groups)
        self._loads_masters_of = {name for name, states in tensors.items() if MASTER in states}

    def finish_load(self, *, model, optimizer):
        super().finish_load(model=model, optimizer=optimizer)
        taken = set(self.parameter_of) if model else (self._loads_masters_of or set())
        self._loads_masters_of = None
        if self.boosted_optimizer is None:
            return
        with torch.no_grad():
            for name, parameter in self.parameter_of.items():
                if name in taken:
                    self.boosted_optimizer.masters[parameter].copy_(parameter)
        self.boosted_optimizer.round_parameters()


class ReferencePlugin(Strategy):
    """Train a full replica on every rank; gradients are averaged after backward."""

    name = "reference"
    api_version = 2
    capabilities = frozenset(
        {
            Capability.CPU,
            Capability.LAZY_INIT,
            Capability.FP32,
            Capability.BF16,
            Capability.FP16,
            Capability.DATA_PARALLEL,
            Capability.SYNCHRONOUS,
        }
    )
    model_class = ModelWrapper
    optimizer_class = ReferenceOptimizer
    adapter_class = ReferenceStateAdapter

    def __init__(self, *, precision=None):
        self.precision = precision

    def shard(self, objects, context, values):
        """Take rank 0's values, and wrap model and optimizer.

        Collective: every rank of the world.
        """
        del values
        model, given = objects.model, next(iter(objects.optimizers), None)
        place_model(model, given, context.device, context.precision)
        self.make_equal(model)
        precision = self.precision_of_forward(context.precision)
        rounded_to = precision.compute_dtype if precision.uses_autocast else None
        optimizer = given and self.optimizer_class(given, model, rounded_to, context=context)
        wrapper = self.model_class(model, precision=precision)
        return objects._replace(model=wrapper, optimizer=like(objects.optimizer, [optimizer]))

    def make_equal(self, model):
        """Broadcast rank 0's parameters and buffers.

        Collective: every rank of the world.
        """
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)

    def precision_of_forward(self, policy):
        """Return the precision in which forward computes."""
        return policy

    def no_sync(self, model):
        """Leave gradients as they are on each rank; the next backward outside, or the step, averages them."""
        optimizer = model.boosted_optimizer
        if isinstance(optimizer, ReferenceOptimizer):
            return optimizer.accumulating()
        return super().no_sync(model)

    def full_gradient(self, model, name):
        """Return a parameter's gradient, averaged over all ranks."""
        optimizer = model.boosted_optimizer
        if isinstance(optimizer, ReferenceOptimizer):
            optimizer.average()
        return super().full_gradient(model, name)

    def state_adapter(self, model, context):
        """Return the view of the state that checkpoints are written against."""
        optimizer = model.boosted_optimizer
        assert optimizer is None or isinstance(optimizer, ReferenceOptimizer)
        return self.adapter_class(model, optimizer, context.coordinator)


class ReferencePipelinePlugin(ReferencePlugin, PipelinePlugin):
    """Run microbatches through a pipeline whose one stage is the whole model; batches are dicts of tensors."""

    name = "reference pipeline"
    api_version = 2
    capabilities = ReferencePlugin.capabilities | {Capability.PIPELINE}

    def execute_pipeline(self, data_iter, model, criterion, optimizer=None, *, return_loss=True, return_outputs=False):
        """Run forward of all microbatches, then backward, so that an error in between leaves gradients as they were.

        Raises:
            TypeError: If the model is not a boosted one.
            ConfigError: If the loss is not a scalar.
            StopIteration: If no batch is left.

        Collective: every rank of the world.
        """
        if not isinstance(model, ModelWrapper):
            msg = f"`execute_pipeline` needs the model returned by `boost`; got `{type(model).__name__}`."
            raise TypeError(msg)
        batch = self.take(data_iter)
        length = len(next(iter(batch.values())))
        loss, outputs = torch.zeros((), device=next(model.parameters()).device), []
        for microbatch in self.cut(batch):
            output = model(**microbatch)
            value = criterion(output, microbatch)
            if value.dim():
                msg = f"The criterion returns a scalar; got a tensor of shape {tuple(value.shape)}."
                raise ConfigError(msg)
            loss = loss + value * (len(next(iter(microbatch.values()))) / length)
            outputs.append(output.detach())
        if isinstance(optimizer, OptimizerWrapper) and torch.is_grad_enabled():
            optimizer.backward(loss)
        return {
            "loss": loss.detach() if return_loss else None,
            "outputs": self.join(outputs) if return_outputs else None,
        }

    def take(self, data_iter):
        """Return the next batch."""
        return next(data_iter)

    def cut(self, batch):
        """Return a batch's microbatches."""
        parts = {name: tensor.tensor_split(_NUM_MICROBATCHES) for name, tensor in batch.items()}
        length = len(next(iter(batch.values())))
        return [{name: part[index] for name, part in parts.items()} for index in range(min(_NUM_MICROBATCHES, length))]

    def join(self, outputs):
        """Return the outputs of the whole batch."""
        return torch.cat(outputs)

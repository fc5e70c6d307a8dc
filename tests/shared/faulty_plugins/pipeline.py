"""Mutants of `ReferencePipelinePlugin`, with one fault each."""

from reference_plugins import ReferencePipelinePlugin


class DropsLastMicrobatch(ReferencePipelinePlugin):
    """Trains without a batch's last samples."""

    def cut(self, batch):
        """Return all microbatches but one."""
        return super().cut(batch)[:1]


class TakesOneBatchAhead(ReferencePipelinePlugin):
    """Takes a batch that it does not train on."""

    def take(self, data_iter):
        """Return a batch, and take the one after it."""
        batch = super().take(data_iter)
        next(data_iter, None)
        return batch


class ReversesOutputs(ReferencePipelinePlugin):
    """Returns outputs in the order in which backward ends."""

    def join(self, outputs):
        """Return the outputs, the last microbatch's first."""
        return super().join(outputs[::-1])

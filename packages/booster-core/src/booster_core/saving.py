"""The saving methods of `Booster`: each hands the plugin's view of a model's state to a `CheckpointIO`."""

from __future__ import annotations

import contextlib
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.checkpoint_io import (
    CheckpointIO,
    LoadRequest,
    ModelState,
    MovingAverage,
    SaveRequest,
    StepOptions,
    TrainingObjects,
    TrainingState,
    checkpoint_io_class,
    resolved,
)
from booster_core.errors import ConfigError
from booster_core.plugin.interface import Plugin, as_tuple
from booster_core.plugin.wrappers import ModelWrapper, boosted_inside, unwrap_model
from booster_core.ranks.calls import OBSERVERS, NamedCall, ObservedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from booster_core.checkpoint_io import LoadedCheckpoint, LoadReport
    from booster_core.plugin.interface import BoostContext
    from booster_core.state.adapter import StateAdapter


class Saving:
    """Saves and loads, on all ranks together: a call that some ranks do not make raises `MissingRanksError`."""

    plugin: Plugin
    context: BoostContext
    """Device, ranks, precision and hooks of this run, fixed at the first use."""

    def __init__(self) -> None:
        self._boosted: weakref.WeakSet[ModelWrapper] = weakref.WeakSet()
        self._dtypes: weakref.WeakKeyDictionary[ModelWrapper, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
        self._registered: dict[str, tuple[Any, bool]] = {}  # by name; whether ranks differ

    @cached_property
    def checkpoint_io(self) -> CheckpointIO:
        """The reader and writer of this run's checkpoints; may be replaced."""
        return checkpoint_io_class()(self.plugin, self.context)

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None = None) -> StateAdapter:
        """Return the view of a model's (and its optimizer's) state as shards.

        Args:
            model: The boosted model, or a plain one that every rank holds whole.
            optimizer: The boosted optimizer; that of the boosted model when left out.

        Collective: none.
        """
        boosted = self._boosted_model(model)
        if boosted is None:
            from booster_core.state import ReplicatedStateAdapter

            return ReplicatedStateAdapter(model, optimizer, self.context.coordinator)
        return self.plugin.state_adapter(boosted, boosted.boost_context)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write a model in the layout of Hugging Face libraries, without gathering it anywhere.

        A boosted model is written in the formats that it came in, the same under every plugin: see
        `PrecisionPolicy.export_dtype`. A plain one is written as it is.

        Args:
            model: The model that `boost` returned, or a plain one that every rank holds whole.
            checkpoint: A file, or with ``shard=True`` a folder. A model of transformers or diffusers is written into a
                folder also without ``shard``, as one file with its ``config.json``, unless the path ends in
                ``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or ``.ckpt``; one with adapters is not. Folders are made
                as needed; older files are replaced. A URL (``s3://bucket/model``) is uploaded to while it is written.
            shard: Write a folder of numbered files with their index, and the model's ``config.json`` where it has one.
            gather_dtensor: ``False`` writes a folder of ``torch.distributed.checkpoint`` instead.
            prefix: Put into the file names of a folder, as Hugging Face's ``variant``.
            size_per_shard: Largest size of a numbered file in MiB.
            use_safetensors: Write safetensors; ``False`` writes what ``torch.save`` of a dict writes.
            use_async: Copy the values, return, and write in the background; an error surfaces at the next save, load,
                `wait`, or the interpreter's exit.

        Raises:
            TypeError: If ``model`` is not a module.
            ConfigError: If arguments contradict each other.
            CheckpointError: If the checkpoint can't be written; it is then as it was before.

        Collective: every rank of the world, as for every method here that saves or loads.
        """
        self._check_module(model, "save_model")
        request = SaveRequest(
            call="save_model",
            path=checkpoint,
            shard=shard,
            gather_dtensor=gather_dtensor,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
        )
        with self._saving("model", request, model):
            self.checkpoint_io.save_model(self._model_state(model, self._export_dtypes(model)), request)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        strict: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
        *,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        exclude: Sequence[str] = (),
    ) -> LoadReport:
        """Read a model from any of the forms that `save_model` and Hugging Face libraries write.

        Args:
            model: As for `save_model`.
            checkpoint: A file, an index, or a folder.
            strict: Raise unless model and checkpoint hold the same tensors; ``False`` loads those that fit.
            low_cpu_mem_mode: Read only what this rank holds, straight into place; ``False`` reads whole files first.
            num_threads: How many parts of a large tensor are read at once.
            rename: Regular expressions and what replaces them in the checkpoint's names, one after the other:
                ``{"^": "model."}`` adds a prefix. Or a function from a checkpoint's name to the model's.
            exclude: Patterns (``"lm_head.*"``) of the model's names, once renamed, that are left as they are.

        Returns:
            What was loaded and what was not, the same on every rank.

        Raises:
            TypeError: If ``model`` is not a module.
            CheckpointError: If the checkpoint can't be read, is damaged, or with ``strict`` does not fit.

        Collective: every rank of the world.
        """
        self._check_module(model, "load_model")
        request = LoadRequest(
            call="load_model",
            path=checkpoint,
            strict=strict,
            low_cpu_mem_mode=low_cpu_mem_mode,
            num_threads=num_threads,
            rename=rename,
            exclude=exclude,
        )
        with self._announced("model", request):
            return self.checkpoint_io.load_model(self._model_state(model), request)

    def save_lora_as_pretrained(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        use_safetensors: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
        *,
        selected_adapters: Sequence[str] | None = None,
    ) -> None:
        """Write a model's adapters as peft does, without gathering them anywhere.

        ``PeftModel.from_pretrained(base, checkpoint)`` loads them, and so does `Booster.enable_lora`. The adapter
        ``default`` is written into the folder itself, others below it by name.

        Args:
            model: The model that `boost` returned.
            checkpoint: The folder, or its URL.
            use_safetensors: Write ``adapter_model.safetensors``; ``False`` writes ``adapter_model.bin``.
            selected_adapters: Names of the adapters to write; all by default.

        Raises:
            ConfigError: If the model has no adapters, or none of a selected name.
            Exception: As `save_model`.

        Collective: every rank of the world.
        """
        self._check_module(model, "save_lora_as_pretrained")
        request = SaveRequest(call="save_lora_as_pretrained", path=checkpoint, use_safetensors=use_safetensors)
        with self._saving("lora", request, model):
            state = self._model_state(model, self._export_dtypes(model))
            self.checkpoint_io.save_lora(state, request, selected_adapters)

    def save_optimizer(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        checkpoint: str | Path,
        shard: bool = False,  # noqa: FBT001, FBT002 - positional in the tutorials
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write the state of the optimizer that `boost` returned in safetensors files, its parameter groups as JSON.

        Arguments and errors are those of `save_model`; a `TypeError` is raised for another optimizer.

        Collective: every rank of the world.
        """
        model = self._model_of(optimizer, "save_optimizer")
        request = SaveRequest(
            call="save_optimizer",
            path=checkpoint,
            shard=shard,
            gather_dtensor=gather_dtensor,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_async=use_async,
        )
        with self._saving("optimizer", request, model):
            self.checkpoint_io.save_optimizer(self.state_adapter(model), request)

    def load_optimizer(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002 - positional in the tutorials
        num_threads: int = 1,
    ) -> None:
        """Read an optimizer's state and parameter groups, saved under any plugin and any number of ranks.

        Arguments and errors are those of `load_model`; a `TypeError` is raised for another optimizer than the one that
        `boost` returned, and a `CheckpointError` for the state of another model's optimizer.

        Collective: every rank of the world.
        """
        model = self._model_of(optimizer, "load_optimizer")
        request = LoadRequest(
            call="load_optimizer", path=checkpoint, low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads
        )
        with self._announced("optimizer", request):
            self.checkpoint_io.load_optimizer(self.state_adapter(model), request)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a scheduler's state as JSON; a `CheckpointError` is raised where that is not possible.

        Collective: every rank of the world.
        """
        request = SaveRequest(call="save_lr_scheduler", path=checkpoint)
        with self._announced("lr_scheduler", request):
            self.checkpoint_io.save_lr_scheduler(lr_scheduler, request)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Read a learning rate scheduler's state; a `CheckpointError` is raised where the file holds another's.

        Collective: every rank of the world.
        """
        request = LoadRequest(call="load_lr_scheduler", path=checkpoint)
        with self._announced("lr_scheduler", request):
            self.checkpoint_io.load_lr_scheduler(lr_scheduler, request)

    def save_checkpoint(
        self,
        root: str | Path,
        *,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Any = None,
        ema: MovingAverage | None = None,
        extra: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: float | None = None,
        use_async: bool = False,
        size_per_shard: int = 1024,
    ) -> None:
        """Write the state of a whole training run, from which it resumes exactly, into ``root/step-00000100``.

        The loss scale and the random states of Python, NumPy and torch (CPU and this rank's CUDA device) of every rank
        are saved as well. Gradients are not: save between steps. A step appears complete or not at all, and the file
        ``root/latest`` moves to it last, so that a kill at any instant leaves the step before loadable. The run that
        saved or resumed last may save there; an earlier one that is still alive gets an error and changes nothing.
        ``root/step-00000100/model`` is a folder as Hugging Face libraries load it.

        Args:
            root: The folder of all steps, or a URL (``s3://bucket/run``), uploaded to while it is written.
            step: Number of steps taken so far. A step that exists is replaced.
            model: As for `save_model`.
            optimizer: The optimizer that `boost` returned.
            lr_scheduler: One scheduler, or several.
            dataloader: The loader that `boost` or `prepare_dataloader` returned; its position in the global order of
                samples is saved. Of another with ``state_dict`` (torchdata's) each rank's own state is.
            ema: What `ema` returned; its averages are saved in ``root/step-00000100/ema``, loadable like a model.
            extra: Your own JSON values and tensors, in dicts and lists; those of rank 0 are saved.
            keep_last: Keep this many steps up to this one. What no rule keeps is removed when this one is safe; without
                any rule all stay, and later steps, of a run that went back, always do.
            keep_every: Keep steps that are multiples of this.
            keep_best: Keep this many steps of those with the smallest ``metric``.
            metric: How good this step is, the same on all ranks; negate it where large is good.
            use_async: As for `save_model`.
            size_per_shard: Largest size of a file of tensors in MiB.

        Raises:
            TypeError: If ``model`` or ``optimizer`` are not what `boost` returned, or ``ema`` has no `state_adapter`.
            ConfigError: If an argument is out of range, or differs between ranks.
            CheckpointError: If something cannot be saved (it is named), or can't be written.

        Collective: every rank of the world.
        """
        options = StepOptions(
            step=step, extra=extra, metric=metric, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best
        )
        request = SaveRequest(
            call="save_checkpoint", path=root, size_per_shard=size_per_shard, use_async=use_async, step=options
        )
        with self._saving("checkpoint", request, model):
            with self.context.coordinator.together(request.call):
                state = self._training_state(request.call, model, optimizer, lr_scheduler, dataloader, ema)
            self.checkpoint_io.save_checkpoint(state, request)

    def load_checkpoint(
        self,
        root: str | Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Any = None,
        ema: MovingAverage | None = None,
        step: int | str | None = None,
        resume: bool = False,
        strict: bool = True,
        verify: bool = True,
        num_threads: int = 1,
    ) -> LoadedCheckpoint:
        """Read what `save_checkpoint` wrote, under any plugin and with any number of ranks.

        Sizes, headers and small files are compared with the manifest before anything is changed, tensors while they are
        read: an error about a damaged tensor says that values have changed. Random states come back rank by rank; rank
        ``r`` of another number takes those of rank ``r % saved``. A data loader goes on at the sample after the last.

        Args:
            root: The folder of all steps, or a URL.
            model: As passed to `save_checkpoint`, like the arguments that follow; what is left out is not loaded.
            optimizer: The optimizer.
            lr_scheduler: The schedulers, in the same order.
            dataloader: The loader, over the same data set.
            ema: The averages; they need not have been made from the same values.
            step: A step; ``"latest"``, the default; or ``"newest-whole"``, the default of ``resume``, which goes back
                to the newest step that is whole where later ones are damaged, and logs which.
            resume: Go on with a run that restarts by itself: take over saving into ``root`` from an earlier one, and
                return step 0 where there is no checkpoint yet.
            strict: As for `load_model`.
            verify: Compare checksums of what is read, while it is read. Of a block that several ranks read parts of,
                one reads the whole. Sizes are compared in any case; `booster verify` reads all of a step.
            num_threads: As for `load_model`.

        Returns:
            The step, the ``extra`` values, and what was loaded of the model.

        Raises:
            TypeError: If ``model`` or ``optimizer`` are not what `boost` returned.
            CheckpointError: If there is no such step, it is damaged (the newest intact one is named) or does not fit.

        Collective: every rank of the world.
        """
        request = LoadRequest(
            call="load_checkpoint",
            path=root,
            strict=strict,
            num_threads=num_threads,
            verify=verify,
            step=step,
            resume=resume,
        )
        with self._announced("checkpoint", request):
            with self.context.coordinator.together(request.call):
                state = self._training_state(request.call, model, optimizer, lr_scheduler, dataloader, ema)
            return self.checkpoint_io.load_checkpoint(state, request)

    def has_checkpoint(self, root: str | Path) -> bool:
        """Return whether there is a step below ``root``, damaged or not, the same on every rank.

        Collective: every rank of the world.
        """
        return self.checkpoint_io.has_checkpoint(resolved(root))

    def register_for_checkpointing(self, *objects: Any, name: str | None = None, per_rank: bool = False) -> None:
        """Have `save_checkpoint` save, and `load_checkpoint` load, objects with ``state_dict`` and ``load_state_dict``.

        Args:
            *objects: Their states are tensors and JSON values in dicts and lists, never pickled.
            name: What one object is called in checkpoints; others are numbered in the order in which they come.
            per_rank: Each rank has a state of its own, and gets it back. Else saving raises where ranks differ.

        Raises:
            TypeError: If an object lacks one of the methods.
            ConfigError: If the name is taken, names several objects, or is no name.

        Collective: none, but every rank must do the same.
        """
        for item in objects:
            if not all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict")):
                msg = f"`{type(item).__name__}` has no `state_dict` and `load_state_dict`, so it can't be registered."
                raise TypeError(msg)
            key = str(len(self._registered)) if name is None else name
            if key in self._registered or not key or "/" in key or (name and len(objects) > 1):
                msg = f"`name={key!r}` must be one object's, without '/', and new: {', '.join(self._registered)}."
                raise ConfigError(msg)
            self._registered[key] = item, per_rank

    def wait(self) -> None:
        """Wait until a save in the background has ended.

        Raises:
            CheckpointError: If it failed, on any rank.

        Collective: every rank of the world.
        """
        self.checkpoint_io.wait()

    def _boosted_model(self, model: nn.Module) -> ModelWrapper | None:
        """Return the boosted model that ``model`` is, or is the inside of; ``None`` for a plain one."""
        model = boosted_inside(model)
        for boosted in self._boosted:
            if boosted is model or boosted.unwrap() is model:
                return boosted
        return None

    def _model_state(
        self, model: nn.Module, dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    ) -> ModelState:
        """Return a model as engines see it."""
        return ModelState(adapter=self.state_adapter(model), module=unwrap_model(model), dtype=dtype)

    def _export_dtypes(self, model: nn.Module) -> dict[str, torch.dtype] | None:
        """Return the format in which each tensor of a model is exported; ``None`` for a plain model, as it is."""
        boosted = self._boosted_model(model)
        if boosted is None:
            return None
        precision = boosted.boost_context.precision
        return {name: precision.export_dtype(dtype) for name, dtype in self._dtypes[boosted].items()}

    def _model_of(self, optimizer: Optimizer | Sequence[Optimizer], call: str) -> ModelWrapper:
        """Return the model that one optimizer, or several, were boosted with; all of it must be passed.

        Raises:
            TypeError: If one was not boosted by this Booster.
            ConfigError: If the model has another optimizer that is not passed.
        """
        asked = as_tuple(optimizer)
        for boosted in self._boosted:
            own = boosted.boosted_optimizers
            found = [each for each in own if any(one in (each, each.unwrap()) for one in asked)]
            if not found or len(found) < len(asked):
                continue
            if len(found) < len(own):
                msg = (
                    f"`Booster.{call}` got {len(found)} of the {len(own)} optimizers that the model was boosted with. "
                    "Pass all of them, as `boost` returned them: their state is one."
                )
                raise ConfigError(msg)
            return boosted
        got = ", ".join(f"`{type(each).__name__}`" for each in asked or (optimizer,))
        msg = f"`Booster.{call}` needs the optimizer returned by `Booster.boost`; got {got}."
        raise TypeError(msg)

    def _training_state(
        self,
        call: str,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None,
        dataloader: Any,
        ema: MovingAverage | None,
    ) -> TrainingState:
        """Return the parts of a training state, from the arguments that a user passes."""
        self._check_module(model, call)
        if ema is not None and not callable(getattr(ema, "state_adapter", None)):
            msg = f"`ema` of `Booster.{call}` must have a method `state_adapter`; got `{type(ema).__name__}`."
            raise TypeError(msg)
        boosted = self._boosted_model(model)
        precision = None if boosted is None else boosted.boost_context.precision
        schedulers = lr_scheduler if isinstance(lr_scheduler, (list, tuple)) else (lr_scheduler,)
        return TrainingState(
            model=self._model_state(model, None if precision is None else precision.save_dtype),
            optimizer=None if optimizer is None else self.state_adapter(self._model_of(optimizer, call)),
            objects=TrainingObjects(
                device=self.context.device,
                schedulers=tuple(scheduler for scheduler in schedulers if scheduler is not None),
                loss_scaler=getattr(next(iter(as_tuple(optimizer)), None), "loss_scaler", None),
                dataloader=dataloader,
                registered=dict(self._registered),
            ),
            ema=None if ema is None else ModelState(adapter=ema.state_adapter()),
            precision=precision,
        )

    def _check_module(self, model: Any, call: str) -> None:
        if not isinstance(model, nn.Module):
            msg = f"`Booster.{call}` needs a torch.nn.Module; got `{type(model).__name__}`."
            raise TypeError(msg)
        if isinstance(boosted_inside(model), ModelWrapper) and self._boosted_model(model) is None:
            msg = f"`Booster.{call}` needs a model that this Booster has boosted; this one belongs to another Booster."
            raise TypeError(msg)

    @contextlib.contextmanager
    def _saving(self, kind: str, request: SaveRequest, model: nn.Module) -> Iterator[None]:
        """Announce a save, and let the plugin synchronize a boosted model that is about to be saved."""
        with self._announced(kind, request):
            boosted = self._boosted_model(model)
            if boosted is not None and type(self.plugin).prepare_save is not Plugin.prepare_save:
                with NamedCall("save"):
                    self.plugin.prepare_save(boosted, boosted.boost_context)
            yield

    @contextlib.contextmanager
    def _announced(self, kind: str, request: SaveRequest | LoadRequest) -> Iterator[None]:
        """Call the hooks before and after a save or load; after a save in the background, when that has ended."""
        verb = "save" if isinstance(request, SaveRequest) else "load"
        before, after = (getattr(self.context.hooks, f"{moment}_{verb}") for moment in ("before", "after"))
        before(kind=kind, checkpoint=request.path)
        with ObservedCall(verb) if OBSERVERS else contextlib.nullcontext():
            yield
        if isinstance(request, SaveRequest) and request.use_async:
            self.checkpoint_io.when_written(lambda: after(kind=kind, checkpoint=request.path))
        else:
            after(kind=kind, checkpoint=request.path)

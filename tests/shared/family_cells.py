"""Measure a cell of the table of families: what the hybrid plugin does with a tiny model, compared with one process.

The comparison is that of `booster_tools.verify`: outputs, losses, each parameter's gradient and its update.
"""

import contextlib

import torch
from family_models import NOT_MEASURED, SAMPLES, batch_of, build, check_tiny, has_experts
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from zoo_cells import first_line, quiet
from zoo_results import Cell

from booster_core.errors import AbsentValueError, ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.find import FAMILIES, policy_for
from booster_testing import RankError, run_on_ranks
from booster_testing.rank_pool import RankDiedError, RankTimeoutError
from booster_tools import TrainingFunctions, verify

COLUMNS = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "num_microbatches": 2},
    "split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "ulysses": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "ring": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    "ep": {"ep_size": 2},
}
"""The options of each column."""
WORLD_SIZE = 2
_STEPS = 1
"""Gradients depend on the step before by its update alone, which is compared as well."""
_LIMITS = {"timeout_seconds": 180.0, "group_timeout_seconds": 30.0}
_DOUBLE = 1e-5
"""Tolerance in fp64, of models whose norms and softmaxes compute in fp32 all the same."""
_REFUSAL = ConfigError.__name__


class CellError(Exception):
    """An error in a phase of a cell.

    Args:
        phase: What was tried.
        kind: Name of the error's class.
        line: First line of its message.
    """

    def __init__(self, phase, kind, line):
        super().__init__(phase, kind, line)
        self.phase, self.kind, self.line = phase, kind, line


def watched(plugin, dataloader=None):
    """Give a plugin a data loader at `boost`, and return a function that tells the phase: before and after it."""
    configure, phases = plugin.configure, ["boost"]

    def noting(objects, context):
        boosted = configure(objects._replace(dataloader=dataloader), context)
        phases.append("training")
        return boosted._replace(dataloader=objects.dataloader)

    vars(plugin)["configure"] = noting
    return lambda: phases[-1]


def measure_plain(name, _column):
    """Train a family's model in one process; the cell says whether that works, and whether it has experts."""
    if name in NOT_MEASURED:
        return Cell(state="not measured", findings=[NOT_MEASURED[name]]), ""
    try:
        (found,) = run_on_ranks(_train_plainly, 1, name, **_LIMITS)
    except (RankError, RankDiedError, RankTimeoutError) as error:
        return Cell(state="not measured", findings=[_first_errors(error)[0]]), str(error)
    return Cell(state="ok", options=found), ""


def measure(name, column):
    """Measure a cell; also return the whole error, if there is one."""
    return measured(_compare, name, column)


def measured(function, *given):
    """Return the cell of what a function finds to differ, which ranks call, and the whole error if there is one.

    Args:
        function: Returns what differs, and options of the cell.
        *given: Its arguments.
    """
    try:
        findings, options = run_on_ranks(function, WORLD_SIZE, *given, **_LIMITS)[0]
    except (RankError, RankDiedError, RankTimeoutError) as error:
        return _cell_of_error(error), str(error)
    return Cell(state="wrong" if findings else "exact", options=options, findings=findings[:1]), "\n".join(findings)


def _cell_of_error(error):
    """Return a refusal, at `boost` or later, if every rank raised one error of Booster's; else a crash."""
    found = list(error.exceptions.values())
    first = found[0] if found else None
    is_refusal = all(isinstance(each, CellError) and each.kind == _REFUSAL for each in found)
    if isinstance(first, CellError) and is_refusal and len(found) == WORLD_SIZE:
        return Cell(state="refused" if first.phase == "boost" else "refused late", findings=[first.line])
    return Cell(state="crash", findings=_first_errors(error))


def _first_errors(error):
    found = [each for each in error.exceptions.values() if each is not None]
    texts = [f"{each.phase}: {each.kind}: {each.line}" for each in found if isinstance(each, CellError)]
    return texts[:1] or [f"{type(error).__name__}: {first_line(error)}"]


def _train_plainly(name):
    """Run forward and backward; return facts about the model."""
    with quiet(), phase("build"):
        check_tiny(name)
        torch.manual_seed(0)
        model = build(name)
    with quiet(), phase("one process"):
        loss = model(**batch_of(name)).loss
        loss.backward()
        if not torch.isfinite(loss):
            msg = f"the loss is {loss.item()}"
            raise ValueError(msg)
    return {"class": type(model).__name__, "policy": _policy_of(model), "has_experts": has_experts(model)}


def _policy_of(model):
    """Return where the model's tensor policy is from: us, transformers' plan, or nowhere."""
    config = model.config
    parts = [config, config.get_text_config()]
    if config.model_type.replace("-", "_") not in FAMILIES and any(
        getattr(each, "base_model_tp_plan", None) for each in parts
    ):
        return "transformers"
    try:
        policy_for(model)
    except ConfigError:
        return "none"
    return "ours"


def _compare(name, column):
    """Compare with one process in fp32, and in fp64 if that differs; return what differs, and the cell's options."""
    with quiet():
        found, options = _verified(name, column, torch.float32), {}
        if found.unexplained:
            with contextlib.suppress(CellError):  # a kernel without fp64
                found, options = _verified(name, column, torch.float64), {"dtype": "fp64"}
        return [str(each) for each in found.unexplained], options


def _verified(name, column, dtype):
    is_double = dtype == torch.float64
    batch = pytree.tree_map_only(
        torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch_of(name)
    )
    options = dict(COLUMNS[column])
    if "pp_size" in options:
        options["example_batch"] = batch

    def make():
        model = build(name).to(dtype)
        if is_double:
            model.config._experts_implementation = "eager"
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-3, eps=1e-2, weight_decay=0.0)

    plugin, loader = HybridParallelPlugin(**options), None
    if "sp_size" in options:
        rows = [{key: value[row] for key, value in batch.items()} for row in range(SAMPLES)]
        loader = DataLoader(rows, batch_size=SAMPLES)
    functions = TrainingFunctions(make, lambda: batch)
    with phase(watched(plugin, loader)):
        return verify(functions, plugin, steps=_STEPS, tolerance=_DOUBLE if is_double else None)


@contextlib.contextmanager
def phase(phase):
    """Name the phase in an error."""
    try:
        yield
    except Exception as error:
        text = phase if isinstance(phase, str) else phase()
        kind = _REFUSAL if isinstance(error, (AbsentValueError, ConfigError)) else type(error).__name__
        raise CellError(text, kind, first_line(error)) from error

"""``booster trace``: one file of the ranks' traces, and the idle shares of a known schedule."""

import json

from click.testing import CliRunner

from booster_core.cli import main
from booster_runtime.trace import Trace


def write(folder, rank, pipeline=0, batches=2, late=0.0):
    """Write what a rank of two stages does, a second for each action: of 6 s, each rank computes 3."""
    trace = Trace(folder / f"pipeline-rank{rank}.trace.json", rank=rank)
    for batch in range(batches):
        begin, stage = 100.0 + 10 * batch + late, rank % 2
        about = {"batch": batch, "pipeline": pipeline}
        trace.slice("batches", f"batch {batch}", begin, begin + 6.0 - late, **about)
        for work, at in (("forward", stage), ("backward_input", 4 - stage), ("backward_weight", 5 - stage)):
            done = {"batch": batch, "stage": stage, "microbatch": 0}
            trace.slice(f"stage {stage}", f"{work} 0", begin + at, begin + at + 1, **done)
    trace.flush()


def trace(*arguments):
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)])
    return result.exit_code, result.output.splitlines()


def test_ranks_are_put_together_and_idle_shares_are_those_of_the_schedule(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, pipeline=2 * (rank // 2))
    code, lines = trace(tmp_path)
    assert code == 0
    assert lines == [str(tmp_path / "trace.json"), *(f"rank {rank}: idle 50.0% of 6 s" for rank in range(4))]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 2 * 4
    assert trace(tmp_path, "--out", tmp_path / "out" / "all.json")[1][0] == str(tmp_path / "out" / "all.json")


def test_the_last_batch_is_the_one_that_all_ranks_ended_from_its_first_begin(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 1, batches=1, late=0.5)
    assert trace(tmp_path)[1][1:] == ["rank 0: idle 50.0% of 6 s", "rank 1: idle 50.0% of 6 s"]


def test_a_folder_without_traces_is_refused(tmp_path):
    code, lines = trace(tmp_path)
    assert code == 1
    assert "holds no *-rank*.trace.json" in lines[0]

"""The logger of all distributions: one name, rank 0 by default, BOOSTER_LOG."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from booster_core import log as log_module
from booster_core.errors import ConfigError
from booster_core.log import ANY_RANK, configure_log, log


@pytest.fixture(autouse=True)
def restored():
    before = log.level, list(log.handlers), list(log.filters), log_module._filter.shows_all
    yield
    log.setLevel(before[0])
    log.handlers, log.filters, log_module._filter.shows_all = before[1], before[2], before[3]


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, ["a warning of 0", "a note of 1"]),
        ("info", ["a fact of 0", "a warning of 0", "a note of 1"]),
        ("all", ["a warning of 0", "a warning of 1", "a note of 1"]),
        ("info,all", ["a fact of 0", "a warning of 0", "a fact of 1", "a warning of 1", "a note of 1"]),
        ("ERROR", []),
    ],
)
def test_records_that_are_shown(variable, shown, monkeypatch, caplog):
    monkeypatch.delenv("BOOSTER_LOG", raising=False)
    if variable is not None:
        monkeypatch.setenv("BOOSTER_LOG", variable)
    configure_log()
    for rank in (0, 1):
        monkeypatch.setattr(log_module, "current_world", lambda rank=rank: SimpleNamespace(rank=rank))
        log.info("a fact of %d", rank)
        log.warning("a warning of %d", rank)
    log.warning("a note of 1", extra=ANY_RANK)
    assert [record.getMessage() for record in caplog.records] == shown


@pytest.mark.parametrize("variable", ["loud", "info,debug", "rank1"])
def test_other_values_are_refused(variable, monkeypatch):
    monkeypatch.setenv("BOOSTER_LOG", variable)
    with pytest.raises(ConfigError, match=rf"BOOSTER_LOG='{variable}' must be one of debug, info, warning, error"):
        configure_log()


@pytest.mark.parametrize("has_handlers", [False, True])
def test_each_record_is_printed_once(has_handlers):
    script = (
        "import logging, os; os.environ['BOOSTER_LOG'] = 'info'\n"
        "from booster_core.log import configure_log, log\n"
        "configure_log(); configure_log()\n"
        f"if {has_handlers}: logging.basicConfig(level='INFO')\n"
        "log.info('the message')"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stderr.count("the message") == 1
    assert ("rank 0: the message" in done.stderr) == (not has_handlers)


def test_every_distribution_logs_to_one_logger():
    sources = (Path(__file__).parents[2] / "packages").glob("*/src/**/*.py")  # also where wheels are tested
    named = {name for path in sources for name in re.findall(r"getLogger\(([^)]+)\)", path.read_text(encoding="utf-8"))}
    # the other one is torch's own, which the pipeline's dry run keeps quiet
    assert named == {'"booster"', '"torch._subclasses.fake_tensor"'}

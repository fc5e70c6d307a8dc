import pytest
import torch

from booster_core.errors import PluginError
from booster_core.plugin import hook_relay, hooks, register_hooks, unregister_hooks
from booster_core.plugin.hookspecs import hookimpl


@pytest.fixture
def fresh(monkeypatch):
    """Return a function that finds the installed hooks again, so that no test sees another one's."""
    hooks._manager.cache_clear()
    yield
    hooks._manager.cache_clear()


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl
    def after_step(self, metrics):
        self.seen.append(metrics)


def test_hooks_registered_after_boost_hear_of_steps(fresh):
    from booster_core import Booster

    model = torch.nn.Linear(2, 1)
    model, optimizer, *_ = Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        optimizer.backward(model(torch.ones(1, 2)).sum())
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()

    step()
    recorder = Recorder()
    register_hooks(recorder)
    step()
    assert [set(metrics) for metrics in recorder.seen] == [{"skipped", "grad_norm"}]
    assert not hook_relay().after_save.get_hookimpls()
    unregister_hooks(recorder)
    step()
    assert len(recorder.seen) == 1


def test_the_first_answer_wins_where_one_is_wanted(fresh):
    class Answers:
        def __init__(self, answer):
            self.answer = answer

        @hookimpl
        def storage(self, scheme):
            return self.answer and (self.answer, scheme)

    for answer in ("old", None):
        register_hooks(Answers(answer))
    assert hook_relay().storage(scheme="s3") == ("old", "s3")


class Misspelt(Recorder):
    @hookimpl
    def after_stepp(self, optimizer):
        raise AssertionError


class UnknownArgument:
    @hookimpl
    def after_step(self, optimiser):
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Misspelt, r"cannot be used as hooks: unknown hook 'after_stepp'"),
        (UnknownArgument, r"cannot be used as hooks: .*optimiser"),
        (object, r"no function marked with `booster_core\.hookimpl`"),
    ],
)
def test_what_is_no_hook_is_refused_and_leaves_nothing(fresh, make, match):
    with pytest.raises(PluginError, match=match):
        register_hooks(make())
    assert not hook_relay().after_step.get_hookimpls()


def test_an_object_is_registered_once(fresh):
    recorder = Recorder()
    with pytest.raises(PluginError, match="is not registered as hooks"):
        unregister_hooks(recorder)
    register_hooks(recorder)
    with pytest.raises(PluginError, match="is registered already"):
        register_hooks(recorder)
    assert hook_relay().after_step.get_hookimpls()


def test_installed_hooks_are_found_and_a_broken_one_is_reported_and_left_out(install, fresh):
    good = """
        from booster_core import hookimpl
        @hookimpl
        def sharding_policy(model_class):
            return f"policy of {model_class.__name__}"
    """
    install("good", group="booster.hooks", files={"hooks.py": good})
    install("bad", group="booster.hooks", files={"hooks.py": "raise ValueError('bad day')"})
    with pytest.warns(UserWarning, match=r"The hooks 'bad' \(booster-bad 1\.2\) are left out.*ValueError: bad day"):
        relay = hook_relay()
    assert relay.sharding_policy(model_class=int) == "policy of int"

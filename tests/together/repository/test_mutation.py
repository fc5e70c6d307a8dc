"""The faults that mutation testing plants: which there are, and how they are told apart."""

import ast
import textwrap

import pytest
from mutation import __main__ as command
from mutation.equivalent import EQUIVALENT
from mutation.mutants import mutants_of
from mutation.targets import ROOT, TARGETS


def mutants(text, functions=()):
    text = textwrap.dedent(text)
    return mutants_of(ast.parse(text), text, functions)


def changes(text):
    return [f"{mutant.before} -> {mutant.after}" for mutant in mutants(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a is None", ["a is None -> a is not None"]),
        ("a < b <= c", ["a <= b <= c", "a >= b <= c", "a < b < c", "a < b > c"]),
        ("a and b", ["a and b -> a or b", "a and b -> b", "a and b -> a"]),
        ("a // b", ["a // b -> a * b"]),
        ("-a", ["-a -> a"]),
        ("not a", ["not a -> a"]),
        ("3", ["3 -> 4", "3 -> 2"]),
        ("0.5", ["0.5 -> 1.0"]),
        ("True", ["True -> False"]),
        ("min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("sorted(a, key=b)", ["sorted(a, key=b) -> list(a)"]),
        ("a[b:]", ["b: -> :"]),
        ("[a for a in b if c(a)]", ["c(a) -> not c(a)"]),
        ("a.sub_(b)", ["a.sub_(b) -> a.add_(b)"]),
        ("_aligned(a)", ["_aligned(a) -> a"]),
    ],
)
def test_an_expression_is_changed_in_each_of_its_ways(text, expected):
    found = changes(f"x = {text}")
    assert [change if " -> " in expected[0] else change.split(" -> ")[1] for change in found] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a += b", ["a += b -> pass", "a += b -> a -= b"]),
        ("a.b = c", ["a.b = c -> pass"]),
        ("a = b", []),  # without it a name is missing, which anything finds
        ("f(a)", ["f(a) -> pass"]),
        ("'text'", []),
        ("assert a < b", []),
        ("raise E(1)", []),
        ("msg = f'{a + 1}'", []),
        ("if TYPE_CHECKING:\n    f(1)", []),
        ("if f(a):\n    a = b", ["f(a) -> not f(a)"]),
        ("def f(a: int = True) -> g(3): return", ["True -> False", "return -> pass"]),
    ],
)
def test_statements_that_compute_are_changed_and_others_are_not(text, expected):
    assert changes(text) == expected


def test_code_that_a_line_has_twice_is_told_apart():
    text = """
    class C:
        def f(self):
            return (1, 1)
    def g():
        return None
    """
    keys = [mutant.key for mutant in mutants(text)]
    assert ("C.f", "return (1, 1)", "1 -> 2") in keys
    assert ("C.f", "return (1, 1)", "1 -> 2 (#2)") in keys
    assert len(set(keys)) == len(keys)
    assert all(mutant.function == "C.f" for mutant in mutants(text, ("C",)))
    assert mutants(text, ("g",)) == []


def test_a_planted_fault_is_in_the_code():
    def run(plant):
        text = "def f(a):\n    return a + 3\n"
        tree = ast.parse(text)
        found = {mutant.after: mutant for mutant in mutants_of(tree, text)}
        assert set(found) == {"a - 3", "4", "2", "return None"}
        if plant:
            found[plant].plant()
        names = {}
        exec(compile(tree, "f", "exec"), names)
        return names["f"](10)

    assert [run(plant) for plant in (None, "a - 3", "4", "return None")] == [13, 7, 14, None]


def test_targets_and_the_list_of_equivalents_are_up_to_date():
    assert EQUIVALENT.keys() <= TARGETS.keys()
    for name, target in TARGETS.items():
        assert all((ROOT / "tests" / test).exists() for test in target.tests)
        text = target.path.read_text(encoding="utf-8")
        found = mutants_of(ast.parse(text), text, target.functions)
        assert found
        assert {key for key, reason in EQUIVALENT.get(name, {}).items() if reason} <= {mutant.key for mutant in found}


def test_an_unknown_target_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mutation", "zero/partitions"])
    with pytest.raises(SystemExit):
        command.main()
    assert "No target named zero/partitions. There are: zero/partition" in capsys.readouterr().err

"""The picture of docs/architecture.md shows the imports that there are."""

import pytest

from architecture import COLORS, ROOT, arrows, draw, imports


@pytest.mark.parametrize("name", COLORS)
def test_the_picture_is_that_of_the_sources(name):
    drawn = (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8")
    assert drawn == draw(imports(), COLORS[name]), "run `python tools/architecture.py`"


def test_an_import_that_others_imply_has_no_arrow():
    graph = {"core": set(), "runtime": {"core"}, "zero": {"core", "runtime"}}
    assert arrows(graph) == [("runtime", "core"), ("zero", "runtime")]


def test_imports_are_read_from_the_sources(tmp_path):
    for name, text in {
        "booster-a": "import torch\n",
        "booster-b": "def late():\n    from booster_a.x import y\n",
    }.items():
        source = tmp_path / name / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__init__.py").write_text(text)
    assert imports(tmp_path) == {"booster-a": set(), "booster-b": {"booster-a"}}

import shutil
import sys

import pytest

import booster_core.plugin
from booster_core import Plugin, discovery
from booster_core.errors import PluginError, PluginNotInstalledError

PLUGIN_FILES = ("__init__.py", "hooks.py", "plugin.py")


def listed(name):
    return [listing for listing in discovery.installed() if listing.name == name]


def test_a_listing_tells_distribution_and_version(install):
    install()
    assert listed("acme") == [
        discovery.PluginListing(
            name="acme", distribution="booster-acme", version="1.2", entry_point="booster_acme.hooks"
        )
    ]


def test_what_is_installed_in_a_running_process_is_found(install, tmp_path):
    install()
    site = tmp_path / "booster-acme"
    assert not listed("late")
    (site / "late-2.0.dist-info").mkdir()
    (site / "late-2.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 2.0\n")
    (site / "late-2.0.dist-info" / "entry_points.txt").write_text("[booster.plugins]\nlate = late\n")
    assert [listing.distribution for listing in listed("late")] == ["late"]
    shutil.rmtree(site / "late-2.0.dist-info")
    assert not listed("late")


def test_a_missing_requirement_is_found_and_extras_are_not_required(install):
    install(requires=["not-there-at-all>=1", "absent-too; extra == 'speed'", "gone; python_version < '3'", "pluggy"])
    assert listed("acme")[0].problem == "needs not-there-at-all>=1, not installed"


def test_a_requirement_of_another_version_is_found(install):
    install(requires=["booster-core>=9.3,<9.4", "pluggy>=1"])
    needs = f"needs booster-core>=9.3,<9.4, installed {booster_core.__version__}"
    assert listed("acme")[0].problem == needs
    assert discovery.load("acme").name == "acme"  # as pip has it: a plugin that loads is used


def test_the_error_of_a_plugin_that_does_not_load_names_unmet_requirements(install):
    install(requires=["booster-core>=9.3,<9.4"], files={"plugin.py": "from booster_core import Absent"})
    message = rf"cannot import name 'Absent'.*It needs booster-core>=9.3,<9.4, installed {booster_core.__version__}\."
    with pytest.raises(PluginError, match=message) as caught:
        discovery.load("acme")
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_doubled_name_names_both_distributions(install):
    install("acme", distribution="booster-one")
    install("acme", distribution="booster-two")
    listings = listed("acme")
    assert {listing.distribution for listing in listings} == {"booster-one", "booster-two"}
    for listing in listings:
        assert "booster-one 1.2" in listing.problem
        assert "booster-two 1.2" in listing.problem
    with pytest.raises(PluginError, match=r"used by booster-.* and booster-.*Uninstall all but one"):
        discovery.load("acme")


def test_load_returns_the_class_and_imports_no_other(install):
    install("acme")
    other = install("other")
    found = discovery.load("acme")
    assert issubclass(found, Plugin)
    assert found.name == "acme"
    assert not [name for name in sys.modules if name.startswith(other)]


def test_an_unknown_name_lists_what_is_installed_and_the_closest(install):
    install("acme")
    with pytest.raises(
        PluginError, match=r"No plugin named 'akme' is installed\. Installed: 'acme'.*Did you mean 'acme'\?"
    ):
        discovery.load("akme")


@pytest.mark.parametrize(
    ("files", "body", "message"),
    [
        ({"hooks.py": "x = 1"}, "pass", "lists no class: 'booster_acme.hooks' needs a function `booster_plugins`"),
        ({"plugin.py": "AcmePlugin = int"}, "pass", "lists <class 'int'>, which is not a subclass"),
        ({"plugin.py": "AcmePlugin = 3"}, "pass", "lists 3, which is not a subclass"),
        ({"__init__.py": "raise ValueError('bad day')"}, "pass", "could not be imported: ValueError: bad day"),
        ({"__init__.py": "raise SystemExit(3)"}, "pass", "could not be imported: SystemExit: 3"),
        *(({where: "def broken(:"}, "pass", "could not be imported: SyntaxError") for where in PLUGIN_FILES),
        ({"plugin.py": "import not_there"}, "pass", "could not be imported: No module named 'not_there'"),
        ({}, "api_version = 999", "was written for version 999 of the plugin interface"),
        ({}, "name = 'other'", "lists 0 classes whose `name` is 'acme'; the names there are 'other'"),
        (
            {
                "plugin.py": """
                    from booster_core import Plugin
                    class AcmePlugin(Plugin):
                        name = 'acme'
                        api_version = 2
                """
            },
            "pass",
            "AcmePlugin does not implement `configure`",
        ),
        (
            {
                "hooks.py": """
                    from booster_core import hookimpl
                    @hookimpl
                    def booster_plugin():
                        return []
                """
            },
            "pass",
            "could not be imported: PluginValidationError: unknown hook 'booster_plugin'",
        ),
    ],
    ids=[
        *("no hook", "no Plugin", "no class", "raises", "exits", *PLUGIN_FILES, "not installed"),
        *("version", "name", "abstract", "misspelt hook"),
    ],
)
def test_a_broken_plugin_is_refused_by_name_distribution_and_cause(install, files, body, message):
    package = install(files=files, body=body)
    assert listed("acme")[0].problem is None
    assert not [name for name in sys.modules if name.startswith(package)], "a listing imports nothing"
    with pytest.raises(PluginError) as caught:
        discovery.load("acme")
    assert "Plugin 'acme' (booster-acme 1.2)" in str(caught.value)
    assert message in str(caught.value)


def test_broken_plugins_disturb_no_other(install):
    install("acme")
    install("broken", files={"__init__.py": "def broken(:"})
    install("exits", files={"__init__.py": "raise SystemExit(3)"})
    assert discovery.load("acme").name == "acme"
    assert listed("acme")[0].problem is None
    assert booster_core.plugin.AcmePlugin.__module__ == "booster_acme.plugin"


INHERITS = """
    from booster_core.plugin import Plugin

    class Base(Plugin):
        api_version = 2

        def configure(self, objects, context):
            return objects

    class AcmePlugin(Base):
        name = "acme"
"""


def test_a_plugin_that_does_not_state_its_interface_version_itself_is_refused(install):
    install(files={"plugin.py": INHERITS})
    message = "does not say which version of the plugin interface it was written for"
    with pytest.raises(PluginError, match=rf"Plugin 'acme' \(booster-acme 1.2\) {message}: .*`api_version = 2`"):
        discovery.load("acme")


@pytest.mark.parametrize(
    ("class_name", "distribution"),
    [
        ("TorchDDPPlugin", "booster-ddp"),
        ("TorchFSDPPlugin", "booster-fsdp"),
        ("LowLevelZeroPlugin", "booster-zero"),
        ("GeminiPlugin", "booster-gemini"),
        ("HybridParallelPlugin", "booster-hybrid"),
    ],
)
def test_a_class_of_ours_that_is_not_installed_names_its_distribution(monkeypatch, class_name, distribution):
    monkeypatch.setattr(discovery, "entry_points_by_name", lambda _: {})
    message = f"{class_name} is in {distribution}, which is not installed. Run `pip install {distribution}`."
    with pytest.raises(ImportError) as caught:
        getattr(booster_core.plugin, class_name)
    assert str(caught.value) == message
    assert isinstance(caught.value, PluginNotInstalledError)


def test_a_name_of_ours_that_is_not_installed_names_its_distribution(monkeypatch):
    monkeypatch.setattr(discovery, "entry_points_by_name", lambda _: {})
    with pytest.raises(PluginError, match=r"Plugin 'zero' is in booster-zero.*Run `pip install booster-zero`"):
        discovery.load("zero")


def test_an_unknown_class_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no installed plugin has such a class"):
        booster_core.plugin.NobodysPlugin  # noqa: B018 - looking it up is what raises

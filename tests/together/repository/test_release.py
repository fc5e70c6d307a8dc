"""Releases of a package, made in a copy of the repository."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import release
import workspace

ROOT = Path(__file__).parents[3]


IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@example.org")


def git(folder, *arguments):
    done = subprocess.run(
        ["git", "-C", str(folder), *IDENTITY, *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Return a repository with the packages of this one, committed."""
    home = tmp_path_factory.mktemp("repository") / "copy"
    # Only what git knows: other tests may leave files here for a moment.
    for name in git(
        ROOT, "ls-files", "packages", "examples/minimal_plugin", "tools", "tests", "docs", "pytest.ini", ".gitignore"
    ).splitlines():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, home / name)
    git(home.parent, "init", "--quiet", str(home))
    git(home, "add", "--all")
    git(home, "commit", "--quiet", "--message", "Begin")
    return home


@pytest.fixture
def copy(committed, tmp_path, monkeypatch):
    """Return a copy of that repository, which a test may change."""
    for key in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{key}_NAME", "test")
        monkeypatch.setenv(f"{key}_EMAIL", "test@example.org")
    git(tmp_path, "clone", "--quiet", "--shared", str(committed), "copy")
    return tmp_path / "copy"


def test_release_moves_fragments_sets_the_version_tags_and_builds(copy):
    pytest.importorskip("towncrier", reason="towncrier writes the changelog; install the dependency group `test`")
    zero = copy / "packages" / "booster-zero"
    told = "A gradient is no longer lost."
    for kind, text in {"changed": "Buckets are larger.", "fixed": told, "numerics": "Sums are in fp32."}.items():
        (zero / "changelog.d" / f"sums.{kind}.md").write_text(f"{text}\n")
    git(copy, "add", "--all")
    git(copy, "commit", "--quiet", "--message", "Sums")
    others = git(copy, "ls-files", "packages/booster-gemini")
    released = workspace.read_toml(zero / "pyproject.toml")["project"]["version"]
    command = [sys.executable, "tools/release.py", "booster-zero", "0.1.7"]
    done = subprocess.run(command, cwd=copy, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'version = "0.1.7"' in (zero / "pyproject.toml").read_text()
    changelog = (zero / "CHANGELOG.md").read_text()
    title, _, rest = changelog.partition("\n## 0.1.7 (")
    rest, _, before = rest.partition("\n## ")
    assert before.startswith(f"{released} (")
    assert title.startswith("# Changelog of booster-zero")
    assert [line for line in rest.splitlines() if line.startswith("###")] == [
        "### Changed", "### Fixed", "### Numerics",
    ]  # fmt: skip
    assert f"\n- {told}\n" in rest.partition("### Fixed")[2]
    assert [path.name for path in (zero / "changelog.d").iterdir()] == ["README.md"]
    assert git(copy, "ls-files", "packages/booster-gemini") == others
    assert git(copy, "status", "--porcelain") == ""
    assert git(copy, "tag", "--points-at", "HEAD").split() == ["booster-zero-v0.1.7"]
    assert git(copy, "log", "--format=%s").splitlines() == ["Release booster-zero 0.1.7", "Sums", "Begin"]
    with tarfile.open(copy / "dist" / "booster_zero-0.1.7.tar.gz") as archive:
        assert "booster_zero-0.1.7/tests/zero/test_zero_config.py" in archive.getnames()
    with zipfile.ZipFile(copy / "dist" / "booster_zero-0.1.7-py3-none-any.whl") as wheel:
        assert "Version: 0.1.7" in wheel.read("booster_zero-0.1.7.dist-info/METADATA").decode()
    with pytest.raises(release.ReleaseError, match=r"booster-zero 0\.1\.7 is released already; 0\.1\.7 is not newer"):
        release.check("booster-zero", "0.1.7", copy)
    with pytest.raises(release.ReleaseError, match=r"no fragments, so nothing has changed"):
        release.check("booster-zero", "0.1.8", copy)


def tell(copy, name, text):
    """Commit a fragment of a package."""
    (copy / "packages" / name / "changelog.d" / "hooks.added.md").write_text(f"{text}\n")
    git(copy, "add", "--all")
    git(copy, "commit", "--quiet", "--message", text)


def test_a_minor_release_of_core_is_one_command(copy):
    """Those that need core admit it, with a fragment that makes a release of their own possible."""
    pytest.importorskip("towncrier", reason="towncrier writes the changelog; install the dependency group `test`")
    tell(copy, "booster-core", "More hooks.")
    command = [sys.executable, "tools/release.py", "booster-core", "0.2.0"]
    done = subprocess.run(command, cwd=copy, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    others = [name for name in workspace.PACKAGES if name != "booster-core"]
    assert f"release them next, so that they can be installed with it: {', '.join(others)}." in done.stdout
    assert git(copy, "status", "--porcelain") == ""
    for manifest in [*copy.glob("packages/*/pyproject.toml"), *copy.glob("examples/*/pyproject.toml")]:
        needed = re.search(r'"booster-core>=0\.1(\.\d+)?,<(0\.\d+)"', manifest.read_text())
        assert manifest.parent.name == "booster-core" or needed[2] == "0.3"
    release.check("booster-zero", "0.1.7", copy)
    assert not release.refusing("booster-core", Version("0.2.7"), copy)
    assert [str(requirement) for _, requirement in release.refusing("booster-core", Version("0.3.0"), copy)]


@functools.cache  # nox registers its sessions once
def load_noxfile():
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    return noxfile


def noxfile_of(copy, monkeypatch):
    """Return the noxfile as a module of another checkout."""
    monkeypatch.setattr(load_noxfile(), "ROOT", copy)
    monkeypatch.chdir(copy)
    return load_noxfile()


def test_a_release_is_tested_with_releases_not_with_code_that_is_to_be_released(copy, monkeypatch):
    """A booster-zero that uses a function of booster-runtime's checkout is tested without that function."""
    git(copy, "tag", "booster-runtime-v0.1.7")
    transport = Path("packages", "booster-runtime", "src", "booster_runtime", "collectives", "transport.py")
    with (copy / transport).open("a") as file:
        file.write("\n\ndef unreleased() -> None:\n    pass\n")
    git(copy, "commit", "--quiet", "--all", "--message", "Add a function")
    noxfile = noxfile_of(copy, monkeypatch)
    for end in ("lowest", "newest"):
        released = noxfile._sources(Session(), "booster-zero", end)["booster-runtime"]
        text = released.parents[1].joinpath(transport).read_text()
        assert "class Transport" in text
        assert "unreleased" not in text
    git(copy, "tag", "booster-runtime-v0.2.0")  # which booster-zero does not admit
    assert noxfile._sources(Session(), "booster-zero", "newest")["booster-runtime"] == released
    git(copy, "tag", "booster-runtime-v0.1.8")
    newest = noxfile._sources(Session(), "booster-zero", "newest")["booster-runtime"]
    assert "unreleased" in newest.parents[1].joinpath(transport).read_text()
    assert noxfile._sources(Session(), "booster-zero", "lowest")["booster-runtime"] == released


def test_the_lowest_releases_are_those_that_admit_each_other(copy, monkeypatch):
    """Core's is what the tests' kit of the checkout admits, not only what booster-zero does."""
    for version in ("0.1.0", "0.1.1", "0.1.2"):
        git(copy, "tag", f"booster-core-v{version}")
    for name, text in {"booster-zero": ">=0.1,<0.2", "booster-testing": ">=0.1.1,<0.2"}.items():
        manifest = copy / "packages" / name / "pyproject.toml"
        manifest.write_text(re.sub(r'"booster-core[^"]*"', f'"booster-core{text}"', manifest.read_text()))
    sources = noxfile_of(copy, monkeypatch)._sources(Session(), "booster-zero", "lowest")
    assert sources["booster-core"].parents[1].name == "booster-core-v0.1.1"
    assert sources["booster-zero"] == copy / "packages" / "booster-zero"


class Session:
    """What the test needs of a nox session."""

    def run(self, *command, external, silent=False):
        return subprocess.run(command, check=True, capture_output=silent, text=True).stdout

    def log(self, text):
        print(text)


def test_releases_that_are_refused(copy):
    with pytest.raises(release.ReleaseError, match=r"No package named 'booster-nought'. There are: booster-check"):
        release.check("booster-nought", "0.2.0", copy)
    with pytest.raises(release.ReleaseError, match=r"'next' is no version"):
        release.check("booster-zero", "next", copy)
    tell(copy, "booster-core", "More hooks.")
    with pytest.raises(release.ReleaseError, match=r"minimal_plugin declares `booster-core.*`, which refuses 0\.0\.9"):
        release.check("booster-core", "0.0.9", copy)
    (copy / "notes.txt").write_text("half done")
    with pytest.raises(release.ReleaseError, match=r"The checkout has changes[\s\S]*notes\.txt"):
        release.check("booster-zero", "0.1.7", copy)


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_every_fragment_has_a_kind_that_releases_know(name):
    folder = ROOT / "packages" / name / "changelog.d"
    unknown = set(folder.iterdir()) - set(release.fragments(name, ROOT)) - {folder / "README.md"}
    assert unknown == set()

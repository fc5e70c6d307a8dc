"""Releases of a package, made in a copy of the repository."""

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


MINOR = Version(workspace.read_toml(ROOT / "packages" / "booster-core" / "pyproject.toml")["project"]["version"]).minor
NEXT, AFTER_NEXT = f"0.{MINOR}.7", f"0.{MINOR}.8"
"""Further releases of what is here, whose packages have one minor version."""


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
    for path in (zero / "changelog.d").glob("*.*.md"):  # those of the changes that are under way
        path.unlink()
    for kind, text in {"changed": "Buckets are larger.", "fixed": told, "numerics": "Sums are in fp32."}.items():
        (zero / "changelog.d" / f"sums.{kind}.md").write_text(f"{text}\n")
    git(copy, "add", "--all")
    git(copy, "commit", "--quiet", "--message", "Sums")
    others = git(copy, "ls-files", "packages/booster-gemini")
    released = workspace.read_toml(zero / "pyproject.toml")["project"]["version"]
    command = [sys.executable, "tools/release.py", "booster-zero", NEXT]
    done = subprocess.run(command, cwd=copy, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'version = "{NEXT}"' in (zero / "pyproject.toml").read_text()
    changelog = (zero / "CHANGELOG.md").read_text()
    title, _, rest = changelog.partition(f"\n## {NEXT} (")
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
    assert git(copy, "tag", "--points-at", "HEAD").split() == [f"booster-zero-v{NEXT}"]
    assert git(copy, "log", "--format=%s").splitlines() == [f"Release booster-zero {NEXT}", "Sums", "Begin"]
    with tarfile.open(copy / "dist" / f"booster_zero-{NEXT}.tar.gz") as archive:
        assert f"booster_zero-{NEXT}/tests/zero/test_zero_config.py" in archive.getnames()
    with zipfile.ZipFile(copy / "dist" / f"booster_zero-{NEXT}-py3-none-any.whl") as wheel:
        assert f"Version: {NEXT}" in wheel.read(f"booster_zero-{NEXT}.dist-info/METADATA").decode()
    with pytest.raises(release.ReleaseError, match=f"booster-zero {NEXT} is released already; {NEXT} is not newer"):
        release.check("booster-zero", NEXT, copy)
    with pytest.raises(release.ReleaseError, match=r"no fragments, so nothing has changed"):
        release.check("booster-zero", AFTER_NEXT, copy)


def tell(copy, name, text):
    """Commit a fragment of a package."""
    (copy / "packages" / name / "changelog.d" / "hooks.added.md").write_text(f"{text}\n")
    git(copy, "add", "--all")
    git(copy, "commit", "--quiet", "--message", text)


def test_a_minor_release_of_core_is_one_command(copy):
    """Those that need core admit it, with a fragment that makes a release of their own possible."""
    pytest.importorskip("towncrier", reason="towncrier writes the changelog; install the dependency group `test`")
    tell(copy, "booster-core", "More hooks.")
    command = [sys.executable, "tools/release.py", "booster-core", f"0.{MINOR + 1}.0"]
    done = subprocess.run(command, cwd=copy, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    others = [name for name in workspace.PACKAGES if name != "booster-core"]
    assert f"release them next, so that they can be installed with it: {', '.join(others)}." in done.stdout
    assert git(copy, "status", "--porcelain") == ""
    for manifest in [*copy.glob("packages/*/pyproject.toml"), *copy.glob("examples/*/pyproject.toml")]:
        needed = re.search(r'"booster-core>=0\.\d+(\.\d+)?,<(0\.\d+)"', manifest.read_text())
        assert manifest.parent.name == "booster-core" or needed[2] == f"0.{MINOR + 2}"
    release.check("booster-zero", NEXT, copy)
    assert not release.refusing("booster-core", Version(f"0.{MINOR + 1}.7"), copy)
    assert [str(requirement) for _, requirement in release.refusing("booster-core", Version(f"0.{MINOR + 2}.0"), copy)]


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
        release.check("booster-zero", NEXT, copy)

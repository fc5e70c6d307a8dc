import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import nox
import pytest
from matrix import matrix, named
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = {package.name: nox.project.load_toml(package / "pyproject.toml")["project"] for package in PACKAGES}
_TOOLKIT = {"booster-core", "booster-runtime"}
NEEDED = {
    "booster-core": set(),
    "booster-checkpoint": {"booster-core"},
    "booster-runtime": {"booster-core", "booster-checkpoint"},
    "booster-gemini": {*_TOOLKIT, "booster-zero"},
    "booster-hybrid": {*_TOOLKIT, "booster-zero"},
    "booster-ft": {*_TOOLKIT, "booster-ddp"},
}
"""Our packages that each package depends on; those not listed depend on core and the toolkit."""
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


@each_package
def test_wheel_contains_only_sources_py_typed_and_license(build_wheel, package):
    names = zipfile.ZipFile(build_wheel(package)).namelist()
    module = package.name.replace("-", "_")
    info = f"{module}-{PROJECTS[package.name]['version']}.dist-info"
    assert f"{module}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    sources = {str(path.relative_to(package / "src")) for path in (package / "src").rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    assert {name for name in names if not name.startswith(info)} == sources
    # the conformance kit is a package; our own tests stay in the repository
    assert not [name for name in names if Path(name).name.startswith(("test_", "conftest"))]


@each_package
def test_metadata_for_the_package_index(build_wheel, package):
    wheel = zipfile.ZipFile(build_wheel(package))
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == package.name
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    requires = metadata.get_all("Requires-Dist")
    assert f"torch>={'2.11' if package.name == 'booster-fsdp' else '2.10'}" in requires
    ours = {each.name: each.specifier for each in map(Requirement, requires) if each.name in PROJECTS}
    assert ours.keys() == NEEDED.get(package.name, _TOOLKIT)
    for name, specifier in ours.items():
        assert specifier.contains(PROJECTS[name]["version"]), f"{package.name} refuses the {name} of this checkout"
        # A range, not one release: users get a fix of a dependency without a release of its dependents.
        assert {each.operator for each in specifier} == {">=", "<"}


@matrix(["booster-fsdp", "booster-testing"], package=named(PACKAGES, lambda path: path.name))
def test_source_distribution_builds_the_same_wheel(build_wheel, package, tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(package)]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert any(name.endswith("/CHANGELOG.md") for name in names)
    short = package.name.removeprefix("booster-")
    own = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"tests/{short}/**/*.py")]
    assert own
    assert {name.partition("/")[2] for name in names} >= {*own, "pytest.ini", "tests/conftest.py"}
    (wheel,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(wheel).namelist() == zipfile.ZipFile(build_wheel(package)).namelist()


@pytest.mark.slow  # ten seconds; that the tests are there is tested for each package above
def test_unit_tests_run_from_a_source_distribution(build_wheel, environment_of, tmp_path):
    zero = ROOT / "packages" / "booster-zero"
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(zero)]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (home,) = (path for path in tmp_path.iterdir() if path.is_dir())
    files = ("tests/zero/test_zero_config.py", "tests/zero/test_sharding_partition.py")
    names = ("core", "runtime", "testing", "zero")
    environment = environment_of(*(build_wheel(ROOT / "packages" / f"booster-{name}") for name in names))
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=home, timeout=600)
    assert " passed" in done.stdout

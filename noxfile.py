"""Every developer command of this repository: ``nox -l`` lists them, ``nox -s NAME -- ARGUMENTS`` runs one.

Sessions on the checkout share one environment, ``.nox/checkout``, with every package installed editable,
because installing torch takes longer than most sessions. Sessions that test wheels have their own environments. All
install with ``constraints.txt``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nox
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
TESTING = "booster-testing"
EXAMPLE = ROOT / "examples" / "minimal_plugin"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
ENDS = {"lowest": "3.10", "newest": "3.13"}
"""The Python with which both ends of the declared versions are tested."""
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
WHEELS = ROOT / "build" / "wheels"
_OUTSIDE = [f"tests/together/{folder}" for folder in ("packaging", "examples", "repository")]
"""Tests of what is around the packages: mostly new interpreters, and none that finds a fault in training."""
_LEAST_COVERAGE = 90
"""Percentage of a package's lines that its own tests run at least."""

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run what must pass before a change is merged, with `pages` and `device`: lint, types, and the default tests.

    ``-- tests/zero`` runs the tests of a folder alone, ``-- tests/zero -m slow`` its slow ones. How long each took is
    in build/tests.xml.
    """
    python = _checkout(session)
    mark, arguments = "not slow", session.posargs
    if not any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        _lint(session, python)
        # Sessions or jobs of their own run the others: `pages`, `device`, and those of tests/evidence/long.txt.
        mark = "not slow and not long"
        arguments = ["tests", *(f"--ignore={path}" for path in [*_OUTSIDE, *_on_a_device()]), *arguments]
    durations = ("--junitxml", str(ROOT / "build" / "tests.xml"))
    _pytest(session, python, "-m", mark, *durations, *_workers(), *arguments)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, formatting, spelling, imports between packages, and types."""
    _lint(session, _checkout(session))


@nox.session(venv_backend="none")
def pages(session: nox.Session) -> None:
    """Try what users read, run and install: the site, built into build/site, docstrings, pages, examples and wheels."""
    python = _checkout(session)
    # The theme prints a notice about another project in each build. With `--quiet`, warnings would not count.
    _run(session, python, "-m", "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    sources = [f"packages/{name}/src" for name in PACKAGES]
    _pytest(session, python, "--doctest-modules", *sources, success_codes=[0, 5])
    _pytest(session, python, *_OUTSIDE, "-m", "not slow", *_workers(), *session.posargs)


@nox.session(venv_backend="none")
def models(session: nox.Session) -> None:
    """Measure all models under all plugins, and write their pages: ``-- zoo`` or ``-- families``.

    ``zoo`` writes docs/compatibility.md, ``families``, those of transformers under hybrid, docs/families.md.
    ``--resume`` keeps the results of an interrupted run. Other arguments go to pytest, and leave the page as it is.
    """
    table, *arguments = session.posargs or [""]
    if table not in ("zoo", "families"):
        session.error("Which models? `nox -s models -- zoo` or `nox -s models -- families`.")
    python = _checkout(session)
    results = ROOT / "build" / table
    if "--resume" in arguments:
        arguments.remove("--resume")
    else:
        shutil.rmtree(results, ignore_errors=True)
    session.env[f"BOOSTER_{table.upper()}_RESULTS"] = str(results)
    try:
        _pytest(session, python, f"tests/together/{table}", *arguments)
    finally:
        if not arguments:
            writer = {"zoo": "zoo_results.py", "families": "family_results.py"}[table]
            _run(session, python, f"tests/shared/{writer}", str(results), "docs")


@nox.session(venv_backend="none")
def device(session: nox.Session) -> None:
    """Run the conformance kit, and the cases of GPUs, on the simulated accelerator, with NCCL's rules.

    ``-- --cuda`` runs every plugin on this machine's CUDA devices, within eight minutes: docs/testing-on-devices.md.
    ``-- --pack`` packs what that needs into build/gpu-pack.
    """
    python = _checkout(session)
    first, *rest = session.posargs or [""]
    if first == "--pack":
        _pack_device_runs(session, python)
    elif first == "--cuda":
        into = ROOT / "build" / "device-report"
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "shared"), str(ROOT / "benchmarks")])}
        _run(session, python, "-m", "device_runs", "--into", str(into), *rest, env=environment)
    else:
        _pytest(session, python, *_on_a_device(), "-m", "not slow", *_workers(), *session.posargs)


@nox.session
@nox.parametrize(
    "python,core",
    [(RUNNING, "tree"), *((python, core) for core, python in ENDS.items())],
    ids=["core=tree", *(f"core={core}" for core in ENDS)],
)
@nox.parametrize("name", [*PACKAGES, "all"], ids=[*PACKAGES, "all"])
def package(session: nox.Session, name: str, core: str) -> None:
    """Run all of a package's tests, on ranks as well, against its wheel: ``"package(booster-zero, core=lowest)"``.

    The environment has only the package's own dependencies and what tests need. ``core`` says which releases of our
    other packages, and which versions of third parties: ``tree`` takes this checkout and constraints.txt; ``lowest``
    and ``newest`` take the first or the last releases that the package and each other's ranges admit, built from their
    tags, or this checkout where none is tagged yet, and the lowest declared versions or the newest of the index.
    ``all`` runs the tests of all packages, of this checkout, with these versions of third parties.
    """
    if name == "all":
        editable = [argument for each in PACKAGES for argument in ("-e", f"packages/{each}")]
        _install(session, _versions(session, core, PACKAGES), editable)
        _pytest(session, "python", *map(_own_tests, PACKAGES), "-m", "not slow", *_workers(), *session.posargs)
        return
    sources = _sources(session, name, core)
    wheels = _wheels(session, sources.values())
    _install_wheels(session, wheels, _versions(session, core, sources))
    session.run("python", "-m", "pip", "check")
    # Core must work without plugins, so none is installed when its tests run.
    _pytest(session, "python", _own_tests(name), "-m", "not slow", *_workers(), *session.posargs)


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """Measure which lines of each package its own tests run, on ranks as well: ``-- core zero`` for some packages.

    The reports are in build/coverage. Fails where a package has less than 90%.
    """
    python = _checkout(session)
    below = []
    for short in session.posargs or [name.removeprefix("booster-") for name in PACKAGES]:
        name = f"booster-{short}"
        if name not in PACKAGES:
            session.error(f"No package named {name}. There are: {', '.join(PACKAGES)}.")
        folder = ROOT / "build" / "coverage" / short
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        session.env["COVERAGE_FILE"] = str(folder / "data")
        measured = ("-m", "coverage", "run", f"--source={name.replace('-', '_')}", "-m", "pytest")
        _run(session, python, *measured, _own_tests(name), "-m", "not slow", *_workers())
        _run(session, python, "-m", "coverage", "combine", "--quiet")
        for unreadable in folder.glob("data.*"):  # of a rank that a test killed while it wrote
            unreadable.unlink()
        _run(session, python, "-m", "coverage", "html", "--quiet", "--directory", str(folder / "html"))
        _run(session, python, "-m", "coverage", "report", "--skip-covered", "--show-missing")
        total = session.run(python, "-m", "coverage", "report", "--format=total", external=True, silent=True)
        if int(str(total)) < _LEAST_COVERAGE:
            below.append(name)
    if below:
        session.error(f"Less than {_LEAST_COVERAGE}% of the lines of {', '.join(below)} are run by their own tests.")


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """Plant faults in the arithmetic, one at a time, and fail where its tests miss one: ``-- zero/partition`` for some.

    ``-- --list`` shows the targets.
    """
    session.env["PYTHONPATH"] = str(ROOT / "tests" / "shared")
    _run(session, _checkout(session), "-m", "mutation", *session.posargs)


@nox.session
def minimal_plugin(session: nox.Session) -> None:
    """Run the conformance kit on a third-party plugin, built into a wheel, against this core."""
    wheels = _wheels(session, [*(ROOT / "packages" / each for each in _with_dependencies(TESTING)), EXAMPLE])
    _install_wheels(session, wheels)
    session.run("booster", "plugins", "--load")
    _pytest(session, "python", str(EXAMPLE / "tests"), *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model on bytes: ``nox -s demo -- --plugin ddp --nproc 2``.

    ``--plugin ft --kill`` trains a small model in four replica groups instead, of which one dies and comes back. The
    environment contains only the plugin's distribution, its dependencies, and the imports of the example.
    """
    arguments = [*session.posargs]
    nproc = _option(session, arguments, "--nproc", "2")
    plugin = _option(session, arguments, "--plugin", "ddp")
    name = f"booster-{plugin}"
    if name not in PACKAGES:
        plugins = ", ".join(each.removeprefix("booster-") for each in PACKAGES)
        session.error(f"No plugin '{plugin}' in this repository, only {plugins}.")
    editable = [argument for each in _with_dependencies(name) for argument in ("-e", f"packages/{each}")]
    session.install("--quiet", "-c", CONSTRAINTS, *editable, *_group("demo"))
    if plugin == "ft":
        shutil.rmtree(ROOT / "runs" / "fault_tolerant", ignore_errors=True)
        killed = [part for given in arguments for part in ((given, "2") if given == "--kill" else (given,))]
        quiet = {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        session.run("booster", "run", "--groups", "4", "examples/fault_tolerant.py", *killed, env=quiet)
        return
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")
    script = ("examples/pretrain_bytes.py", "--plugin", plugin, *arguments)
    session.run("python", *torchrun, *script, env={"OMP_NUM_THREADS": "1"})
    session.log("The loss curve is in runs/pretrain_bytes/loss.png. Try next:")
    session.log("  nox -s demo -- --plugin fsdp                  another strategy, the same script and results")
    session.log("  nox -s demo -- --nproc 1 --precision bf16     one process, compute in bf16")
    session.log("  examples/resume_training.py                   stop and resume on another number of processes")
    session.log("  docs/architecture.md                          what boost and step do")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure every bar against its yardstick, and write docs/performance.md; ``-- import_time`` for some.

    ``-- --smallest`` runs each once with the least work, and leaves the page as it is. DeepSpeed, Lightning Fabric and
    Accelerate are compared with where they are installed.
    """
    _run(session, _checkout(session), "benchmarks/_run.py", *session.posargs)


@nox.session
@nox.parametrize("name", PACKAGES, ids=PACKAGES)
def release(session: nox.Session, name: str) -> None:
    """Release a package: version, changelog, commit, tag, ``dist/``: ``"release(booster-zero)" -- 0.2.0 --dry-run``.

    The tag is pushed by hand, and the workflow that it starts publishes that one package. ``--dry-run`` does all of it
    in a temporary clone, and shows the result. ``-- --build`` builds the source distribution, and the wheel from that.
    """
    session.install("-c", CONSTRAINTS, *_group("release"))
    if session.posargs == ["--build"]:
        session.run("python", "-m", "build", "--outdir", str(ROOT / "dist"), f"packages/{name}")
    else:
        session.run("python", "tools/release.py", name, *session.posargs)


def _checkout(session: nox.Session) -> str:
    """Return the Python of the shared environment of the checkout; recreate it if its inputs have changed."""
    home = ROOT / ".nox" / "checkout"
    python = str(home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
    manifests = [ROOT / "pyproject.toml", Path(CONSTRAINTS), *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    digest = hashlib.sha256(sys.version.encode() + b"".join(path.read_bytes() for path in manifests)).hexdigest()
    stamp = home / "installed-from.txt"
    if stamp.exists() and stamp.read_text(encoding="ascii") == digest:
        return python
    shutil.rmtree(home, ignore_errors=True)
    session.run(sys.executable, "-m", "virtualenv", "--quiet", str(home), external=True)
    editable = [argument for name in PACKAGES for argument in ("-e", f"packages/{name}")]
    groups = [*_group("lint"), *_group("types"), *_group("test"), *_group("docs")]
    # What is imported is compiled then: that is a small part of it, and all would take a minute and a half.
    install = ("-m", "pip", "install", "--quiet", "--no-compile", "-c", CONSTRAINTS)
    _run(session, python, *install, *editable, *groups)
    _run(
        session,
        python,
        *install,
        "--no-deps",
        "--target",
        str(home / "isolated_libraries"),
        *_group("isolated_libraries"),
    )
    stamp.write_text(digest, encoding="ascii")
    return python


def _lint(session: nox.Session, python: str) -> None:
    _run(session, python, "-m", "ruff", "check", ".")
    _run(session, python, "-m", "ruff", "format", "--check", ".")
    _run(session, python, "-m", "codespell_lib")
    _run(session, str(Path(python).with_name("lint-imports")))
    sources = [f"packages/{name}/src" for name in PACKAGES]
    _run(session, python, "-m", "mypy", *sources, "examples/minimal_plugin/src", "noxfile.py", "tools")


def _pytest(session: nox.Session, python: str, *arguments: str, success_codes: Iterable[int] = (0,)) -> None:
    command = (python, "-m", "pytest", *arguments)
    # Tests start many processes, each of which would compile our sources, and its tests, again.
    caching = {"PYTHONDONTWRITEBYTECODE": ""}
    session.run(*command, external=python != "python", success_codes=list(success_codes), env=caching)


def _pack_device_runs(session: nox.Session, python: str) -> None:
    """Pack the cases of GPUs, for a machine with CUDA, torch and transformers, but no network.

    Copy the folder there and call ``bash run.sh`` in it.
    """
    pack = ROOT / "build" / "gpu-pack"
    shutil.rmtree(pack, ignore_errors=True)
    shared = ROOT / "tests" / "shared"
    for folder in (shared / "device_runs", ROOT / "benchmarks" / "device_speed"):
        shutil.copytree(folder, pack / "cases" / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("device_smoke.py", "free_ports.py", "host_waits.py"):
        shutil.copy(shared / module, pack / "cases")
    shutil.copy(ROOT / "tools" / "run_gpu_pack.sh", pack / "run.sh")
    wheels = pack / "wheels"
    wheels.mkdir()
    # No case uses booster-ft, which needs torchft: compiled, and not on a machine without a network.
    for wheel in _wheels(session, (ROOT / "packages" / name for name in PACKAGES if name != "booster-ft"), python):
        shutil.copy(wheel, wheels)
    download = ("-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheels))
    _run(session, python, *download, "-c", CONSTRAINTS, *_group("gpu_pack"))
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        for machine in ("x86_64", "aarch64"):
            target = ("--platform", f"manylinux2014_{machine}", "--python-version", version)
            _run(session, python, *download, "--no-deps", *target, "-c", CONSTRAINTS, "xxhash")
    size = sum(path.stat().st_size for path in pack.rglob("*") if path.is_file()) / 2**20
    session.log(f"{pack}: {size:.1f} MiB")


def _workers() -> tuple[str, ...]:
    """Return pytest's arguments for parallel tests.

    Ranks wait for each other and for time limits, so three test processes keep two cores busy; a fourth one takes more
    processor time than it finds. The tests of a file run in one process, because they share fixtures; tests/conftest.py
    orders the files.
    """
    return ("-n", str(max(3, (os.cpu_count() or 2) // 2)), "--dist", "loadfile", "--no-loadscope-reorder")


def _own_tests(name: str) -> str:
    """Return the folder with a package's own tests."""
    return str(ROOT / "tests" / name.removeprefix("booster-"))


def _on_a_device() -> list[str]:
    """Return folders and files of tests that need the simulated accelerator, which is compiled first."""
    files = [*ROOT.glob("tests/*/test_*simulated*.py"), ROOT / "tests" / "zero" / "test_zero_offload_device.py"]
    return [str(ROOT / "tests" / "together" / "devices"), *sorted(map(str, files))]


def _run(session: nox.Session, python: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    session.run(python, *arguments, env=env, external=True)


def _option(session: nox.Session, arguments: list[str], name: str, default: str) -> str:
    """Remove an option from a list of arguments and return its value."""
    if name not in arguments:
        return default
    index = arguments.index(name)
    if index + 1 == len(arguments):
        session.error(f"{name} needs a value, as in `nox -s demo -- {name} {default}`.")
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value


def _group(name: str) -> list[str]:
    """Return the requirements of a dependency group of the root ``pyproject.toml``."""
    return list(nox.project.dependency_groups(PROJECT, name))


def _with_dependencies(name: str) -> list[str]:
    """Return a package of this repository and those that it depends on."""
    needed = [name]
    for each in needed:
        dependencies = nox.project.load_toml(ROOT / "packages" / each / "pyproject.toml")["project"]["dependencies"]
        needed += [own for own in PACKAGES if own not in needed and any(text.startswith(own) for text in dependencies)]
    return needed


def _lowest_versions(names: Iterable[str]) -> list[str]:
    """Return the third-party requirements of packages, each pinned to the lowest version that all of them accept."""
    lowest: dict[str, Version] = {}
    for name in names:
        dependencies = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]["dependencies"]
        for requirement in map(Requirement, dependencies):
            for each in requirement.specifier:
                if requirement.name not in PACKAGES and each.operator == ">=":
                    version = Version(each.version)
                    lowest[requirement.name] = max(version, lowest.get(requirement.name, version))
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def _versions(session: nox.Session, core: str, names: Iterable[str]) -> list[str]:
    """Return pip's arguments for the versions of third parties that a session tests with."""
    if core == "tree":
        return ["-c", CONSTRAINTS]
    versions = _lowest_versions(names) if core == "lowest" else ["--upgrade", "--upgrade-strategy", "eager"]
    session.log(f"Third parties: {', '.join(versions) if core == 'lowest' else 'the newest of the index'}")
    return versions


def _sources(session: nox.Session, name: str, core: str) -> dict[str, Path]:
    """Return the folders from which a session installs a package, what it depends on, and the tests' kit."""
    needed = {*_with_dependencies(name), *_with_dependencies(TESTING)}
    sources = {each: ROOT / "packages" / each for each in sorted(needed)}
    rest = set() if core == "tree" else needed - {name, TESTING}
    while rest:  # first those that no other of the rest needs: all ranges that a release must be in are known then
        each = next(each for each in sorted(rest) if not any(each in _own_ranges(sources[one]) for one in rest))
        rest.remove(each)
        sources[each] = _released(session, each, core, [sources[one] for one in needed - rest - {each}])
    return sources


def _own_ranges(folder: Path) -> dict[str, SpecifierSet]:
    """Return the versions of our packages that a package admits, by name."""
    requirements = map(Requirement, nox.project.load_toml(folder / "pyproject.toml")["project"]["dependencies"])
    return {requirement.name: requirement.specifier for requirement in requirements if requirement.name in PACKAGES}


def _released(session: nox.Session, needed: str, core: str, dependents: Iterable[Path]) -> Path:
    """Return a folder with the first or last release of a package of ours that all of these packages' ranges admit.

    A release is a tag of this repository. Where the ranges admit none yet, this checkout's package is returned.
    """
    admits = SpecifierSet()
    for folder in dependents:
        admits &= _own_ranges(folder).get(needed, SpecifierSet())
    tags = str(session.run("git", "tag", "--list", f"{needed}-v*", external=True, silent=True)).split()
    released = {Version(tag.removeprefix(f"{needed}-v")): tag for tag in tags}
    admitted = list(admits.filter(released))
    if not admitted:
        session.log(f"No release of {needed} in '{admits}' is tagged here: this checkout's takes its place.")
        return ROOT / "packages" / needed
    tag = released[min(admitted) if core == "lowest" else max(admitted)]
    session.log(f"{needed}: {tag}")
    archive = ROOT / "build" / "releases" / f"{tag}.tar"
    folder = archive.with_suffix("")
    if not folder.exists():
        folder.mkdir(parents=True)
        session.run("git", "archive", f"--output={archive}", tag, f"packages/{needed}", external=True)
        shutil.unpack_archive(archive, folder, filter="data")
    return folder / "packages" / needed


def _install(session: nox.Session, versions: Iterable[str], packages: list[str]) -> None:
    """Install packages with what they need and what tests need."""
    try:
        session.install(*versions, *packages, *_group("test"))
    except nox.command.CommandFailed:
        session.error(f"These versions can't be installed here; pip says why above: {' '.join(versions)}.")


def _install_wheels(session: nox.Session, wheels: list[str], versions: Iterable[str] = ("-c", CONSTRAINTS)) -> None:
    """Install wheels, also where older builds of the same version are."""
    _install(session, versions, wheels)
    session.install("--no-deps", "--force-reinstall", *wheels)


def _wheels(session: nox.Session, projects: Iterable[Path], python: str = "python") -> list[str]:
    """Build the wheels of projects and return their paths."""
    home = WHEELS / session.name
    shutil.rmtree(home, ignore_errors=True)
    for project in projects:
        wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), str(project))
        session.run(python, *wheel, external=python != "python")
    return sorted(map(str, home.glob("*.whl")))

"""Wheels built once per session, and environments in which only some of them are installed."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


class Environment:
    """A virtual environment with the third-party packages of the running one, but without our packages."""

    def __init__(self, home, third_parties):
        venv.create(home, with_pip=False, symlinks=True)
        self.bin = home / ("Scripts" if sys.platform == "win32" else "bin")
        self.python = self.bin / "python"
        out = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site = Path(out.stdout.strip())
        (self.site / "third_parties.pth").write_text(f"{third_parties}\n")

    def install(self, *wheels):
        target = ("--python", str(self.python), "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
        subprocess.run([sys.executable, "-m", "pip", *target, *map(str, wheels)], check=True, timeout=120)

    def run(self, *arguments, check=True, **options):
        # A developer's PYTHONPATH would expose packages that are not installed.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, *arguments],
            check=False,
            capture_output=True,
            text=True,
            **{"env": environment, "timeout": 120, **options},
        )
        assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    def booster(self, *arguments):
        return self.run(self.bin / "booster", *arguments)


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory):
    """Return a function that builds the wheel of a project folder, once per session."""
    home = tmp_path_factory.mktemp("wheels")
    built = {}

    def build(project):
        if project not in built:
            out = home / project.name
            # hatchling is installed already, so no isolated environment needs to download it.
            command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
            subprocess.run([sys.executable, *command], check=True, timeout=120, stdout=subprocess.DEVNULL)
            (built[project],) = out.glob("*.whl")
        return built[project]

    return build


@pytest.fixture(scope="session")
def third_parties(tmp_path_factory):
    """Return a folder of links to all installed packages except ours, whose metadata would reveal them."""
    folder = tmp_path_factory.mktemp("third_parties")
    for site in map(Path, sys.path):
        if site.name in {"site-packages", "dist-packages"}:
            for entry in site.iterdir():
                link = folder / entry.name
                is_ours = "booster" in entry.name
                if not is_ours and entry.suffix != ".pth" and entry.name != "__pycache__" and not link.exists():
                    link.symlink_to(entry, target_is_directory=entry.is_dir())
    return folder


@pytest.fixture(scope="session")
def environment_of(tmp_path_factory, third_parties):
    """Return a function that returns an environment with only some wheels of ours; equal ones are made once."""
    made = {}

    def make(*wheels):
        if wheels not in made:
            made[wheels] = Environment(tmp_path_factory.mktemp("environments") / f"env{len(made)}", third_parties)
            made[wheels].install(*wheels)
        return made[wheels]

    return make


@pytest.fixture(scope="session")
def core_and_ddp(build_wheel):
    names = ("booster-core", "booster-checkpoint", "booster-runtime", "booster-ddp")
    return [build_wheel(ROOT / "packages" / name) for name in names]

"""Release a package of this repository: version, changelog, commit, tag, distributions.

    python tools/release.py booster-zero 0.2.0 [--dry-run]

What in this repository has a range of versions that ends below the new one gets a wider range in the same
commit, and packages a fragment: they are tested with it, and have releases of their own.

The tag is pushed by hand (``git push origin booster-zero-v0.2.0``), and the workflow that it starts publishes that one
package. ``--dry-run`` does all of it in a temporary clone, and shows what would be committed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).parent))

from workspace import PACKAGES, ROOT, read_toml

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "numerics")


class ReleaseError(Exception):
    """A release that was refused before anything was written."""


def run(*command: str, root: Path) -> str:
    """Run a command in the checkout, and return what it prints."""
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    if done.returncode:
        msg = f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}"
        raise ReleaseError(msg)
    return done.stdout


def check(name: str, text: str, root: Path) -> Version:
    """Return the version of a release, after making sure that it can be made.

    Raises:
        ReleaseError: If there is no such package, the version is none or not newer than the last release, the checkout
            has changes, there is nothing to release, or another package of the checkout needs a newer version.
    """
    if name not in PACKAGES:
        msg = f"No package named '{name}'. There are: {', '.join(PACKAGES)}."
        raise ReleaseError(msg)
    try:
        version = Version(text)
    except InvalidVersion:
        msg = f"'{text}' is no version, such as 0.2.0 or 1.0.0rc1."
        raise ReleaseError(msg) from None
    tags = run("git", "tag", "--list", f"{name}-v*", root=root).split()
    newest = max((Version(tag.removeprefix(f"{name}-v")) for tag in tags), default=None)
    if newest is not None and version <= newest:
        msg = f"{name} {newest} is released already; {version} is not newer."
        raise ReleaseError(msg)
    if changes := run("git", "status", "--porcelain", root=root):
        msg = f"The checkout has changes, which a release would mix with its own. Commit them first:\n{changes}"
        raise ReleaseError(msg)
    if not fragments(name, root):
        msg = f"packages/{name}/changelog.d has no fragments, so nothing has changed since the last release."
        raise ReleaseError(msg)
    for manifest, requirement in refusing(name, version, root):
        if not _with_room(requirement, version).specifier.contains(version, prereleases=True):
            msg = f"{manifest.parent.name} declares `{requirement}`, which refuses {version}. Change its range first."
            raise ReleaseError(msg)
    return version


def refusing(name: str, version: Version, root: Path) -> list[tuple[Path, Requirement]]:
    """Return the manifests, of examples too, that refuse a version of a package, and what they require of it."""
    manifests = sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("examples/*/pyproject.toml")])
    return [
        (manifest, requirement)
        for manifest in manifests
        for requirement in map(Requirement, read_toml(manifest)["project"]["dependencies"])
        if requirement.name == name and not requirement.specifier.contains(version, prereleases=True)
    ]


def _with_room(requirement: Requirement, version: Version) -> Requirement:
    """Return a requirement whose range ends above a version: below the next one that may break what uses it."""
    end = f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"
    begins = [str(each) for each in requirement.specifier if not each.operator.startswith("<")]
    return Requirement(f"{requirement.name}{','.join([*begins, f'<{end}'])}")


def admit(name: str, version: Version, root: Path) -> None:
    """Let what refuses a version of a package admit it, and tell it in the changelogs of packages."""
    for manifest, requirement in refusing(name, version, root):
        old, wider = manifest.read_text(encoding="utf-8"), _with_room(requirement, version)
        # as people write it: the lower bound first
        bounds = ",".join(sorted(map(str, wider.specifier), reverse=True))
        new, count = re.subn(rf'"{name}[<>=!~][^"]*"', f'"{name}{bounds}"', old)
        if count != 1:
            msg = f"{manifest} has {count} requirements of {name}, where one was to be changed."
            raise ReleaseError(msg)
        manifest.write_text(new, encoding="utf-8")
        if manifest.parents[1].name == "packages":
            told = f"Works with {name} {version.major}.{version.minor}.\n"
            (manifest.parent / "changelog.d" / f"{name}-{version}.changed.md").write_text(told, encoding="utf-8")


def fragments(name: str, root: Path) -> list[Path]:
    """Return the changelog fragments of a package."""
    folder = root / "packages" / name / "changelog.d"
    return sorted(path for path in folder.glob("*.md") if path.name.split(".")[-2] in KINDS)


def release(name: str, text: str, root: Path) -> Path:
    """Make a release in a checkout, and return the folder with its distributions.

    Raises:
        ReleaseError: If `check` refuses it, or a step fails; a failed step leaves the checkout for you to look at.
    """
    version = check(name, text, root)
    home = root / "packages" / name
    manifest = home / "pyproject.toml"
    old = manifest.read_text(encoding="utf-8")
    new, count = re.subn(r'^version = "[^"]*"$', f'version = "{version}"', old, count=1, flags=re.MULTILINE)
    if not count:
        msg = f'{manifest} has no line `version = "..."`.'
        raise ReleaseError(msg)
    manifest.write_text(new, encoding="utf-8")
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    settings = ("--config", str(root / "tools" / "towncrier.toml"), "--dir", str(home))
    headline = ("--name", name, "--version", str(version), "--date", today, "--yes")
    run(sys.executable, "-m", "towncrier", "build", *settings, *headline, root=root)
    admit(name, version, root)
    run("git", "add", "--all", "packages", "examples", root=root)
    run("git", "commit", "--quiet", "--message", f"Release {name} {version}", root=root)
    out = root / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(home), root=root)
    built = {path.name for path in out.iterdir()}
    stem = f"{name.replace('-', '_')}-{version}"
    if missing := {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"} - built:
        msg = f"The build left no {', '.join(sorted(missing))} in {out}, only {', '.join(sorted(built))}."
        raise ReleaseError(msg)
    run("git", "tag", "--annotate", "--message", f"{name} {version}", f"{name}-v{version}", root=root)
    return out


def dry_run(name: str, text: str) -> None:
    """Make the release in a temporary clone, and print the commit and what was built."""
    with tempfile.TemporaryDirectory(prefix="booster-release-") as folder:
        clone = Path(folder) / "clone"
        run("git", "clone", "--quiet", str(ROOT), str(clone), root=ROOT)
        for key in ("user.name", "user.email"):
            value = run("git", "config", "--default", "release", key, root=ROOT).strip()
            run("git", "config", key, value, root=clone)
        out = release(name, text, clone)
        print(run("git", "show", "--stat", "--format=%D%n%n%s%n", "HEAD", root=clone))
        print((clone / "packages" / name / "CHANGELOG.md").read_text(encoding="utf-8"))
        print("Built:", *sorted(path.name for path in out.iterdir()))


def main() -> None:
    """Read the arguments, and release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the package, such as booster-zero")
    parser.add_argument("version", help="the new version, such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="release in a temporary clone, and show the result")
    asked = parser.parse_args()
    try:
        if asked.dry_run:
            dry_run(asked.name, asked.version)
            return
        release(asked.name, asked.version, ROOT)
    except ReleaseError as error:
        raise SystemExit(str(error)) from None
    tag = f"{asked.name}-v{normal_form(asked.version)}"
    told = f"{asked.name}-{normal_form(asked.version)}.changed.md"
    if widened := [path.parents[1].name for path in sorted(ROOT.glob(f"packages/*/changelog.d/{told}"))]:
        print(f"These admit it now; release them next, so that they can be installed with it: {', '.join(widened)}.")
    print(f"Tagged {tag}. Publish it with `git push origin HEAD {tag}`.")


def normal_form(text: str) -> str:
    """Return a version in its normal form, which tags have."""
    return str(Version(text))


if __name__ == "__main__":
    main()

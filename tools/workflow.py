"""Write the workflows of GitHub Actions from what the repository says of itself: ``python tools/workflow.py``.

A test compares the files with what this script writes. ``ci.yml`` runs, for a change, the tests of the packages that it
touches and of those that depend on them, the tests that belong to no package, and the documentation; each night, the
slow tests by folder, both ends of the declared versions, and the other sessions. ``release.yml`` publishes the package
that a tag names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from workspace import PACKAGES, ROOT

FOLDER = ROOT / ".github" / "workflows"
PYTHON = "3.11"
"""The Python that the pinned versions of constraints.txt are tested with."""
ENDS = {"lowest": "3.10", "newest": "3.13"}
"""The Python of both ends of the declared versions, as in noxfile.py."""
SLOW = (
    "tests/distributed/hybrid",
    "tests/distributed/together tests/distributed/testing",
    "tests/distributed/core tests/distributed/runtime tests/distributed/zero tests/distributed/gemini",
    "tests/distributed/ddp tests/distributed/fsdp tests/checkpoint",
    "tests/device tests/gpu",
    "tests/zoo",
    "tests/families",
    "tests/scripts tests/packaging tests/examples tests/unit",
)
"""Folders of the jobs that share the slow tests."""
NIGHTLY = ("direct", "device", "coverage", "mutation", "minimal_plugin")
MINUTES = 120
"""Time limit of a job, on machines with four cores."""

_HEADER = "# Written by `python tools/workflow.py`; change that script, not this file.\n"

_SETUP = """\
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "{python}"}}
      - run: python -m pip install --constraint constraints.txt nox
"""


def _job(name: str, run: str, *, python: str = PYTHON, when: str = "", needs: str = "", matrix: str = "") -> str:
    """Return a job that runs one command after nox is installed."""
    lines = [f"  {name}:", "    runs-on: ubuntu-latest", f"    timeout-minutes: {MINUTES}"]
    if needs:
        lines.append(f"    needs: {needs}")
    if when:
        lines.append(f"    if: {when}")
    if matrix:
        lines += ["    strategy:", "      fail-fast: false", f"      matrix: {matrix}"]
    return "\n".join([*lines, "    steps:", _SETUP.format(python=python) + f"      - run: {run}\n"])


def ci() -> str:
    """Return the workflow that tests changes and, each night, everything."""
    night = "github.event_name != 'pull_request' && github.event_name != 'push'"
    change = "github.event_name == 'pull_request' || github.event_name == 'push'"
    base = "${{ github.event.pull_request.base.sha || github.event.before }}"
    ends = json.dumps([{"core": core, "python": python} for core, python in ENDS.items()])
    jobs = [
        _job("check", "nox -s lint types"),
        f"""\
  touched:
    runs-on: ubuntu-latest
    timeout-minutes: 10
    if: {change}
    outputs:
      packages: ${{{{ steps.touched.outputs.packages }}}}
    steps:
      - uses: actions/checkout@v4
        with: {{fetch-depth: 0}}
      - uses: actions/setup-python@v5
        with: {{python-version: "{PYTHON}"}}
      - id: touched
        run: echo "packages=$(python tools/touched.py "$BASE")" >> "$GITHUB_OUTPUT"
        env:
          BASE: {base}
""",
        _job(
            "package",
            'nox -s "package(${{ matrix.package }}, core=tree)"',
            needs="touched",
            when="needs.touched.outputs.packages != '[]'",
            matrix='{package: "${{ fromJSON(needs.touched.outputs.packages) }}"}',
        ),
        _job("together", "nox -s together", needs="touched", when="needs.touched.outputs.packages != '[]'"),
        _job("docs", "nox -s docs"),
        _job("slow", "nox -s slow -- ${{ matrix.folders }}", when=night, matrix=f"{{folders: {json.dumps(SLOW)}}}"),
        _job("nightly", "nox -s ${{ matrix.session }}", when=night, matrix=f"{{session: {json.dumps(NIGHTLY)}}}"),
        _job(
            "ends",
            'nox -s "package(${{ matrix.package }}, core=${{ matrix.end.core }})"',
            python="${{ matrix.end.python }}",
            when=night,
            matrix=f"{{package: {json.dumps(PACKAGES)}, end: {ends}}}",
        ),
        _job(
            "minimums",
            'nox -s "minimums(${{ matrix.end.core }})"',
            python="${{ matrix.end.python }}",
            when=night,
            matrix=f"{{end: {ends}}}",
        ),
    ]
    needs = [job.split(":")[0].strip() for job in jobs]
    jobs.append(f"""\
  passed:
    # The one check that a protected branch asks for: a job that was skipped because nothing calls for it is no failure.
    runs-on: ubuntu-latest
    needs: {json.dumps(needs)}
    if: always()
    steps:
      - run: test "$FAILED" = false
        env:
          FAILED: ${{{{ contains(needs.*.result, 'failure') || contains(needs.*.result, 'cancelled') }}}}
""")
    head = """\
name: CI
on:
  push: {branches: [main]}
  pull_request:
  schedule:
    - cron: "17 2 * * *"
  workflow_dispatch:
permissions: {contents: read}
concurrency:
  group: ${{ github.workflow }}-${{ github.event_name }}-${{ github.ref }}
  cancel-in-progress: ${{ github.event_name == 'pull_request' }}
jobs:
"""
    return _HEADER + head + "\n".join(jobs)


def release() -> str:
    """Return the workflow that publishes the package that a tag names, without a password (trusted publishing)."""
    patterns = json.dumps([f"{name}-v*" for name in PACKAGES])
    return f"""\
{_HEADER}name: Release
on:
  push:
    tags: {patterns}
permissions: {{contents: read}}
jobs:
  build:
    runs-on: ubuntu-latest
    timeout-minutes: {MINUTES}
    outputs:
      package: ${{{{ steps.tag.outputs.package }}}}
    steps:
{_SETUP.format(python=PYTHON)}      - id: tag
        run: |
          package="${{GITHUB_REF_NAME%-v*}}"
          grep -qx "version = \\"${{GITHUB_REF_NAME##*-v}}\\"" "packages/$package/pyproject.toml"
          echo "package=$package" >> "$GITHUB_OUTPUT"
      - run: nox -s "package(${{{{ steps.tag.outputs.package }}}}, core=tree)"
      - run: nox -s "build(${{{{ steps.tag.outputs.package }}}})"
      - uses: actions/upload-artifact@v4
        with: {{name: distributions, path: dist/, if-no-files-found: error}}

  publish:
    needs: build
    runs-on: ubuntu-latest
    timeout-minutes: 10
    # Each package is a project of its own at the index, which trusts this workflow and the environment of its name.
    environment: ${{{{ needs.build.outputs.package }}}}
    permissions: {{id-token: write}}
    steps:
      - uses: actions/download-artifact@v4
        with: {{name: distributions, path: dist/}}
      - uses: pypa/gh-action-pypi-publish@release/v1
"""


def workflows() -> dict[str, str]:
    """Return the text of each workflow by the name of its file."""
    return {"ci.yml": ci(), "release.yml": release()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in workflows().items():
        (FOLDER / name).write_text(text, encoding="utf-8")

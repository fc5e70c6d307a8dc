"""Run benchmarks and write the page: ``python benchmarks/_run.py [--smallest] [--into FOLDER] [NAME ...]``.

Without names all run, and ``docs/performance.md`` is written from the results, by `_page`. With names, those results
take the place of the earlier ones of the same benchmarks in ``build/bench``. ``--smallest`` runs each once with the
least work, to see that it works: the page goes into the folder of the results, not into the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import _page
from _results import RESULTS

ROOT = Path(__file__).parents[1]
BENCHMARKS = {path.stem: path for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}
CASES: dict[str, list[list[str]]] = {
    "zero": [[], ["--dtype", "bf16"], ["--stage", "2"], ["--size", "110M"]],
    "gemini": [[], ["--dtype", "bf16"]],
    "tensor_parallel": [["--memory"]],
    "experts": [["--memory"]],
    "gemini_offload": [[], ["--precision", "bf16"]],
}
"""The arguments of each run of a benchmark that has more than its default one."""
SMALLEST = {
    "checkpoint": ["--size", "tiny", "--rounds", "2"],
    "ddp": ["--rounds", "2"],
    "experts": ["--rounds", "2"],
    "fsdp": ["--rounds", "2"],
    "gemini": ["--turns", "2", "--no-memory"],
    "gemini_offload": ["--layers", "12", "--hidden", "256", "--batch", "1", "--steps", "4"],
    "host_time": ["--models", "8 parameters", "--ranks", "2", "4", "--rounds", "2"],
    "import_time": ["--pairs", "2"],
    "other_libraries": ["--rounds", "2"],
    "pipeline": ["--rounds", "2"],
    "ring_attention": ["--tokens", "512", "--heads", "2", "--rounds", "2"],
    "tensor_parallel": ["--hidden", "384", "--dtype", "fp32", "--rounds", "2"],
    "vocabulary_loss": ["--vocabulary", "8192", "--tokens", "1024", "--hidden", "64", "--rounds", "1"],
    "zero": ["--size", "2M", "--turns", "2", "--only", "times"],
}
"""The least work of each benchmark."""


def main() -> int:
    """Run the benchmarks that are asked for; return 1 if one failed to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--smallest", action="store_true", help="the least work of each, and no page in the docs")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "bench", help="the folder of the results")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - BENCHMARKS.keys()):
        parser.error(f"no benchmark named {', '.join(unknown)}. There are: {', '.join(BENCHMARKS)}")
    folder = asked.into / "smallest" if asked.smallest else asked.into
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(_page.describe_machine()), encoding="utf-8")
    failed = []
    for name in asked.names or BENCHMARKS:
        results = folder / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        results.touch()
        environment = {**os.environ, RESULTS: str(results), "OMP_NUM_THREADS": "1"}
        for arguments in [SMALLEST[name]] if asked.smallest else CASES.get(name, [[]]):
            print(f"{name} {' '.join(arguments)}", flush=True)
            command = [sys.executable, str(BENCHMARKS[name]), *arguments]
            done = subprocess.run(command, check=False, env=environment, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own files
            sys.stderr.write(done.stderr)
            # One whose bar is missed exits with 1 as well, after all of its results.
            if done.returncode and ("Traceback" in done.stderr or done.returncode != 1):
                failed.append(name)
    _page.write(_page.read(folder), folder if asked.smallest else ROOT / "docs")
    if failed:
        print(f"Failed: {', '.join(dict.fromkeys(failed))}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

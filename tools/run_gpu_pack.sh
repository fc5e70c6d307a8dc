#!/usr/bin/env bash
# Runs every case on this machine's CUDA devices, without a network, within eight minutes: bash run.sh [NAME ...]
# Needs a python3 with torch, transformers and pip (or $PYTHON). Writes report/report.md and report.json, also
# after each case. Ends with 0 if no case failed, or if there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python="${PYTHON:-python3}"

if [ ! -e venv/ready ]; then
  rm -rf venv
  "$python" -m venv --without-pip venv
  # The packages that python3 sees, also where it is one of a virtual environment itself, which a new one doesn't inherit.
  "$python" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))' \
    >"$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/inherited.pth"
  "$python" -m pip --python venv/bin/python install --quiet --no-index --find-links wheels wheels/booster_*.whl
  touch venv/ready
fi
export PYTHONPATH="$PWD/cases${PYTHONPATH:+:$PYTHONPATH}"
exec venv/bin/python -m device_runs --into report "$@"

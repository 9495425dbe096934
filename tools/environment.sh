#!/usr/bin/env bash
# tools/environment.sh FOLDER LOCK: a virtual environment with what a lock names, each file held against its hash, and this package.
set -euo pipefail
folder=$1 lock=$2
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

# Such a lock has the hashes of both builds of torch, and pip prefers PyPI's, which for Linux wants libraries of CUDA: gigabytes.
torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$lock")
build=$folder/torch_build.txt
: >"$build"
cuda=()
if [ -n "$torch" ]; then
  if pip install --quiet --dry-run --ignore-installed --no-deps "$torch+cpu" 2>/dev/null; then
    echo "$torch+cpu" >"$build"
  else
    cuda=(-r requirements-cuda.lock)
  fi
fi
pip install --quiet --require-hashes --only-binary :all: --no-deps -c "$build" -r "$lock" "${cuda[@]}"

# Without isolation, which would fetch a hatchling that no lock names.
pip install --quiet --no-deps --no-build-isolation --editable .
if [ -n "$torch" ]; then pip check; fi

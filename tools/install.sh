#!/usr/bin/env bash
# tools/install.sh GROUP FOLDER: install one group of packages, each file checked against its hash.
# A group is a section of locks/trainpace.lock, or a lock file of its own (lowest, fms).
# main, lowest and pythons become a virtual environment with Trainpace in it. Any other group becomes
# a folder for PYTHONPATH, so that .venv stays what Trainpace is tested with.
set -euo pipefail
group=$1 folder=$2
locks=$(dirname "$0")/../locks
mkdir -p "$folder"
pins() { # GROUP: its part of the locks
  if [ -f "$locks/$1.lock" ]; then cat "$locks/$1.lock"; else
    awk -v head="# == $1:" 'index($0, "# == ") == 1 { on = index($0, head) == 1 } on' "$locks/trainpace.lock"
  fi
}
wanted=$folder/pins.txt
pins "$group" >"$wanted"

case $group in
main | lowest | pythons)
  "${PYTHON:-python3}" -m venv "$folder"
  pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
  # pip prefers PyPI's build of torch, which needs gigabytes of CUDA libraries on Linux.
  torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$wanted")
  build=$folder/torch_build.txt
  : >"$build"
  if [ -n "$torch" ]; then
    if pip install --quiet --dry-run --ignore-installed --no-deps "$torch+cpu" 2>/dev/null; then
      echo "$torch+cpu" >"$build"
    else
      pins cuda >>"$wanted"
    fi
  fi
  pip install --quiet --require-hashes --only-binary :all: --no-deps -c "$build" -r "$wanted"
  # An isolated build would fetch a hatchling that no lock names.
  pip install --quiet --no-deps --no-build-isolation --editable .
  if [ -n "$torch" ]; then pip check; fi
  ;;
*)
  # deepspeed and antlr4 have no wheels: they are built by the setuptools of .venv, without C++ operators.
  DS_ACCELERATOR=cpu DS_BUILD_OPS=0 .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --require-hashes --no-deps --no-build-isolation --upgrade --target "$folder" -r "$wanted"
  ;;
esac

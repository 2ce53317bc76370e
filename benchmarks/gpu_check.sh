#!/usr/bin/env bash
# Everything of ours that runs on a GPU, tested against the CPU and timed there, in under four minutes.
# Needs torch, numpy, scipy, grpcio and protobuf, and nothing else. Exit code 77: there is no GPU here. PYTHON=… chooses
# the interpreter; --device cpu runs the parameter server over loopback alone, without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec timeout 240 "$PYTHON" benchmarks/gpu_check.py "$@"

#!/usr/bin/env bash
# The test command: makes its own environment, then runs every CPU test (unit, protocol, end to end).
# Arguments go to pytest, e.g.: bash scripts/test.sh tests/sandbox -k timeout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare_environment
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cpu
exec "$PYTHON" -m pytest "$@"

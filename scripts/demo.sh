#!/usr/bin/env bash
# The demo: cold start, joint RL of the three agents on real C++ kernels, held-out evaluation before and after, report.
# Needs no GPU. Run it again after an interruption and it goes on where it stopped. Flags go to scripts/train.py, e.g.
#   bash scripts/demo.sh --workdir=runs/demo_seed1 --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare_environment
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cpu
exec "$PYTHON" scripts/train.py --config=configs/demo.py --workdir=runs/demo --mode=all "$@"

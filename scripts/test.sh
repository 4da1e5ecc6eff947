#!/usr/bin/env bash
# The test command: makes its own environment, then runs every CPU test (unit, protocol, end to end).
# Arguments go to pytest, e.g.: bash scripts/test.sh tests/sandbox -k timeout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare_environment
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cpu
[ $# -eq 0 ] || exec "$PYTHON" -m pytest "$@"

# The learner's tests keep one core busy and the sandbox's often wait, so they run at the same time. Then the red team has the
# machine to itself: what its judge measures counts.
logs="$(mktemp -d)"
learner=""
trap '[ -z "$learner" ] || { kill -INT "$learner"; wait "$learner" || true; }; rm -rf "$logs"' EXIT
trap 'exit 130' INT TERM
status=0
set -m # so that the background process hears an interrupt
"$PYTHON" -m pytest tests/dk_jax tests/end_to_end >"$logs/learner" 2>&1 &
learner=$!
set +m
printf '== all but dk_jax, end_to_end and redteam; the first two run beside it\n'
"$PYTHON" -m pytest --ignore=tests/dk_jax --ignore=tests/end_to_end --ignore=tests/redteam 2>&1 | tee "$logs/sandbox" || status=1
wait "$learner" || status=1
learner=""
printf '== dk_jax and end_to_end\n'
cat "$logs/learner"
printf '== redteam\n'
"$PYTHON" -m pytest tests/redteam 2>&1 | tee "$logs/redteam" || status=1
if [ "$status" -ne 0 ]; then
  printf '== failed\n'
  grep -hE '^(FAILED|ERROR) ' "$logs"/* || true
fi
printf '== dk_jax and end_to_end: %s\n== redteam: %s\n== the others: %s\n' \
  "$(tail -n 1 "$logs/learner")" "$(tail -n 1 "$logs/redteam")" "$(tail -n 1 "$logs/sandbox")"
exit "$status"

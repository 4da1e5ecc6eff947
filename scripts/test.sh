#!/usr/bin/env bash
# The test command: makes its own environment, then runs every CPU test (unit, protocol, end to end).
# Arguments go to pytest, e.g.: bash scripts/test.sh tests/sandbox -k timeout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare_environment
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cpu
[ $# -eq 0 ] || exec "$PYTHON" -m pytest "$@"

# Two shares of about the same length run at the same time: the learner's tests, which keep one core busy, and those of the sandbox,
# which often wait. Then those have the machine to themselves that measure it: the red team's judge, and the tests of what keeps a
# clock calm.
beside=(tests/dk_jax)
for file in tests/end_to_end/test_*.py; do
  case "$file" in
  */test_distributed.py | */test_reproduce.py | */test_environment.py) ;; # whose processes are waited for most of the time
  *) beside+=("$file") ;;
  esac
done
alone=(tests/redteam tests/sandbox/test_steady.py tests/sandbox/test_yardstick.py)
logs="$(mktemp -d)"
first=""
trap '[ -z "$first" ] || { kill -INT "$first"; wait "$first" || true; }; rm -rf "$logs"' EXIT
trap 'exit 130' INT TERM
status=0
set -m # so that the background process hears an interrupt
"$PYTHON" -m pytest "${beside[@]}" >"$logs/first" 2>&1 &
first=$!
set +m
printf '== second share; the first, with the learner, runs beside it\n'
"$PYTHON" -m pytest "${beside[@]/#/--ignore=}" "${alone[@]/#/--ignore=}" 2>&1 | tee "$logs/second" || status=1
wait "$first" || status=1
first=""
printf '== first share: the learner, and end to end what trains in one process\n'
cat "$logs/first"
printf '== alone: the red team, and what keeps a clock calm\n'
"$PYTHON" -m pytest "${alone[@]}" 2>&1 | tee "$logs/alone" || status=1
if [ "$status" -ne 0 ]; then
  printf '== failed\n'
  grep -hE '^(FAILED|ERROR) ' "$logs"/* || true
fi
printf '== first share: %s\n== second share: %s\n== alone: %s\n' \
  "$(tail -n 1 "$logs/first")" "$(tail -n 1 "$logs/second")" "$(tail -n 1 "$logs/alone")"
exit "$status"

# Sourced by demo.sh and test.sh: makes .venv from requirements.txt once, and again whenever requirements.txt changes.
# Leaves PYTHON pointing at the environment's interpreter. DK_VENV names another folder for it.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${DK_VENV:-$root/.venv}"
PYTHON="$venv/bin/python"

fail() { printf 'error: %s\n' "$1" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in "${DK_PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 &&
       "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"; return 0
    fi
  done
  return 1
}

# Makes the environment with the newest pip, which resolves several times faster than the one that comes with an older Python;
# where it can't be had, with that one. $1 is the Python to base it on.
make_venv() {
  "$PYTHON" -m pip --version >/dev/null 2>&1 && return
  "$1" -m venv --without-pip "$venv" &&
    "$1" -m pip --python "$PYTHON" install --quiet --disable-pip-version-check --no-compile pip >/dev/null 2>&1 ||
    "$1" -m venv "$venv"
}

# Byte code only for what is imported: a quarter of the packages' modules, on two cores. Processes that start later, and are
# told to write none, find it there.
compile_imports() {
  (
    export PYTHONPATH="$root" PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu
    trap 'kill $(jobs -p); trap - INT; kill -INT $BASHPID' INT TERM # what a script starts in the background hears no Ctrl-C
    "$PYTHON" -c "import sandbox.server, sandbox.oracle.worker, sandbox.jail.runner" &
    "$PYTHON" -c "import dk_jax.train.run"
    wait
  ) >/dev/null 2>&1 || true
}

prepare_environment() {
  local wanted have base
  command -v g++ >/dev/null 2>&1 ||
    fail "g++ was not found. The sandbox compiles C++ kernels with it: install it (Debian/Ubuntu: apt-get install g++) and run this again."
  wanted="$(sha256sum "$root/requirements.txt" | cut -d' ' -f1)"
  have="$(cat "$venv/.requirements.sha256" 2>/dev/null || true)"
  if [ "$wanted" != "$have" ]; then
    base="$(find_python)" || fail "Python 3.11 or newer was not found. Install it, or name it: DK_PYTHON=/path/to/python3 bash $0"
    printf '== environment: %s -> %s\n' "$("$base" --version)" "$venv"
    make_venv "$base" ||
      fail "could not create a virtual environment in $venv (Debian/Ubuntu: apt-get install python3-venv; or the disk is full: df -h)."
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile -r "$root/requirements.txt" \
      2> >(grep -v '^WARNING: Location' >&2) ||
      fail "pip could not install requirements.txt (see above; is the network up and the disk not full?)."
    compile_imports
    printf '%s\n' "$wanted" > "$venv/.requirements.sha256"
  fi
}

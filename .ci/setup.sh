#!/usr/bin/env bash
# Makes .venv in the checkout and installs requirements/cpu.lock and the project (editable) into it.
# A second call finds the stamp and returns at once. Nothing outside .venv is touched, except for
# Debian packages that a bare machine lacks (as root, through apt).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly ROOT=$PWD
readonly VENV=$ROOT/.venv
readonly STAMP=$VENV/.midflight-installed
readonly LOCK=requirements/cpu.lock
readonly PIP_VERSION=26.3
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# What .venv was made of, and where: after a move its scripts hold stale paths.
fingerprint() { printf '%s %s\n' "$(cat "$LOCK" pyproject.toml .ci/setup.sh | sha256sum | cut -c1-64)" "$ROOT"; }

is_current() { [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$1" ]]; }

# debian_package NAME REASON: installs it with apt as root, else says what to do.
debian_package() {
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    die "$2. Install it (Debian: apt-get install $1) and run this again."
  fi
  say "$2: installing the Debian package $1"
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1"; } >"$VENV/apt.log" 2>&1; then
    tail -n 5 "$VENV/apt.log" >&2
    die "apt-get install $1 failed (see $VENV/apt.log)"
  fi
}

find_python() {
  local candidate
  for candidate in python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "Python 3.11 not found: put python3.11 on the PATH (Debian 12: apt-get install python3.11-venv)."
}

debian_libraries() {
  local python=$1
  "$python" -c 'import ensurepip' 2>/dev/null ||
    debian_package python3.11-venv "this Python 3.11 can't make virtual environments"
  # A few pure or small packages are published as source only; one of them is C.
  command -v gcc >/dev/null || debian_package gcc "a C compiler is missing"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    debian_package python3.11-dev "the Python headers are missing"
  "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    debian_package libnuma1 "vLLM's CPU kernels need libnuma.so.1"
}

pip_install() { "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-input --no-deps "$@"; }

# torch +cpu first, alone: PyTorch's own index is asked only for it, and only where no other has it.
install_torch() {
  local torch
  torch=$(grep -E '^torch==' "$LOCK")
  if pip_install "$torch" 2>"$VENV/torch.log"; then return; fi
  say "$torch is not on the configured package indexes: asking $TORCH_CPU_INDEX"
  if ! pip_install --extra-index-url "$TORCH_CPU_INDEX" "$torch" 2>"$VENV/torch.log"; then
    cat "$VENV/torch.log" >&2
    die "$torch can't be had, neither from the configured indexes nor from $TORCH_CPU_INDEX"
  fi
}

# transformers imports these if it sees them; built for another torch, they break that import.
remove_misfits() {
  local name
  for name in torchvision torchaudio torchcodec; do
    [[ -n $(compgen -G "$VENV/lib/python3.11/site-packages/$name-*.dist-info") ]] || continue
    if ! "$VENV/bin/python" -c "import $name" >/dev/null 2>&1; then
      say "removing $name: it does not fit the installed torch"
      "$VENV/bin/python" -m pip uninstall -qq -y "$name"
    fi
  done
}

make_venv() {
  local python=$1
  # Only what was once complete, and here, is brought up to date in place.
  if [[ -f $STAMP && $(cut -d' ' -f2- "$STAMP") == "$ROOT" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
    return
  fi
  "$python" -m venv --clear "$VENV"
}

main() {
  local wanted python started=$SECONDS
  wanted=$(fingerprint)
  if is_current "$wanted"; then return; fi
  exec 9<pyproject.toml # two calls at once: the second waits and finds the work done
  flock 9
  if is_current "$wanted"; then return; fi
  [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] ||
    die "$LOCK is for Linux on x86-64, this is $(uname -s) on $(uname -m); see requirements/README.md"
  python=$(find_python)
  mkdir -p "$VENV"
  debian_libraries "$python"
  say "bringing .venv to the $(grep -c '==' "$LOCK") packages of $LOCK (about two minutes if it is new)"
  make_venv "$python"
  rm -f "$STAMP"
  pip_install "pip==$PIP_VERSION"
  install_torch
  pip_install -r "$LOCK"
  pip_install --no-build-isolation -e .
  remove_misfits
  "$VENV/bin/python" -c 'import torch, transformers, prefect, ray' 2>"$VENV/import.log" ||
    { tail -n 5 "$VENV/import.log" >&2; die "installed, but the packages don't import"; }
  printf '%s\n' "$wanted" >"$STAMP"
  say "done in $((SECONDS - started)) s"
}

main "$@"

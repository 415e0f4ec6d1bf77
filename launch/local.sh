#!/usr/bin/env bash
# One node, any number of devices: launch/local.sh NPROC [override...]
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/local.sh NPROC [override...]

One training measurement on this node, one process per device:
  torchrun --standalone --nproc_per_node=NPROC -m scaling.train [override...]

  launch/local.sh 8 model=gpt2 precision=bf16 batch.accumulation_steps=4
  launch/local.sh 1 strategy=single
  launch/local.sh 1 --help        groups, keys and their defaults

torchrun is the one in .venv of this checkout, else the one on PATH.
TEXT
}

die() {
    echo "launch/local.sh: error: $1" >&2
    exit 2
}

case "${1-}" in
    -h | --help) usage && exit 0 ;;
    "") die "how many processes? launch/local.sh NPROC [override...]" ;;
esac
[[ $1 =~ ^[1-9][0-9]*$ ]] || die "NPROC=$1: not a number of processes; launch/local.sh NPROC [override...]"
nproc=$1
shift

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
if [[ -x $root/.venv/bin/torchrun ]]; then
    PATH=$root/.venv/bin:$PATH # DeepSpeed looks for ninja there, too
else
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # scaling may not be installed beside that torchrun
    command -v torchrun >/dev/null || die "no torchrun in $root/.venv and none on PATH; make setup installs it"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # each rank sets its own `threads`; torchrun need not say so
exec torchrun --standalone --nproc_per_node="$nproc" -m scaling.train "$@"

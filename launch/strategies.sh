#!/usr/bin/env bash
# The same training with every strategy, and the report: launch/strategies.sh NPROC [override...]
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/strategies.sh NPROC [override...]

Measures one model with ddp, fsdp, zero1, zero2 and zero3 on NPROC devices of this node, with accumulation 4, and
prints what each costs: throughput beside ddp's, bytes and reductions per step, memory by purpose. The records are kept
in runs/strategies-<time>. Overrides go to every run, but strategy, output_dir and run_dir are chosen here:

  launch/strategies.sh 8 model=gpt2_medium precision=bf16
  launch/strategies.sh 2 model=gpt_tiny measure.max_seconds=20
TEXT
}

die() {
    echo "launch/strategies.sh: error: $1" >&2
    exit 2
}

case "${1-}" in
    -h | --help) usage && exit 0 ;;
    "") die "how many processes? launch/strategies.sh NPROC [override...]" ;;
esac
[[ $1 =~ ^[1-9][0-9]*$ ]] || die "NPROC=$1: not a number of processes; launch/strategies.sh NPROC [override...]"
nproc=$1
shift

for word in "$@"; do
    case $word in
        strategy=* | output_dir=* | run_dir=*) die "$word: this script chooses it; leave it out" ;;
    esac
done

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
if [[ -x $root/.venv/bin/python3 ]]; then
    PATH=$root/.venv/bin:$PATH
else
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
fi

folder=runs/strategies-$(date +%Y%m%d-%H%M%S)
mkdir -p runs
mkdir "$folder" # fails rather than write into another's
trap 'printf "\ninterrupted; records so far: %s\n" "$PWD/$folder" >&2; exit 130' INT

strategies=(ddp fsdp zero1 zero2 zero3)
run=0
failed=0
for strategy in "${strategies[@]}"; do
    run=$((run + 1))
    printf '\n[%d of %d] %s\n' "$run" "${#strategies[@]}" "$strategy"
    "$root/launch/local.sh" "$nproc" strategy="$strategy" batch.accumulation_steps=4 output_dir="$folder" "$@" ||
        failed=$((failed + 1))
done

printf '\n'
python3 -m scaling.report "$folder" || failed=$((failed + 1))
if ((failed)); then
    printf '\n%d of the steps above failed\n' "$failed" >&2
fi
printf '\nrecords: %s\n' "$PWD/$folder"
exit $((failed > 0))

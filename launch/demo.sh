#!/usr/bin/env bash
# gpt_tiny as `single` and as DDP on 1 and 2 ranks, accumulation 1 and 4, and the report: launch/demo.sh [override...]
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/demo.sh [override...]

Measures a small GPT-2 on text, on two cores of this host: without a wrapper, and as DDP on one and two ranks, each with
accumulation 1 and 4. Six runs, about three minutes; then the report. The records are kept in runs/demo-<time>.
Overrides go to every run: launch/demo.sh measure.max_seconds=60
TEXT
}

case "${1-}" in
    -h | --help) usage && exit 0 ;;
esac

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
export OMP_NUM_THREADS=1 # what each rank sets itself; the same for every run, and torchrun need not say so
if [[ -x $root/.venv/bin/python3 ]]; then
    PATH=$root/.venv/bin:$PATH
else
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
fi

folder=runs/demo-$(date +%Y%m%d-%H%M%S)
mkdir -p runs
mkdir "$folder" # fails rather than write into another demo's
trap 'printf "\ninterrupted; records so far: %s\n" "$PWD/$folder" >&2; exit 130' INT

run=0
failed=0
for accumulation in 1 4; do
    for arm in "1 single" "1 ddp" "2 ddp"; do
        read -r ranks strategy <<<"$arm"
        run=$((run + 1))
        printf '\n[%d of 6] %s on %d rank(s), accumulation %d\n' "$run" "$strategy" "$ranks" "$accumulation"
        "$root/launch/local.sh" "$ranks" model=gpt_tiny data=text strategy="$strategy" device=cpu \
            batch.accumulation_steps="$accumulation" measure.max_seconds=15 output_dir="$folder" "$@" ||
            failed=$((failed + 1))
    done
done

printf '\n'
python3 -m scaling.report "$folder" || failed=$((failed + 1))
if ((failed)); then
    printf '\n%d of the steps above failed\n' "$failed" >&2
fi
printf '\nrecords: %s\n' "$PWD/$folder"
exit $((failed > 0))

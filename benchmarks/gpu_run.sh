#!/usr/bin/env bash
# Probe a GPU, test on it, train real models on it, and pack all that was found.
#
#   benchmarks/gpu_run.sh NAME OUT [SECONDS] [PART...]
#
# NAME is what the profile is called, OUT the folder for results, SECONDS what all of it may take
# (540). Parts: probe tests accuracy; all of them by default. A part that was
# finished before is not run again: work is kept in .gpu-work (WORK=), which is first filled from the
# archive that an earlier run left there. With TARGET=cpu the same parts run on a machine without a GPU.
set -u
name=$1 out=$2 seconds=${3:-540}
shift $(($# < 3 ? $# : 3))
parts=${*:-probe tests accuracy}
target=${TARGET:-cuda} work=${WORK:-.gpu-work} python=${PYTHON:-python3}
end=$(($(date +%s) + seconds))
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out" "$work"
out=$(cd "$out" && pwd) work=$(cd "$work" && pwd)
# An archive carried from an earlier run is older than nothing that is here.
if [ -f "$work/work.tar.gz" ] && [ ! -f "$work/records.jsonl" ]; then
    tar -xzf "$work/work.tar.gz" -C "$work"
fi
export ESTIMATOR_HOME=$work/home PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
profile=$work/$name.json

left() { echo $((end - $(date +%s))); }

pack() {
    tar -czf "$out/work.tar.gz" -C "$work" --exclude=work.tar.gz --exclude=home . 2>/dev/null
    cp -f "$profile" "$out/" 2>/dev/null
    cp -f "$work"/*.log "$out/" 2>/dev/null
    return 0
}

# run PART LEAST MOST COMMAND...: within what is left, at most MOST seconds; once it succeeded, never
# again. What it printed is kept, and a failure costs this part only.
run() {
    local part=$1 least=$2 most=$3 limit code
    shift 3
    case " $parts " in *" $part "*) ;; *) return 0 ;; esac
    [ -f "$work/$part.done" ] && { echo "== $part: done before"; return 0; }
    limit=$(($(left) - 15))
    [ "$limit" -lt "$least" ] && { echo "== $part: no time left ($limit s)"; return 0; }
    [ "$limit" -gt "$most" ] && limit=$most
    echo "== $part (at most $limit s)"
    LIMIT=$limit timeout --kill-after=10 "$limit" "$@" >"$work/$part.log" 2>&1
    code=$?
    tail -n 12 "$work/$part.log"
    echo "== $part ended with $code, $(left) s left"
    [ "$code" -eq 0 ] && touch "$work/$part.done"
    pack
}

accuracy() {
    "$python" "$root/benchmarks/gpu_accuracy.py" --work "$work" --profile "$profile" \
        --target "$target" --seconds $((LIMIT - 20)) "$@"
}
probe() {
    "$python" -m estimator.cli.main probe --name "$name" --out "$profile" --budget "${BUDGET:-60}" \
        ${DEVICES:+--devices "$DEVICES"}
}
tests() { (cd "$root" && "$python" -m pytest -q -W default -p no:cacheprovider tests/gpu); }
export -f accuracy probe tests
export name profile work target root python

run probe 60 150 bash -c probe
run tests 30 120 bash -c tests
run accuracy 60 600 bash -c accuracy
pack
ls -l "$out"

#!/usr/bin/env bash
# Builds and runs the suites. The budgets of the default ones add up to about seven minutes; a second run skips the
# rows that are there and goes on with those that did not fit.
#
#   bench/gpu.sh [SUITE...]          default: codec overhead frontier batch; tests take six minutes of their own,
#                                    holds and mlp four, alloc ten; untuned (frontier's other models) FRONTIER_S
#
# OUT     folder for the JSON files; default bench/results
# FRONTIER_S  seconds for the frontier, by default 270; 480 where it has a call to itself
# PYTHON  interpreter that has torch with CUDA; default python3
# BEFORE  the earlier tree of the suite pairs, built; PYACTCOMP_BENCH_BEFORE its commit, where it has no .git
# PYACTCOMP_BENCH_COMMIT  the commit, where the copy has no .git folder
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results}
frontier_s=${FRONTIER_S:-270}
suites=${*:-codec overhead frontier batch}
export PYTHONUNBUFFERED=1
mkdir -p "$out"
# Earlier rows travel along, so that a second run skips them and adds to them.
[ "$out" -ef bench/results ] || cp bench/results/*.json "$out" 2>/dev/null

"$python" -m pip install -q --no-build-isolation --no-deps -e . || exit 1

failed=0
for suite in $suites; do
    case $suite in
        # pytest-benchmark, where it is installed, ends a run of several workers with a warning.
        tests)
            timeout 400 "$python" -m pytest -q -m "gpu and not alone" -n 9 -p no:benchmark tests || failed=1
            timeout 180 "$python" -m pytest -q -m "gpu and alone" -p no:benchmark tests || failed=1
            ;;
        codec) timeout 90 "$python" -m bench codec --budget-s 45 --out "$out" || failed=1 ;;
        overhead) timeout 40 "$python" -m bench overhead --budget-s 20 --out "$out" || failed=1 ;;
        mlp) timeout 300 "$python" -m bench mlp --budget-s 240 --out "$out" || failed=1 ;;
        frontier) timeout "$((frontier_s + 60))" "$python" -m bench frontier --set tuned --budget-s "$frontier_s" --out "$out" || failed=1 ;;
        untuned) timeout "$((frontier_s + 60))" "$python" -m bench frontier --set untuned --budget-s "$frontier_s" --out "$out" || failed=1 ;;
        batch) timeout 100 "$python" -m bench batch --budget-s 60 --out "$out" || failed=1 ;;
        holds) timeout 300 "$python" -m bench holds --budget-s 240 --out "$out" || failed=1 ;;
        pairs) timeout 590 "$python" -m bench pairs --before "${BEFORE:?the earlier tree}" --budget-s 540 --out "$out" || failed=1 ;;
        alloc) timeout 580 "$python" -m bench alloc --budget-s 540 --out "$out" || failed=1 ;;
        *) echo "unknown suite '$suite'; known: tests codec overhead mlp frontier untuned batch holds alloc pairs" >&2; exit 2 ;;
    esac
done
exit "$failed"

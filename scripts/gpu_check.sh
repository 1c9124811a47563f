#!/usr/bin/env bash
# The benchmarks of the moment and the GPU tests, in one call, with short tables.
#
#   scripts/gpu_check.sh [tests|bench|all]
#
# Runs from source with whatever python3 has torch. Pure-Python packages that it lacks are looked for in .peers/. Build
# times are those of empty compile caches: every benchmark gets new ones.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.:.peers" PYTHONUNBUFFERED=1
what="${1:-all}"
logs="${OUT:-$(mktemp -d)}"
status=0

if [ "$what" != tests ]; then
    for bench in models prefill llm provenance; do
        export TORCHINDUCTOR_CACHE_DIR="$(mktemp -d)" TRITON_CACHE_DIR="$(mktemp -d)"
        timeout 300 python3 "benchmarks/$bench.py" >"$logs/$bench.log" 2>&1 || status=1
        grep -vE "^\s*$|[Ww]arn" "$logs/$bench.log" | tail -14
    done
fi
if [ "$what" != bench ]; then
    timeout 550 python3 -m pytest tests/gpu -m gpu -n "${WORKERS:-$(nproc)}" -p no:cacheprovider -o filterwarnings=default \
        --tb=short --show-capture=no >"$logs/tests.log" 2>&1 || status=1
    grep -E "^(E  |FAILED|ERROR|[0-9]+ (passed|failed))" "$logs/tests.log" | cut -c1-220 | tail -60
fi
echo "status $status, logs in $logs"
exit $status

#!/usr/bin/env bash
# The GPU tests and the benchmarks of the moment, in one call, with a short table last.
#
#   scripts/gpu_check.sh [tests|bench|all]
#
# Runs from source with whatever python3 has torch. Pure-Python packages that it lacks are looked for in .peers/.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.${PEERS:+:$PEERS}:.peers" PYTHONUNBUFFERED=1
what="${1:-all}"
logs="${OUT:-$(mktemp -d)}"
status=0

if [ "$what" != bench ]; then
    python3 -m pytest tests/gpu -m gpu -n "${WORKERS:-6}" -p no:cacheprovider --tb=short --show-capture=no -o filterwarnings=default >"$logs/tests.log" 2>&1 || status=1
    grep -E "^(E  |FAILED|ERROR|[0-9]+ (passed|failed))" "$logs/tests.log" | cut -c1-220 | tail -60
fi
if [ "$what" != tests ]; then
    python3 benchmarks/prefill.py -o "$logs/prefill.json" >"$logs/prefill.log" 2>&1 || status=1
    grep -vE "^\s*$|Warning|warn" "$logs/prefill.log" | tail -14
fi
echo "status $status, logs in $logs"
exit $status

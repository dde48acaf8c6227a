#!/usr/bin/env bash
# The whole suite in two pytest runs, the fast tests first; the last line sums them up.
# Arguments go to both, e.g. `.ci/test.sh -k snapshot`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
status=0

# A part in which the arguments selected no test (pytest's 5) is not a failure; no test at all is.
run_part() {
  local name=$1 selection=$2 code=0
  shift 2
  printf '\n== %s tests ==\n' "$name"
  .venv/bin/python -m pytest -m "$selection" --junitxml="$reports/$name.xml" "$@" || code=$?
  if [[ $code -ne 0 && $code -ne 5 ]]; then status=$code; fi
}

run_part fast "not system and not benchmark" "$@"
run_part system "system" "$@"

.venv/bin/python - "$reports" "$status" <<'PYTHON' || status=1
import sys
from pathlib import Path
from xml.etree import ElementTree

suites = [s for path in Path(sys.argv[1]).glob("*.xml") for s in ElementTree.parse(path).getroot().iter("testsuite")]
total, failures, errors, skipped = (
    sum(int(suite.get(key)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
)
failed = failures + errors
passed = total - failed - skipped
print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0 or passed == 0)
PYTHON
exit "$status"

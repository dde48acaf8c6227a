#!/usr/bin/env bash
# The whole suite in two pytest runs, the fast tests first; the last line sums them up.
# The fast ones run on two workers, a file on one of them; the others keep two cores busy by themselves.
# Arguments go to both, e.g. `.ci/test.sh -k snapshot`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The browser that presses Retry in Prefect's UI.
if ! command -v chromium >/dev/null; then
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "test: chromium is missing (Debian: apt-get install chromium); the browser test will fail" >&2
  else
    echo "test: installing the Debian package chromium" >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
  fi
fi

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
status=0

# A part in which the arguments selected no test (pytest's 5) is not a failure; no test at all is.
run_part() {
  local name=$1 selection=$2 workers=$3 code=0
  shift 3
  printf '\n== %s tests ==\n' "$name"
  .venv/bin/python -m pytest -n "$workers" --dist loadfile -m "$selection" --junitxml="$reports/$name.xml" "$@" || code=$?
  if [[ $code -ne 0 && $code -ne 5 ]]; then status=$code; fi
}

run_part fast "not system and not benchmark" 2 "$@"
run_part system "system" 0 "$@"

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

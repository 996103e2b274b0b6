#!/usr/bin/env bash
# The demonstration: a Ray of its own on this machine, `ray job submit` of jobs/pretrain.py, and what came of it.
# Called by `make demo` with the virtual environment's programs first in PATH. Run again, it continues the run or says
# that it is complete.
set -euo pipefail
cd "$(dirname "$0")/.."

export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}" # loopback only; a cluster on a network wants `token`
STATE=$(mktemp -d /tmp/raydz-demo.XXXXXX)
# Free ports outside the range that Ray gives to its workers (10002 to 19999), so that another Ray is not in the way.
read -r PORT DASHBOARD_PORT CLIENT_PORT AGENT_PORT < <(
  python - <<'PY'
import random, socket

free = []
while len(free) < 4:
    port = random.randrange(21000, 32000)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) and port not in free:
            free.append(port)
print(*free)
PY
)
DASHBOARD="http://127.0.0.1:$DASHBOARD_PORT"

# `ray stop` would end every Ray on the machine; this one has a session (in the kernel's sense) of its own.
setsid ray start --head --block --node-ip-address=127.0.0.1 --port="$PORT" --dashboard-host=127.0.0.1 \
  --dashboard-port="$DASHBOARD_PORT" --ray-client-server-port="$CLIENT_PORT" \
  --dashboard-agent-listen-port="$AGENT_PORT" --num-cpus=4 --object-store-memory=300000000 --temp-dir="$STATE" \
  > "$STATE/start.log" 2>&1 &
SESSION=$!

cleanup() {
  pkill -TERM -s "$SESSION" 2> /dev/null || true
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    pgrep -s "$SESSION" > /dev/null || break
    sleep 0.5
  done
  pkill -KILL -s "$SESSION" 2> /dev/null || true
  rm -rf "$STATE"
}
trap cleanup EXIT

echo "starting Ray (dashboard $DASHBOARD)"
python - "$DASHBOARD" <<'PY' || { cat "$STATE/start.log" >&2; exit 1; }
import sys, time, urllib.request

for _ in range(240):
    try:
        urllib.request.urlopen(f"{sys.argv[1]}/api/version", timeout=5).read()
        break
    except OSError:
        time.sleep(0.5)
else:
    sys.exit("Ray did not start within two minutes")
PY

# Runs go to ./runs, not into the job's temporary copy of this folder.
ray job submit --address "$DASHBOARD" --working-dir . \
  --runtime-env-json "{\"env_vars\": {\"RAYDZ_ROOT\": \"$PWD\", \"RAY_AUTH_MODE\": \"$RAY_AUTH_MODE\"}}" \
  -- python jobs/pretrain.py "$@"

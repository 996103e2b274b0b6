#!/usr/bin/env bash
# The demonstration: a Ray of its own on this machine, `ray job submit` of jobs/pretrain.py, and what came of it.
# Called by `make demo` with the virtual environment's programs first in PATH. Runs again: it continues, or says that
# the run is complete.
set -euo pipefail
cd "$(dirname "$0")/.."

export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}" # loopback only; a cluster on a network wants `token`
# Free ports outside the range that Ray gives to its workers (10002 to 19999), so that another Ray is not in the way.
read -r PORT DASHBOARD_PORT CLIENT_PORT AGENT_PORT < <(python - <<'PY'
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
STATE=$(mktemp -d /tmp/raydz-demo.XXXXXX)

cleanup() {
  # `ray stop` would end every Ray on the machine; this one's processes carry its session folder in their arguments.
  pkill -TERM -f -- "$STATE" 2>/dev/null || true
  sleep 2
  pkill -KILL -f -- "$STATE" 2>/dev/null || true
  rm -rf "$STATE"
}
trap cleanup EXIT

echo "starting Ray on 127.0.0.1:$PORT (dashboard http://127.0.0.1:$DASHBOARD_PORT)"
ray start --head --node-ip-address=127.0.0.1 --port="$PORT" --dashboard-host=127.0.0.1 \
  --dashboard-port="$DASHBOARD_PORT" --ray-client-server-port="$CLIENT_PORT" --dashboard-agent-listen-port="$AGENT_PORT" --num-cpus=4 \
  --object-store-memory=300000000 --temp-dir="$STATE" --disable-usage-stats >"$STATE/start.log" 2>&1 ||
  { cat "$STATE/start.log" >&2; exit 1; }

# Runs go to ./runs, not into the job's temporary copy of this folder.
ray job submit --address "http://127.0.0.1:$DASHBOARD_PORT" --working-dir . \
  --runtime-env-json "{\"env_vars\": {\"RAYDZ_ROOT\": \"$PWD\", \"RAY_AUTH_MODE\": \"$RAY_AUTH_MODE\"}}" \
  -- python jobs/pretrain.py "$@"

#!/usr/bin/env bash
# Several real Ray nodes on one machine: a head and two workers, to see placement, `ray job submit` and lost nodes.
# `AUTOSCALE=1 make cluster` starts the head alone; cluster/local.yaml says what nodes come as runs ask for them.
# Called by `make cluster` and `make cluster-stop`. Ports and the temporary folder are its own, and it stops by the
# process ids that it wrote down, never by `ray stop`, which would end every Ray of this user.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
STATE="$HERE/runs/.cluster"   # pids, one `pid name` a line; address; temp (the folder of Ray's files)
AUTOSCALE="${AUTOSCALE:-}"    # anything: nodes come and go by themselves
WORKERS="${WORKERS:-2}"
if [ -n "$AUTOSCALE" ]; then WORKERS=0; fi
CPUS="${CPUS:-1}"             # logical CPUs a node: 1 puts two training workers on two nodes
LIMIT_S="${LIMIT_S:-60}"

export PATH="$HERE/.venv/bin:$PATH" RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}" # loopback only; a cluster on a network wants `token`
unset RAY_ADDRESS             # it would make `ray start` join another cluster

is_ours() { # after a reboot a recorded id may be another program's
    tr '\0' ' ' 2> /dev/null < "/proc/$1/cmdline" | grep -qF -- "--temp-dir=$(cat "$STATE/temp")"
}

recorded() { # process ids of our nodes that still run, workers before the head
    local pid
    [ -e "$STATE/pids" ] || return 0
    for pid in $(awk '{print $1}' "$STATE/pids" | tac); do
        if is_ours "$pid"; then echo "$pid"; fi
    done
}

free_ports() {
    python - "$1" <<'PY'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PY
}

start_node() { # name, CPUs, then flags of `ray start`; --block keeps one parent process a node, in its own session
    local name="$1" cpus="$2"
    shift 2
    read -r listen grpc <<< "$(free_ports 2)"
    setsid ray start "$@" --block --node-ip-address=127.0.0.1 --num-cpus="$cpus" --object-store-memory=200000000 \
        --dashboard-agent-listen-port="$listen" --dashboard-agent-grpc-port="$grpc" --temp-dir="$TEMP" \
        --min-worker-port=0 --max-worker-port=0 --disable-usage-stats > "$STATE/$name.log" 2>&1 < /dev/null &
    echo "$! $name" >> "$STATE/pids"
}

alive_nodes() { # how many nodes the head knows to be alive
    python - "$1" 2> /dev/null <<'PY' || echo 0
import json, sys, urllib.request
with urllib.request.urlopen(f"{sys.argv[1]}/nodes?view=summary", timeout=5) as answer:
    nodes = json.load(answer)["data"]["summary"]
print(sum(node["raylet"].get("state") == "ALIVE" for node in nodes))
PY
}

wait_for() { # number of nodes, address of the dashboard
    local deadline=$((SECONDS + LIMIT_S))
    until [ "$(alive_nodes "$2")" -ge "$1" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "only $(alive_nodes "$2") of $1 nodes came up within $LIMIT_S s; their output is in $STATE/*.log" >&2
            stop
            exit 1
        fi
        sleep 0.5
    done
}

start() {
    if [ -n "$(recorded)" ]; then
        echo "a cluster runs already at $(cat "$STATE/address"); stop it with: make cluster-stop" >&2
        exit 1
    fi
    rm -rf "$STATE"
    mkdir -p "$STATE"
    TEMP="$(mktemp -d /tmp/raydz-XXXX)" # short: Ray makes sockets in it, whose paths may have 107 bytes
    echo "$TEMP" > "$STATE/temp"
    read -r gcs dashboard client <<< "$(free_ports 3)"
    echo "http://127.0.0.1:$dashboard" > "$STATE/address"
    local head=(--head --port="$gcs" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard"
        --ray-client-server-port="$client")
    if [ -n "$AUTOSCALE" ]; then
        start_autoscaling "$gcs" "${head[@]}"
    else
        start_node head "$CPUS" "${head[@]}"
    fi
    wait_for 1 "http://127.0.0.1:$dashboard"
    for ((i = 1; i <= WORKERS; i++)); do
        # one log monitor a machine, or each line of a worker is printed once a node
        start_node "worker$i" "$CPUS" --address="127.0.0.1:$gcs" --include-log-monitor=false
    done
    wait_for $((WORKERS + 1)) "http://127.0.0.1:$dashboard"
    describe "$dashboard" "$gcs"
}

start_autoscaling() { # port of the control store, then flags of `ray start`
    local gcs="$1" id
    shift
    id="$(awk '/head_node_id:/ {print $2}' "$HERE/cluster/local.yaml")"
    sed "s/127.0.0.1:PORT/127.0.0.1:$gcs/" "$HERE/cluster/local.yaml" > "$STATE/local.yaml"
    RAY_FAKE_CLUSTER=1 RAY_enable_autoscaler_v2=1 RAY_CLOUD_INSTANCE_ID="$id" RAY_OVERRIDE_NODE_ID_FOR_TESTING="$id" \
        AUTOSCALER_UPDATE_INTERVAL_S=1 start_node head 0 "$@" --autoscaling-config="$STATE/local.yaml"
}

describe() {
    local what="$((WORKERS + 1)) nodes of $CPUS CPU" lose=""
    if [ -n "$AUTOSCALE" ]; then what="a head that adds nodes and lets them go (cluster/local.yaml)"; fi
    if [ "$WORKERS" -gt 0 ]; then # worker1 with all its processes
        lose="  lose a node:  kill -9 -- -$(awk '$2 == "worker1" {print $1}' "$STATE/pids")"$'\n'
    fi
    cat <<EOF
Ray with $what; dashboard http://127.0.0.1:$1
  submit:       RAY_AUTH_MODE=$RAY_AUTH_MODE $HERE/.venv/bin/raydz submit --address http://127.0.0.1:$1 \\
                    --env RAYDZ_ROOT=$HERE --wait -- python jobs/pretrain.py
  look:         RAY_ADDRESS=127.0.0.1:$2 $HERE/.venv/bin/ray status
$lose  stop:         make cluster-stop
EOF
}

stop() {
    [ -e "$STATE/pids" ] || { echo "no cluster of this checkout is running"; return; }
    local pids deadline
    pids="$(recorded)"
    for pid in $pids; do kill -TERM "$pid"; done
    deadline=$((SECONDS + 15))
    for pid in $pids; do
        while is_ours "$pid" && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
        kill -KILL -- "-$pid" 2> /dev/null || true # the rest of the node's session, if there is any
    done
    # nodes that the autoscaler started are in sessions of their own
    for pid in $(grep -alF -- "$(cat "$STATE/temp")/" /proc/[0-9]*/cmdline 2> /dev/null | cut -d/ -f3); do
        [ "$pid" = "$$" ] || kill -KILL "$pid" 2> /dev/null || true
    done
    rm -rf "$(cat "$STATE/temp")" "$STATE"
    echo "stopped"
}

case "${1:-}" in
    start) start ;;
    stop) stop ;;
    *) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac

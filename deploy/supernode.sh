#!/bin/sh
# Starts one SuperNode with the data of its client, or clients, and nothing else.
#   deploy/supernode.sh SUPERLINK CA KEY DATA [PORT [OPTION ...]]
# SUPERLINK is host:port, CA the authority's certificate (ca.crt), KEY the private key that
# `python deploy/credentials.py node` made, DATA the client's folder from `flower-graph partition`.
# PORT (9094 unless given) is for this machine alone: the SuperNode talks to its ClientApp there.
# OPTIONs go to flower-supernode, for example --max-retries 10. NODE_CONFIG in the environment has
# more of the node's config, for example 'identity-key="/etc/fl/node" registry="/etc/fl/reg.json"'.
set -eu
usage="usage: deploy/supernode.sh SUPERLINK CA KEY DATA [PORT [OPTION ...]]"
superlink=${1:?$usage} ca=${2:?$usage} key=${3:?$usage}
data=$(cd "${4:?$usage}" && pwd)
port=${5:-9094}
shift "$(($# < 5 ? $# : 5))"
python "$(dirname "$0")/credentials.py" check "$ca" "$key"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 OMP_WAIT_POLICY=passive
# How often it looks whether a message has come that a ClientApp must answer, in seconds.
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL="${FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.2}"
exec flower-supernode --superlink "$superlink" --root-certificates "$ca" \
	--auth-supernode-private-key "$key" --port "$port" \
	--node-config "data-folder=\"$data\" ${NODE_CONFIG:-}" "$@"

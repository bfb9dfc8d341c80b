#!/bin/sh
# Starts the SuperLink: TLS, and only SuperNodes whose public key is registered.
#   deploy/superlink.sh CREDENTIALS [HOST] [PORT]
# CREDENTIALS is the folder that `python deploy/credentials.py server` made. HOST is the address
# to listen on (0.0.0.0 for all), PORT is 8000 unless given. Registered keys last as long as the
# process, unless SUPERLINK_DATABASE names a file.
set -eu
folder=${1:?usage: deploy/superlink.sh CREDENTIALS [HOST] [PORT]}
python "$(dirname "$0")/credentials.py" check \
	"$folder/ca.crt" "$folder/server.crt" "$folder/server.key"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 OMP_WAIT_POLICY=passive
# How often the SuperLink looks for work to start, in seconds; Flower's own setting is 1.
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL="${FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.2}"
# The app's packages are those installed here: nothing is downloaded when a run starts.
exec flower-superlink --host "${2:-0.0.0.0}" --port "${3:-8000}" \
	--ssl-ca-certfile "$folder/ca.crt" \
	--ssl-certfile "$folder/server.crt" \
	--ssl-keyfile "$folder/server.key" \
	--enable-supernode-auth \
	--disable-runtime-dependency-installation \
	${SUPERLINK_DATABASE:+--database "$SUPERLINK_DATABASE"}

#!/bin/sh
# QoS of a RoCE v2 interface: DSCP decides the priority, collectives (priority 3) and KV cache (priority 1) are lossless,
# and collectives are guaranteed 99 % next to the cache. It prints the commands; --apply runs them.
#
#   roce.sh DEV            the commands
#   roce.sh --apply DEV    run them (root)
#   roce.sh --show DEV     the current configuration, for: penstock nic check --qos -
#
# The switches need the same: see README.md.
set -eu

usage() {
	sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
	exit 2
}

# Penstock's marks (qos.Default): change both sides or neither.
kv_dscp=${KV_DSCP:-8}
kv_prio=${KV_PRIO:-1}
collective_dscp=${COLLECTIVE_DSCP:-26}
collective_prio=${COLLECTIVE_PRIO:-3}

mode=print
case "${1:-}" in
--apply) mode=apply && shift ;;
--show) mode=show && shift ;;
-*) usage ;;
esac
[ $# -eq 1 ] || usage
dev=$1

if [ "$mode" = show ]; then
	dcb -N ets show dev "$dev"
	dcb -N pfc show dev "$dev"
	exec dcb -N app show dev "$dev"
fi

run() {
	echo "$*"
	if [ "$mode" = apply ]; then "$@"; fi
}

# A mapping of all eight, with the two lanes' own values: all DEFAULT KEY:VALUE KEY:VALUE.
all() {
	default=$1
	shift
	for i in 0 1 2 3 4 5 6 7; do
		value=$default
		for own in "$@"; do
			[ "${own%%:*}" = "$i" ] && value=${own#*:}
		done
		printf '%s:%s ' "$i" "$value"
	done
}

# Which DSCP goes where; the first entry also makes the NIC trust DSCP instead of VLAN tags (mlx5).
run dcb app replace dev "$dev" dscp-prio "$kv_dscp:$kv_prio" "$collective_dscp:$collective_prio"

# A traffic class for each priority, and shares: 1 % for the cache, 1 % for all that is unmarked, 98 % for collectives.
# They are guaranteed shares; idle bandwidth goes to the class that has packets.
# shellcheck disable=SC2046 # words on purpose
run dcb ets set dev "$dev" \
	prio-tc $(all 0 "$kv_prio:$kv_prio" "$collective_prio:$collective_prio") \
	tc-tsa $(all ets) \
	tc-bw $(all 0 "0:1" "$kv_prio:1" "$collective_prio:98")

# Both lanes are lossless independently: a pause for the cache does not stop collectives.
# shellcheck disable=SC2046
run dcb pfc set dev "$dev" prio-pfc $(all off "$kv_prio:on" "$collective_prio:on")

#!/bin/sh
# QoS of a TCP interface, on the sending side: KV cache (DSCP 8) has what others leave, and 1 % when they leave nothing.
# It prints the commands; --apply runs them, --remove removes the configuration.
#
#   tc.sh DEV RATE             the commands; RATE is the interface's, as tc writes it: 25gbit
#   tc.sh --apply DEV RATE     run them (root)
#   tc.sh --remove DEV         back to the system's default
set -eu

usage() {
	sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
	exit 2
}

# Penstock's mark (qos.Default), as the TOS byte: DSCP times 4.
kv_tos=${KV_TOS:-0x20}

mode=print
case "${1:-}" in
--apply) mode=apply && shift ;;
--remove)
	[ $# -eq 2 ] || usage
	exec tc qdisc del dev "$2" root
	;;
-*) usage ;;
esac
[ $# -eq 2 ] || usage
dev=$1 rate=$2

number=${rate%%[!0-9]*}
unit=${rate#"$number"}
case "$number-$unit" in
[1-9]*-kbit | [1-9]*-mbit | [1-9]*-gbit) ;;
*)
	echo "tc.sh: $rate is no rate: write 25gbit, 100mbit" >&2
	exit 2
	;;
esac
# A hundredth, in the next smaller unit: 25gbit is 25000mbit is 250mbit times a hundred.
smaller() {
	case "$unit" in
	gbit) echo "$(($1 * number * 10))mbit" ;;
	mbit) echo "$(($1 * number * 10))kbit" ;;
	kbit) echo "$(($1 * number * 10))bit" ;;
	esac
}

run() {
	echo "$*"
	if [ "$mode" = apply ]; then "$@"; fi
}

# All traffic is in class 10, except the traffic that the filters send to 20. Each class may use the whole rate while the other is idle;
# the remaining bandwidth goes first to the class with the smaller prio.
if [ "$mode" = apply ]; then tc qdisc del dev "$dev" root 2>/dev/null || true; fi
run tc qdisc add dev "$dev" root handle 1: htb default 10
run tc class add dev "$dev" parent 1: classid 1:1 htb rate "$rate" quantum 60000
run tc class add dev "$dev" parent 1:1 classid 1:10 htb rate "$(smaller 99)" ceil "$rate" prio 0 quantum 60000
run tc class add dev "$dev" parent 1:1 classid 1:20 htb rate "$(smaller 1)" ceil "$rate" prio 7 quantum 9000
# The mask 0xfc leaves the two bits of ECN out.
run tc filter add dev "$dev" parent 1: protocol ip prio 1 u32 match ip tos "$kv_tos" 0xfc flowid 1:20
run tc filter add dev "$dev" parent 1: protocol ipv6 prio 2 u32 match ip6 priority "$kv_tos" 0xfc flowid 1:20

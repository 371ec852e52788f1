#!/bin/sh
# Process 1 of the lab's guest. ttyS0 carries output, ttyS1 the report (lines "name value"), ttyS2 a tar of /out.
/lab/busybox --install -s /lab
export PATH=/bin:/usr/bin:/lab HOME=/root TMPDIR=/tmp CI=true TERM=dumb
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t devpts pts /dev/pts
for t in 0 1 2; do stty -F /dev/ttyS$t raw -echo; done

complaints='BUG:|WARNING:|Oops|general protection|soft lockup|hung_task|blocked for more|refcount_t'
report() { echo "$*" >/dev/ttyS1; }
# off VERB TEXT… tells the lab how it ended and switches the machine off.
off() {
	report "$@"
	# The kernel's complaints about itself: to the report, and what surrounds the first of them to the output.
	dmesg >/run/dmesg
	if grep -E "$complaints" /run/dmesg >/run/complaints; then
		head -10 /run/complaints | while read -r line; do report complaint "$line"; done
		sed -nE "/$complaints/,\$p" /run/dmesg | head -80
	fi
	report end
	tar -C /out -cf /dev/ttyS2 .
	sync
	poweroff -f
}
must() { "$@" || off broken "setup failed: $*"; }

while read -r m; do must insmod /lab/modules/"$m"; done </lab/modules/order
ip link set lo up

# cable N: the pair pNa–pNb with the addresses 10.88.N.1 and .2, an rxe device on each end. MTU 4200 makes room for RoCE's
# 4096 and its headers. Neighbours are written down: an end does not answer for an address that is local to the machine.
cable() {
	a=p$1a b=p$1b
	must ip link add $a mtu 4200 type veth peer name $b mtu 4200
	for side in "$a 10.88.$1.1 $b 10.88.$1.2" "$b 10.88.$1.2 $a 10.88.$1.1"; do
		set -- $1 $side
		sysctl -qw net.ipv4.conf.$2.accept_local=1 net.ipv4.conf.$2.rp_filter=0 net.ipv6.conf.$2.addr_gen_mode=1
		must ip addr add $3/24 dev $2
		must ip link set $2 up
	done
	for side in "$a 10.88.$1.1 $b 10.88.$1.2" "$b 10.88.$1.2 $a 10.88.$1.1"; do
		set -- $1 $side
		must ip neigh replace $5 lladdr "$(cat /sys/class/net/$4/address)" dev $2 nud permanent
		# To the far end by the cable; what comes in by it is ours.
		must ip route replace $5 dev $2 src $3 table 1$1
		must ip rule add pref 10 from $3 to $5 table 1$1
		must ip rule add pref 5 iif $2 lookup local
	done
}
sysctl -qw net.ipv4.conf.all.rp_filter=0
cable 0
cable 1
ip rule add pref 20 lookup local
ip rule del pref 0
i=0
for dev in p0a p0b p1a p1b; do
	must rdma link add rxe$i type rxe netdev $dev
	i=$((i + 1))
done
[ -e /dev/infiniband/uverbs0 ] || off broken "setup failed: no /dev/infiniband/uverbs0"

. /lab/env
code=0
while read -r command; do
	echo "==> $command"
	began=$(cut -d' ' -f1 /proc/uptime)
	(cd /tmp && exec sh -c "$command") </dev/null
	code=$?
	echo "==> exit $code, $(cut -d' ' -f1 /proc/uptime | awk -v b="$began" '{printf "%.1f s", $1-b}')"
	[ $code = 0 ] || break
done </lab/commands
off exit $code

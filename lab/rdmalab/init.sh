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

# Each line is a module's file, followed by the module's parameters.
while read -r m; do must insmod /lab/modules/$m; done </lab/modules/order
ip link set lo up

# The setup of the equipment: rdma.sh or disks.sh.
. /lab/setup

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

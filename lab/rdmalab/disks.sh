# Part of init: wait for the emulated NVMe drives, and check the device mapper's control node.

drive() { [ -b /dev/nvme$1n1 ] || { sleep 0.2 && [ -b /dev/nvme$1n1 ]; }; }
i=0
while [ $i -lt "$(cat /lab/drives)" ]; do
	tries=0
	until drive $i; do
		tries=$((tries + 1))
		[ $tries -lt 150 ] || off broken "setup failed: no /dev/nvme${i}n1 after 30 s"
	done
	i=$((i + 1))
done
[ -e /dev/mapper/control ] || off broken "setup failed: no /dev/mapper/control"
# The guest has no udev, so dmsetup makes the nodes in /dev/mapper.
export DM_DISABLE_UDEV=1

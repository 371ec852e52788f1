// Package topotest writes sysfs trees from descriptions, so that tests can read hosts other than
// the machine of the test. The trees have the links of real sysfs trees, but only the files that
// package topo reads.
//
// A description is a line for each device; '#' begins a comment:
//
//	gpu  at=15/15:01.0/16:00.0/17:01.0/1b:00.0 numa=0
//	rdma mlx5_0 at=15/15:01.0/16:00.0/17:00.0/18:00.0 numa=0 rate="400 Gb/sec (4X NDR)" gid=0,fe80::1
//	net  eth0 at=00/00:03.0 speed=25000
//	bond bond0 members=eth0,eth1 mode=802.3ad hash=layer2
//	link eth0 lower-of bond0
//	module nvidia_peermem
//	file class/net/eth0/mtu 9000
//	symlink class/net/eth0 ../../devices/virtual/net/eth0
//	directory module/ib_core
//	gone class/infiniband/mlx5_0/ports/1/rate
//
// at is the path from the host bridge to the device, without the domain 0000. See the fields of
// device for the settings and their defaults.
package topotest

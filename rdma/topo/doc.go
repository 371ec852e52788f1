// Package topo lists the NICs and GPUs of a host and assigns NICs to GPUs. It reads sysfs. The
// names of GPUs come from the driver's library (rdma/topo/gpus), if it is installed.
//
// It opens no device, changes no setting and moves no data. Providers use it to choose NICs, and
// `penstock nic list` prints the reason of each choice.
//
//	        /sys/class/infiniband/*   /sys/class/net/*   /sys/bus/pci/devices/*
//	                      │                 │                   │
//	                   NIC, port         NIC (TCP)             GPU
//	                      └────────┬────────┘                   │
//	                   the path of each below its host bridge   │
//	                               └──────────── pairs ─────────┘
//	                                               │
//	pci0000:15 ─ 15:01.0 ─ 16:00.0 ┬ 17:00.0 ─ 18:00.0 mlx5_0   role cnic: shares the
//	 root         root      switch └ 17:01.0 ─ 1b:00.0 gpu0     switch 16:00.0 with gpu0
//	 complex      port
//
// The distance of two devices is the first of these that applies:
//
//	switch   their paths share a bridge: bytes do not pass the CPU
//	root     they share the host bridge only
//	numa     they are attached to the same NUMA node
//	far      none of these: bytes cross the link between the sockets
//
// Roles, in DualPath's terms (section 3): a CNIC is a GPU's own NIC on the compute network, an
// SNIC is on the storage network. If the two cannot be distinguished, a NIC is shared and serves
// both. NIC.Reason explains the role; roles.go has the rules in their order.
//
// If a file is missing, or the kernel does not permit to read it (the speed of an interface that
// is down), its value is unknown. An unknown value is never an error, because a host without RDMA
// is valid.
//
// There are no locks and no goroutines: Read returns a value.
package topo

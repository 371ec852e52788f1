// Package topo says what NICs and GPUs a host has, and which belong together.
// It reads sysfs; what a GPU is called comes from the driver's library
// (rdma/topo/gpus), where there is one.
//
// It opens no device, changes no setting and moves no byte: a provider asks it
// which NIC to open, a person asks it why that one.
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
// How far two devices are from each other is the first of these that holds:
//
//	switch   their paths share a bridge: bytes turn around below the CPU
//	root     they share the host bridge only
//	numa     they hang on the same NUMA node
//	far      neither: bytes cross the link between the sockets
//
// Roles, in DualPath's words (section 3): a CNIC is a GPU's own NIC on the
// compute network, an SNIC reaches the storage network. Where nothing tells the
// two apart, a NIC is shared and serves both. Role, Reason says why: see
// roles.go for the rules, in their order.
//
// A file that is not there, or that the kernel refuses to read (the speed of an
// interface that is down), is a value that is not known, never an error: a host
// without RDMA is a host without RDMA.
//
// There are no locks and no goroutines: Read returns a value.
package topo

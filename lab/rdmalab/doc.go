// Command rdmalab runs programs in a virtual machine of their own, with devices
// that this machine lacks: soft-RoCE NICs (rdma_rxe) over veth pairs, or NVMe
// drives under a device mapper that fails, delays and records writes. A container
// cannot load the drivers into its host's kernel, and machines with the hardware
// are rare. QEMU and Debian's packages are available everywhere.
//
//	make test-rdma     tests over the NICs
//	make bench-verbs   bench rdma, for docs/benchmarks.md
//	make test-disks    power cuts and faults of drives, on ext4 and xfs
//	rdmalab -bin bin/verbs.test -- 'verbs.test -test.v' 'ib_write_bw …'
//	rdmalab -equipment disks -drive 2G -- 'mkfs.xfs /dev/nvme0n1'
//
//	 this machine                                 the guest (QEMU, KVM if there is, no network outside)
//	 ────────────                                 ─────────────────────────────────────────────────────
//	 packages: apt-get download, unpack into
//	        a cache; nothing is installed
//	 image: vmlinuz of linux-image-amd64
//	        initramfs = busybox, modules in the   init: insmod, then by equipment
//	        order of modules.dep, programs with     rdma:  cables, addresses, rdma link add
//	        their shared libraries, init                   p0a ═══ p0b      p1a ═══ p1b
//	                                                       rxe0    rxe1     rxe2    rxe3
//	 qemu  ── kernel, initramfs ─────────────►      disks: /dev/nvme0n1 …, one a -drive; dmsetup, mkfs
//	 stdout ◄── ttyS0 ─── output ─────────────    each command under sh -c, until one fails
//	 report ◄── ttyS1 ─── exit code, dmesg ───
//	 -out   ◄── ttyS2 ─── tar of /out ────────    then the machine is switched off
//
// The packages and all their dependencies are downloaded once, into the user's cache directory
// (-cache names another). QEMU, depmod and the guest's programs run with the libraries of that
// cache. The lab installs nothing on this machine and needs no root. Delete the cache directory to
// fetch newer packages.
//
// The exit code is that of the command that failed, or 0. The exit code is 125, with a line that
// names the cause, if something is missing, the guest does not boot, its kernel reports a BUG, a
// WARNING or a lockup, or -timeout has passed.
//
// All four NICs are in one network namespace, because rdma_rxe of Linux 6.1 supports
// only one. Traffic between them must use the veth pairs and not the loopback device.
// Therefore routes to the remote ends come before the table of local addresses, and
// only packets that arrive on a veth device are looked up in that table.
//
// rdmalab tests nothing itself; the programs that it runs do. It does not simulate the speed of
// hardware: rxe and the drives run on CPUs.
//
// There is no lock.
package main

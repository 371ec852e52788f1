// Command rdmalab runs programs in a new virtual machine (the guest) with devices that this machine
// lacks: soft-RoCE NICs (rdma_rxe) over veth pairs, or NVMe drives under a device mapper that
// fails, delays and records writes. A container cannot load the drivers into its host's kernel, and
// machines with the hardware are rare. QEMU and Debian's packages are available everywhere.
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
// (-cache names another). QEMU, depmod and the guest's programs run with the libraries in the cache
// directory. The lab installs nothing on this machine and needs no root. Delete the cache directory
// to fetch newer packages.
//
// The exit code is the exit code of the command that failed, or 0. It is 125, with a line that
// names the cause, if the lab itself fails: a package or program is missing, the guest does not
// boot, its kernel reports a BUG, a WARNING or a lockup, or -timeout has passed.
//
// All four NICs are in one network namespace, because rdma_rxe of Linux 6.1 supports only one.
// Traffic between the NICs must use the veth pairs and not the loopback device. Therefore the
// routes to the remote ends are looked up before the table of local addresses, and that table is
// used only for packets that arrive on a veth device.
//
// rdmalab contains no tests; it runs test programs. It does not simulate the speed of hardware,
// because CPUs emulate rxe and the drives.
//
// There is no lock.
package main

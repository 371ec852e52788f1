// Command rdmalab runs programs in a virtual machine of their own, with devices
// that this machine lacks: soft-RoCE NICs (rdma_rxe) over pairs of virtual
// cables, or NVMe drives under a device mapper that fails, delays and records
// what is written. A container has no kernel of its own to load such drivers
// into, and machines with the hardware are rare; QEMU and Debian's packages are
// everywhere.
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
// The packages are downloaded with all that they depend on, once, into the
// user's cache directory (-cache names another). QEMU, depmod and the guest's
// programs run with the libraries of that cache. This machine is not changed, and the lab
// needs no root. Delete the cache directory to fetch newer packages.
//
// The exit code is that of the command that failed, or 0. Anything that is
// missing, a guest that does not come up, a kernel that complains of itself
// (BUG, WARNING, a lockup) and the end of -timeout are failures of their own
// kind: exit code 125, and a line that says what happened.
//
// All four NICs live in one network namespace, because rdma_rxe of Linux 6.1
// knows no other. So that traffic between them takes the cables and not the
// loopback device, routes to the far ends stand before the table of local
// addresses, and only what comes in by a cable is looked up in that table.
//
// It is no test: what is asserted is in the programs that it is given. It
// simulates no hardware's speed: rxe and the drives are computed on CPUs.
//
// Lock order: there is no lock.
package main

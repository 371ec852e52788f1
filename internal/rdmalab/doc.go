// Command rdmalab runs programs in a virtual machine that has RDMA devices:
// soft-RoCE (rdma_rxe) over pairs of virtual cables. A container has no kernel
// of its own to load such a driver into, and a machine with RDMA cards is not
// to be had everywhere; QEMU and Debian's packages are.
//
//	make test-rdma     tests
//	make bench-verbs   bench rdma, for docs/benchmarks.md
//	rdmalab -bin bin/verbs.test -- 'verbs.test -test.v' 'ib_write_bw …'
//
//	 this machine                                 the guest (QEMU, KVM if there is, no network outside)
//	 ────────────                                 ─────────────────────────────────────────────────────
//	 packages: apt-get download, unpack into
//	        a cache; nothing is installed
//	 image: vmlinuz of linux-image-amd64
//	        initramfs = busybox, modules in the
//	        order of modules.dep, programs with   init: insmod, cables, addresses, rdma link add
//	        their shared libraries, init                  p0a ═══ p0b      p1a ═══ p1b
//	 qemu  ── kernel, initramfs ─────────────►            rxe0    rxe1     rxe2    rxe3
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
// All four devices live in one network namespace, because rdma_rxe of Linux 6.1
// knows no other. So that traffic between them takes the cables and not the
// loopback device, routes to the far ends stand before the table of local
// addresses, and only what comes in by a cable is looked up in that table.
//
// It is no test: what is asserted is in the programs that it is given. It
// simulates no hardware's speed: rxe computes everything on the guest's CPUs.
//
// Lock order: there is no lock.
package main

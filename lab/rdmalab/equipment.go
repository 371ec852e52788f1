package main

import (
	_ "embed"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// equipment is a set of devices of a guest (in addition to CPUs, memory and serial lines), with the
// software for these devices.
type equipment struct {
	modules  []string // kernel modules in the order of loading, each with its parameters
	programs []string
	setup    []byte // the part of init that sets up the devices
	files    func(*archive, root) error
}

//go:embed rdma.sh
var rdmaSetup []byte

//go:embed disks.sh
var disksSetup []byte

// equipments holds the values of -equipment. The guest uses bash, because busybox's shell
// runs busybox's ip, which has no policy routing.
var equipments = map[string]equipment{
	// rdma_rxe looks up crc32_generic by name when rdma_rxe runs, so modules.dep does not list
	// crc32_generic.
	"rdma": {
		modules:  []string{"crc32_generic", "veth", "ib_uverbs", "rdma_rxe"},
		programs: []string{"ip", "rdma", "ib_write_bw"},
		setup:    rdmaSetup,
		files:    addProviders,
	},
	// brd provides RAM disks for replayed logs and snapshots. ext4 and xfs look up crc32c by name
	// when they run, so modules.dep does not list its module.
	"disks": {
		modules: []string{"crc32c_generic", "nvme", "ext4", "xfs", "dm_mod", "dm_flakey", "dm_delay", "dm_log_writes", "dm_snapshot",
			"brd rd_nr=4 rd_size=655360"},
		programs: []string{"dmsetup", "mkfs.ext4", "mkfs.xfs", "blkdiscard", "dd"},
		setup:    disksSetup,
	},
}

// add adds the equipment's setup and files.
func (e equipment) add(a *archive, r root, o options) error {
	if err := a.file("/lab/setup", 0o644, e.setup); err != nil {
		return err
	}
	if err := a.file("/lab/drives", 0o644, []byte(strconv.Itoa(len(o.Drives))+"\n")); err != nil {
		return err
	}
	if e.files == nil {
		return nil
	}
	return e.files(a, r)
}

// addProviders adds libibverbs' driver for rxe. libibverbs loads the driver when it runs,
// so no program is linked to it.
func addProviders(a *archive, r root) error {
	found, err := filepath.Glob(r.file("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so"))
	if err != nil || len(found) == 0 {
		return fmt.Errorf("no driver of libibverbs for rxe (package ibverbs-providers) in %s: %v", r, err)
	}
	for _, lib := range found {
		if err := addLinked(a, r, lib, strings.TrimPrefix(lib, string(r))); err != nil {
			return err
		}
	}
	return addFiles(a, []string{r.file("/etc/libibverbs.d/rxe.driver") + ":/etc/libibverbs.d/rxe.driver"})
}

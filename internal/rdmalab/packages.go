package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// needed are the Debian packages of the lab, each with a file that shows that
// it is there.
var needed = []struct{ pkg, file string }{
	{"linux-image-amd64", "/lib/modules/*/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"},
	{"qemu-system-x86", "/usr/bin/qemu-system-x86_64"},
	{"busybox-static", "/bin/busybox"},
	{"iproute2", "/usr/bin/rdma"},
	{"ibverbs-providers", "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so"},
	{"perftest", "/usr/bin/ib_write_bw"},
	{"libibverbs-dev", "/usr/include/infiniband/verbs.h"}, // to build what runs there
}

// missing returns the packages whose file is not there.
func missing() []string {
	var out []string
	for _, n := range needed {
		if found, _ := filepath.Glob(n.file); len(found) == 0 {
			out = append(out, n.pkg)
		}
	}
	return out
}

// ensurePackages installs what is missing.
func ensurePackages(ctx context.Context, forbidden bool) error {
	lacks := missing()
	if len(lacks) == 0 {
		return nil
	}
	if forbidden {
		return fmt.Errorf("missing packages: apt-get install %s", strings.Join(lacks, " "))
	}
	fmt.Println("rdmalab: installing", strings.Join(lacks, " "))
	install := append([]string{"install", "-qy", "--no-install-recommends"}, lacks...)
	for _, args := range [][]string{{"update", "-q"}, install} {
		if err := aptGet(ctx, args); err != nil {
			return fmt.Errorf("packages %s are missing and could not be installed: apt-get %s: %w", strings.Join(lacks, " "), args[0], err)
		}
	}
	if lacks := missing(); len(lacks) != 0 {
		return fmt.Errorf("packages %s are installed but their files are not where Debian 12 and 13 have them", strings.Join(lacks, " "))
	}
	return nil
}

func aptGet(ctx context.Context, args []string) error {
	argv := append([]string{"apt-get"}, args...)
	if os.Geteuid() != 0 {
		argv = append([]string{"sudo", "-n"}, argv...)
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

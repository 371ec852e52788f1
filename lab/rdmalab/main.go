package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// exitLab is the exit code if the lab failed and not a command.
const exitLab = 125

// driveSize matches a drive's size: a number of MiB or GiB.
var driveSize = regexp.MustCompile(`^[1-9][0-9]*[MG]$`)

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// options are the command's flags.
type options struct {
	// Bins are programs of this machine, by path or by name in PATH; in the guest they are
	// /bin/NAME. Files are copies, each "HOST:GUEST".
	Bins, Files list
	// Equipment is the value of -equipment. Modules are additional kernel modules.
	Equipment equipment
	Modules   list
	// Drives are the sizes of the emulated NVMe drives. The drives are empty at the start.
	Drives list
	// Env has "NAME=value" for the commands.
	Env list
	// Out is the directory that receives the files that the commands leave in /out.
	Out       string
	Timeout   time.Duration
	MemoryMiB int
	CPUs      int
	Accel     string
	// Cache is the directory of the downloaded packages; empty means the user's cache directory.
	Cache string
	// Packages: only download the packages and print their directory.
	Packages bool
	Commands []string
}

func main() { os.Exit(mainCode()) }

// mainCode runs the program and returns the exit code.
func mainCode() int {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	code := exitLab
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		code, err = lab(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "rdmalab:", err)
		return exitLab
	}
	return code
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("rdmalab", flag.ContinueOnError)
	f.Usage = func() {
		fmt.Fprintln(f.Output(), "usage: rdmalab [flags] -- COMMAND…     each COMMAND is one line for the guest's shell")
		f.PrintDefaults()
	}
	f.Var(&o.Bins, "bin", "a `program` to take along, with its shared libraries; may be repeated")
	f.Var(&o.Files, "file", "a file to take along, as `HOST:GUEST`; may be repeated")
	name := f.String("equipment", "rdma", "devices of the guest: `rdma` (soft-RoCE) or disks (NVMe drives, device mapper, ext4, xfs)")
	f.Var(&o.Drives, "drive", "an emulated NVMe drive of `SIZE`, such as 2G; may be repeated")
	f.Var(&o.Modules, "module", "a kernel `module` to load beyond those of the equipment; may be repeated")
	f.Var(&o.Env, "env", "`NAME=value` for the commands; may be repeated")
	f.StringVar(&o.Out, "out", "", "`directory` for what the commands leave in /out")
	f.DurationVar(&o.Timeout, "timeout", 3*time.Minute, "the machine is switched off after this time, booting included")
	f.IntVar(&o.MemoryMiB, "memory", 2048, "memory of the guest in `MiB`")
	f.IntVar(&o.CPUs, "cpus", 2, "CPUs of the guest")
	f.StringVar(&o.Accel, "accel", "auto", "`kvm`, tcg (emulation), or auto: kvm where it works")
	f.StringVar(&o.Cache, "cache", "", "`directory` for the guest's packages, downloaded once and never installed (default penstock-rdmalab in the user's cache directory)")
	f.BoolVar(&o.Packages, "packages", false, "download the packages if they are missing, print the directory that they are unpacked in, boot nothing")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	var ok bool
	if o.Equipment, ok = equipments[*name]; !ok {
		return o, fmt.Errorf("-equipment %q: want rdma or disks", *name)
	}
	for _, size := range o.Drives {
		if !driveSize.MatchString(size) {
			return o, fmt.Errorf("-drive %q: want a size such as 512M or 2G", size)
		}
	}
	o.Commands = f.Args()
	if len(o.Commands) == 0 && !o.Packages {
		return o, errors.New("no command for the guest; see rdmalab -h")
	}
	for _, c := range o.Commands {
		if strings.ContainsAny(c, "\n\x00") {
			return o, fmt.Errorf("command %q: a command is one line", c)
		}
	}
	for _, e := range o.Env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.ContainsAny(e, "\n\x00") {
			return o, fmt.Errorf("-env %q: want NAME=value", e)
		}
	}
	return o, nil
}

// lab builds the image, runs the guest and returns the commands' exit code.
func lab(ctx context.Context, o options) (int, error) {
	r, err := ensureRoot(ctx, o.Cache)
	if err != nil {
		return 0, err
	}
	if o.Packages {
		fmt.Println(string(r))
		return 0, nil
	}
	dir, err := os.MkdirTemp("", "rdmalab-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	kernel, err := findKernel(string(r))
	if err != nil {
		return 0, err
	}
	initramfs := dir + "/initramfs"
	if err := writeImage(initramfs, r, kernel, o); err != nil {
		return 0, fmt.Errorf("initramfs: %w", err)
	}
	return boot(ctx, r, kernel, initramfs, dir, o)
}

package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// boot runs the guest until the guest powers off, and returns the exit code of the commands.
func boot(ctx context.Context, r root, k kernel, initramfs, dir string, o options) (int, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("the guest did not finish within %v (flag -timeout)", o.Timeout))
	defer cancel()
	reportFile, outFile := dir+"/report", dir+"/out.tar"
	accel, err := chooseAccel(o.Accel)
	if err != nil {
		return 0, err
	}
	args := append(machine(r, accel), "-smp", strconv.Itoa(o.CPUs), "-m", strconv.Itoa(o.MemoryMiB),
		"-kernel", k.image, "-initrd", initramfs,
		// A panic ends the guest. The log level is low, so that ttyS0 has mostly the output of the
		// commands.
		"-append", "console=ttyS0 panic=-1 oops=panic loglevel=4 rdinit=/init mitigations=off no_timer_check",
		"-serial", "stdio", "-serial", "file:"+reportFile, "-serial", "file:"+outFile)
	drives, err := makeDrives(dir, o.Drives)
	if err != nil {
		return 0, err
	}
	cmd, err := r.command(ctx, "qemu-system-x86_64", append(args, drives...)...)
	if err != nil {
		return 0, err
	}
	cmd.Env = append(os.Environ(), "QEMU_MODULE_DIR="+r.file("/usr/lib/x86_64-linux-gnu/qemu"))
	// The kernel kills QEMU when the lab ends for any reason: more exactly, when the thread that
	// started QEMU ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Stdout = &crDropper{w: os.Stdout}
	runErr := cmd.Run()
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if runErr != nil {
		return 0, fmt.Errorf("qemu: %w: %s", runErr, bytes.TrimSpace(stderr.Bytes()))
	}
	text, err := os.ReadFile(reportFile)
	if err != nil {
		return 0, err
	}
	code, err := parseReport(string(text))
	if said := bytes.TrimSpace(stderr.Bytes()); err != nil && len(said) > 0 {
		// QEMU exits with 0 after SIGTERM, so only its error output shows the signal.
		err = fmt.Errorf("%w; qemu: %s", err, said)
	}
	if o.Out != "" {
		if e := unpack(outFile, o.Out); e != nil {
			err = errors.Join(err, fmt.Errorf("unpack the files of /out: %w", e))
		}
	}
	return code, err
}

// makeDrives creates sparse files for the NVMe drives and returns QEMU's arguments for
// the drives. QEMU does not pass the guest's flushes on to this machine's disk, because
// a drive is not used after its guest has ended.
func makeDrives(dir string, sizes []string) (args []string, err error) {
	for i, size := range sizes {
		n, err := strconv.ParseInt(size[:len(size)-1], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("drive of %s: %w", size, err)
		}
		unit := map[byte]int64{'M': 1 << 20, 'G': 1 << 30}[size[len(size)-1]]
		file := fmt.Sprintf("%s/drive%d", dir, i)
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			return nil, err
		}
		if err := os.Truncate(file, n*unit); err != nil {
			return nil, err
		}
		args = append(args, "-drive", fmt.Sprintf("if=none,id=drive%d,file=%s,format=raw,discard=unmap,cache=unsafe", i, file),
			"-device", fmt.Sprintf("nvme,serial=penstock%d,drive=drive%d", i, i))
	}
	return args, nil
}

// machine returns QEMU's arguments for a guest with only CPUs, memory and serial lines.
func machine(r root, accel string) []string {
	cpu := "host"
	if accel == "tcg" {
		cpu = "max"
	}
	return []string{"-L", r.file("/usr/share/seabios"), "-L", r.file("/usr/share/qemu"), "-machine", "q35,accel=" + accel, "-cpu", cpu, "-nodefaults", "-no-user-config", "-display", "none",
		"-nic", "none", "-no-reboot", "-monitor", "none"}
}

// chooseAccel returns the accelerator named by asked, or for "auto" the best accelerator that
// works. If the best is not KVM, chooseAccel prints the reason to standard output.
func chooseAccel(asked string) (string, error) {
	switch asked {
	case "kvm", "tcg":
		return asked, nil
	case "auto":
	default:
		return "", fmt.Errorf("-accel %q: want auto, kvm or tcg", asked)
	}
	err := kvmUsable()
	if err == nil {
		return "kvm", nil
	}
	fmt.Printf("rdmalab: no KVM (%v): the guest's CPUs are emulated, many times slower\n", err)
	return "tcg", nil
}

// kvmUsable returns an error if KVM cannot run the guest. An open of /dev/kvm is not a sufficient
// test: the module kvm_pvm, common in virtual machines, provides /dev/kvm but runs only kernels
// that were built for kvm_pvm.
func kvmUsable() error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	for _, m := range []string{"kvm_intel", "kvm_amd"} {
		if _, err := os.Stat("/sys/module/" + m); err == nil {
			return nil
		}
	}
	return errors.New("/dev/kvm exists, but neither kvm_intel nor kvm_amd is loaded")
}

// parseReport parses the lines that the guest has written to ttyS1. It returns the exit code of the
// commands, and an error that lists what went wrong in the guest.
func parseReport(text string) (int, error) {
	code, ended := -1, false
	var problems []error
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		name, value, _ := strings.Cut(strings.TrimSuffix(s.Text(), "\r"), " ")
		switch name {
		case "exit":
			n, err := strconv.Atoi(value)
			if err != nil || n < 0 || n > 255 {
				return 0, fmt.Errorf("the guest reports exit code %q", value)
			}
			code = n
		case "broken":
			problems = append(problems, errors.New(value))
		case "complaint":
			problems = append(problems, errors.New("the guest's kernel reports: "+value))
		case "end":
			ended = true
		}
	}
	if len(problems) == 0 && (!ended || code < 0) {
		problems = append(problems, errors.New("the guest ended without a report: its kernel stopped or did not boot; its last output is above"))
	}
	return code, errors.Join(problems...)
}

// unpack writes the regular files of the guest's archive into dir.
func unpack(file, dir string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if !filepath.IsLocal(h.Name) {
			return fmt.Errorf("name %q leads out of the directory", h.Name)
		}
		if err := unpackFile(filepath.Join(dir, h.Name), r); err != nil {
			return err
		}
	}
}

func unpackFile(name string, r io.Reader) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// crDropper removes the carriage returns that a serial line adds.
type crDropper struct{ w io.Writer }

// Write implements io.Writer.
func (c *crDropper) Write(b []byte) (int, error) {
	_, err := c.w.Write(bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n")))
	return len(b), err
}

//go:build cgo && linux

package usrbio

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/usrbio/usrbiotest"
)

// runInterface builds testdata/interface.c, with the C code of the package, and a library, both
// with the flags. It runs the program, under the command before, in an empty mount.
func runInterface(t *testing.T, flags []string, before ...string) {
	t.Helper()
	gcc := testkit.Program(t, "gcc", "gcc")
	dir := t.TempDir()
	library, err := usrbiotest.Build(dir, flags...)
	if err != nil {
		t.Fatal(err)
	}
	program, mount := filepath.Join(dir, "interface"), filepath.Join(dir, "mount")
	args := append([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "testdata/interface.c", "usrbio.c", "-o", program, "-ldl", "-lpthread"}, flags...)
	if out, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	if err := usrbiotest.Virtual(mount); err != nil {
		t.Fatal(err)
	}
	argv := append(before, program, library, mount)
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "STANDIN_HF3FS_CONTROL=", "STANDIN_HF3FS_MOUNTS="+mount)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if links := usrbiotest.Links(t, mount); len(links) != 0 {
		t.Errorf("registrations are left: %v", links)
	}
}

// TestInterface runs the program under the sanitizers for addresses, leaks and undefined behaviour.
func TestInterface(t *testing.T) {
	runInterface(t, []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"})
}

// TestInterfaceValgrind runs the program under memcheck.
func TestInterfaceValgrind(t *testing.T) {
	valgrind := testkit.Program(t, "valgrind", "valgrind")
	runInterface(t, nil, valgrind, "--quiet", "--error-exitcode=9", "--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite", "--track-origins=yes")
}

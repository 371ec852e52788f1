package testkit

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Module is a Go module outside of the repository that depends on the repository, as the module of
// a user does. It cannot import the internal packages of the repository.
type Module struct {
	// Dir holds the module's go.mod. It is removed when the test ends.
	Dir string
}

// OutsideModule writes a module with the given files, keyed by their path in the
// module. Its dependencies come from this checkout and from the module cache
// only: the go command of Module.Go does not use the network.
func OutsideModule(t testing.TB, files map[string]string) *Module {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("CI without the go command, which builds the module: %v", err)
		}
		t.Skipf("needs the go command to build a module: %v", err)
	}
	root := RepositoryRoot(t)
	gomod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatalf("testkit: %v", err)
	}
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatalf("testkit: %v", err)
	}
	// The module has the same requirements as the repository. So the go command needs only versions
	// of modules that the build of the repository has already put into the module cache.
	path, rest, _ := strings.Cut(strings.TrimPrefix(string(gomod), "module "), "\n")
	m := &Module{Dir: t.TempDir()}
	m.write(t, "go.mod", "module example.com/outside\n"+rest+"\nrequire "+path+" v0.0.0\nreplace "+path+" => "+root+"\n")
	m.write(t, "go.sum", string(sums))
	for name, text := range files {
		m.write(t, name, text)
	}
	return m
}

func (m *Module) write(t testing.TB, name, text string) {
	t.Helper()
	path := filepath.Join(m.Dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatalf("testkit: %v", err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatalf("testkit: %v", err)
	}
}

// Go returns the go command with args, to be run in the module: for example
// m.Go(ctx, "run", ".", "argument") or m.Go(ctx, "vet", "./...").
func (m *Module) Go(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = m.Dir
	// -mod=mod lets the go command complete go.mod. The other variables keep it offline and out of
	// any workspace.
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off", "GOTOOLCHAIN=local", "PWD="+m.Dir)
	return cmd
}

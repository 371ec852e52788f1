package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// kernel is a kernel in root, the directory with the unpacked packages.
type kernel struct {
	image   string // vmlinuz
	modules string // /lib/modules/RELEASE
}

// findKernel returns the newest kernel under root that has rdma_rxe.
func findKernel(root string) (kernel, error) {
	found, err := filepath.Glob(filepath.Join(root, "lib/modules/*/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"))
	if err != nil {
		return kernel{}, err
	}
	var kernels []kernel
	for _, f := range found {
		modules := f[:strings.Index(f, "/kernel/drivers/")]
		k := kernel{image: filepath.Join(root, "boot", "vmlinuz-"+filepath.Base(modules)), modules: modules}
		if _, err := os.Stat(k.image); err == nil {
			kernels = append(kernels, k)
		}
	}
	if len(kernels) == 0 {
		return kernel{}, fmt.Errorf("no kernel in %s has both vmlinuz and rdma_rxe (package linux-image-amd64)", filepath.Join(root, "boot"))
	}
	return slices.MaxFunc(kernels, func(a, b kernel) int { return compareReleases(a.modules, b.modules) }), nil
}

// compareReleases orders "6.1.0-9-amd64" before "6.1.0-56-amd64".
func compareReleases(a, b string) int {
	digits := func(r rune) bool { return r < '0' || r > '9' }
	x, y := strings.FieldsFunc(filepath.Base(a), digits), strings.FieldsFunc(filepath.Base(b), digits)
	return slices.CompareFunc(x, y, func(m, n string) int {
		if len(m) != len(n) {
			return len(m) - len(n)
		}
		return strings.Compare(m, n)
	})
}

// loadOrder returns the files of modules and of all their dependencies, relative to the module
// directory. Each file comes after the files on which it depends. dep and builtin are the texts of
// modules.dep and modules.builtin.
func loadOrder(dep, builtin []byte, modules []string) ([]string, error) {
	files, needs := make(map[string]string), make(map[string][]string)
	for s := bufio.NewScanner(bytes.NewReader(dep)); s.Scan(); {
		file, rest, ok := strings.Cut(s.Text(), ":")
		if !ok {
			return nil, fmt.Errorf("modules.dep: line %q has no colon", s.Text())
		}
		files[moduleName(file)] = file
		needs[file] = strings.Fields(rest)
	}
	inKernel := make(map[string]bool)
	for s := bufio.NewScanner(bytes.NewReader(builtin)); s.Scan(); {
		inKernel[moduleName(s.Text())] = true
	}
	var order []string
	for _, m := range modules {
		file, ok := files[moduleName(m)]
		if !ok {
			if inKernel[moduleName(m)] {
				continue
			}
			return nil, fmt.Errorf("kernel has no module %s", m)
		}
		// modules.dep lists the direct and indirect dependencies of a module; a dependency of a
		// dependency comes later in the list.
		for _, f := range slices.Backward(append([]string{file}, needs[file]...)) {
			if !slices.Contains(order, f) {
				order = append(order, f)
			}
		}
	}
	return order, nil
}

// moduleName returns "rdma_rxe" for "kernel/…/rdma-rxe.ko.xz".
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// readModule returns the module in the file, decompressed.
func readModule(file string) ([]byte, error) {
	tool := map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"}[filepath.Ext(file)]
	if tool == "" {
		return os.ReadFile(file)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(tool, "-dc", file)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s -dc %s: %w: %s", tool, file, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

// addModules adds the decompressed modules to the archive, and a list of them in the
// order of loading. Each element of modules is a name, optionally followed by a space
// and parameters.
func addModules(a *archive, k kernel, modules []string) error {
	dep, err := os.ReadFile(filepath.Join(k.modules, "modules.dep"))
	if err != nil {
		return err
	}
	builtin, err := os.ReadFile(filepath.Join(k.modules, "modules.builtin"))
	if err != nil {
		return err
	}
	names, parameters := make([]string, len(modules)), make(map[string]string)
	for i, m := range modules {
		names[i], _, _ = strings.Cut(m, " ")
		parameters[moduleName(names[i])] = m[len(names[i]):]
	}
	order, err := loadOrder(dep, builtin, names)
	if err != nil {
		return fmt.Errorf("%s: %w", k.modules, err)
	}
	var lines bytes.Buffer
	for _, f := range order {
		text, err := readModule(filepath.Join(k.modules, f))
		if err != nil {
			return err
		}
		name := moduleName(f) + ".ko"
		fmt.Fprintln(&lines, name+parameters[moduleName(f)])
		if err := a.file("/lab/modules/"+name, 0o644, text); err != nil {
			return err
		}
	}
	return a.file("/lab/modules/order", 0o644, lines.Bytes())
}

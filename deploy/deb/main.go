// Command deb writes a Debian package of a penstock program: what nfpm.yaml lists. It is a module of
// its own, so that the modules of nfpm are not among those of Penstock.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // registers the format
)

func main() {
	program := flag.String("program", "bin/static/penstock", "program to package")
	out := flag.String("out", "bin", "directory of the package")
	flag.Parse()
	path, err := write(*program, *out)
	if err != nil {
		fmt.Fprintln(os.Stderr, "deb:", err)
		os.Exit(1)
	}
	fmt.Println(path)
}

// write writes the package of a program and returns its path. The working directory is the
// repository.
func write(program, out string) (path string, err error) {
	version, err := versionOf(program)
	if err != nil {
		return "", err
	}
	stage, err := os.MkdirTemp("", "penstock-deb-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(stage)) }()
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, err := exec.Command(program, "completion", shell).Output()
		if err != nil {
			return "", fmt.Errorf("completion %s: %w", shell, err)
		}
		if err := os.WriteFile(filepath.Join(stage, shell), script, 0o644); err != nil {
			return "", err
		}
	}
	variables := map[string]string{"VERSION": version, "ARCH": runtime.GOARCH, "PROGRAM": program, "STAGE": stage}
	config, err := nfpm.ParseFileWithEnvMapping("deploy/deb/nfpm.yaml", func(name string) string { return variables[name] })
	if err != nil {
		return "", err
	}
	info, err := config.Get("deb")
	if err != nil {
		return "", err
	}
	if info.MTime, err = buildTime(); err != nil {
		return "", err
	}
	info = nfpm.WithDefaults(info)
	packager, err := nfpm.Get("deb")
	if err != nil {
		return "", err
	}
	path = filepath.Join(out, packager.ConventionalFileName(info))
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", err
	}
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	return path, errors.Join(packager.Package(info, f), f.Close())
}

// versionOf returns the version that a program reports. A program without a version has 0.0.0, which
// every release replaces.
func versionOf(program string) (string, error) {
	out, err := exec.Command(program, "version", "--format", "json").Output()
	if err != nil {
		return "", fmt.Errorf("%s version: %w", program, err)
	}
	var built struct{ Version, Revision string }
	if err := json.Unmarshal(out, &built); err != nil {
		return "", fmt.Errorf("%s version: %w", program, err)
	}
	if built.Version != "devel" {
		return built.Version, nil
	}
	return strings.TrimSuffix("0.0.0-devel."+built.Revision, "."), nil
}

// buildTime returns the time of the package's files: SOURCE_DATE_EPOCH, or the current time.
func buildTime() (time.Time, error) {
	epoch := os.Getenv("SOURCE_DATE_EPOCH")
	if epoch == "" {
		return time.Now(), nil
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	return time.Unix(seconds, 0), nil
}

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
)

// release is the version of a build without git's history, set by the linker (make VERSION=1.2.3).
// Otherwise the go command stamps the program with git's tag and commit.
var release string

// buildInfo is the output of `penstock version`.
type buildInfo struct {
	Version    string `json:"version"`
	Revision   string `json:"revision"`
	Modified   bool   `json:"modified"`
	Go         string `json:"go"`
	Platform   string `json:"platform"`
	Tags       string `json:"tags"`
	DiskFormat uint32 `json:"disk_format"`
}

func readBuildInfo() buildInfo {
	b := buildInfo{Version: "devel", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, DiskFormat: ondisk.Version}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		b.Version = v
	}
	if release != "" {
		b.Version = "v" + strings.TrimPrefix(release, "v")
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "-tags":
			b.Tags = s.Value
		}
	}
	return b
}

// String returns the version as the node reports it. The version of a development build contains
// the commit.
func (b buildInfo) String() string {
	if b.Version != "devel" || b.Revision == "" {
		return b.Version
	}
	dirty := ""
	if b.Modified {
		dirty = "+modified"
	}
	return fmt.Sprintf("devel-%.12s%s", b.Revision, dirty)
}

func newVersionCommand(w world) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary, how it was built, and the disk format it reads",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := readBuildInfo()
			return outputOf(cmd).emit(b, func(t *table) {
				t.pair("version", b)
				t.pair("revision", b.Revision)
				t.pair("go", b.Go+" "+b.Platform)
				t.pair("tags", b.Tags)
				t.pair("disk format", b.DiskFormat)
			})
		},
	}
}

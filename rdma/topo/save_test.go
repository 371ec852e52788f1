package topo

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/topo/topotest"
)

// TestSave: Read of a copy gives the same host as Read of the original, also for this machine.
func TestSave(t *testing.T) {
	testkit.Long(t, "copies the /sys of this machine")
	hosts, err := filepath.Glob("testdata/*.host")
	if err != nil || len(hosts) < 3 {
		t.Fatalf("%d hosts, %v", len(hosts), err)
	}
	for _, path := range hosts {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		more := "bond bond0 members=s0,s1\nnet s0 at=70/70:01.0/71:00.0\nnet s1 at=70/70:01.0/71:00.1\n"
		if err := topotest.Write(dir, string(raw)+"\n"+more); err != nil {
			t.Fatal(err)
		}
		t.Run(filepath.Base(path), func(t *testing.T) { saveAndCompare(t, dir) })
	}
	t.Run("here", func(t *testing.T) { saveAndCompare(t, "/sys") })
}

func saveAndCompare(t *testing.T, sysfs string) {
	copied := filepath.Join(t.TempDir(), "copy")
	if err := Save(copied, os.DirFS(sysfs)); err != nil {
		t.Fatal(err)
	}
	want, got := Read(Options{Sysfs: os.DirFS(sysfs)}), Read(Options{Sysfs: os.DirFS(copied)})
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the copy is\n%v\nthe host\n%v", got, want)
	}
	if err := Save(copied, nil); err == nil {
		t.Error("a copy on top of another")
	}
}

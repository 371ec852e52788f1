package storage_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/server/storage"
)

// dataFaults are the rules behind the rows of the fault matrix in ARCHITECTURE.md:
// what one of two data volumes does. A fault that only some operations can meet has
// its cells for those.
var dataFaults = map[string]string{
	"EIO":      `(Err EIO Any)`,
	"hang":     `(Delay 30s Any)`,
	"full":     `(Err ENOSPC (Or Writes Creates))`,
	"torn":     `(Torn (And Writes (File "segment-*") (Offset 4096 1073741824)))`,
	"bit flip": `(Flip (And Writes (File "segment-*") (Offset 4096 1073741824)))`,
	"fd limit": `(Err EMFILE (Or Creates Opens))`,
}

// matrix reads the promised outcomes from ARCHITECTURE.md, by fault and operation.
func matrix(t *testing.T) map[string]map[string]string {
	page, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]map[string]string)
	var columns []string
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case cells[0] == "one of two data volumes":
			columns = cells
		case len(cells) != len(columns) || strings.HasPrefix(cells[0], "---"):
			if len(out) > 0 {
				return out
			}
		default:
			out[cells[0]] = make(map[string]string)
			for i, name := range columns[1:] {
				out[cells[0]][name] = cells[i+1]
			}
		}
	}
	return out
}

// TestFaultMatrix: each fault of one of two data volumes has the outcome for each
// operation that ARCHITECTURE.md promises.
func TestFaultMatrix(t *testing.T) {
	promised := matrix(t)
	if len(promised) != len(dataFaults) {
		t.Fatalf("ARCHITECTURE.md has %d faults, the test %d", len(promised), len(dataFaults))
	}
	operations := map[string]func(*rig) string{
		"read": func(r *rig) string {
			ns, err := r.node.Namespace("m")
			if err != nil {
				return err.Error()
			}
			hits := 0
			for i := range 8 {
				_, n := r.load(ns, chain(ns, 1, i))
				hits += n
			}
			return map[bool]string{true: "hit", false: "miss"}[hits == 8]
		},
		"write": func(r *rig) string {
			ns, err := r.node.Namespace("m")
			if err != nil {
				return err.Error()
			}
			for i := range 8 {
				stored, err := r.put(ns, chain(ns, 1, 100+i), 0)
				if err != nil || len(stored) != 1 || !stored[0].Stored {
					return fmt.Sprint("refused: ", stored, err)
				}
			}
			return "stored"
		},
		"sync": func(r *rig) string { return okOr(r.node.Sync(r.t.Context())) },
		"bump": func(r *rig) string {
			_, _, err := r.node.BumpEpoch(r.t.Context(), "m", 0)
			return okOr(err)
		},
		"create": func(r *rig) string {
			ns, err := r.node.Namespace("m")
			if err != nil {
				return err.Error()
			}
			ns.Name, ns.ID = "other", 0
			_, err = r.node.CreateNamespace(r.t.Context(), ns)
			return okOr(err)
		},
	}
	for fault, cells := range promised {
		for name, want := range cells {
			t.Run(fault+"/"+name, func(t *testing.T) {
				var got string
				synctest.Test(t, func(t *testing.T) {
					r, bad := newPair(t, rigOptions{edit: func(o *storage.Options) { o.HotBytes = -1 }})
					ns := r.namespace("m", small)
					for i := range 8 {
						r.mustPut(ns, chain(ns, 1, i))
					}
					bad.SetRules(faultio.MustParse(dataFaults[fault]))
					began := time.Now()
					got = operations[name](r)
					if time.Since(began) > 20*time.Second {
						got += ", when the request completes"
					}
					bad.SetRules(nil)
					time.Sleep(5 * time.Minute) // the volume recovers, and Close finds it well
				})
				if got != want {
					t.Errorf("%s; ARCHITECTURE.md promises %s", got, want)
				}
			})
		}
	}
}

func okOr(err error) string {
	if err == nil {
		return "ok"
	}
	return "error"
}

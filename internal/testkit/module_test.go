package testkit

import (
	"strings"
	"testing"
)

// TestOutsideModule: a module outside of the repository can use the exported
// packages and not the internal ones.
func TestOutsideModule(t *testing.T) {
	const kv = `package main
import "fmt"
import "github.com/penstock-kv/penstock/kv"
func main() { fmt.Print(kv.SingleGroup(2, 4, 8).BlockBytes()) }
`
	m := OutsideModule(t, map[string]string{
		"main.go":           kv,
		"forbidden/main.go": "package main\nimport _ \"github.com/penstock-kv/penstock/internal/testkit\"\nfunc main() {}\n",
	})
	if out, err := m.Go(t.Context(), "run", ".").CombinedOutput(); err != nil || string(out) != "64" {
		t.Errorf("go run: %v: %s; want 64", err, out)
	}
	if out, err := m.Go(t.Context(), "build", "./forbidden").CombinedOutput(); err == nil || !strings.Contains(string(out), "use of internal package") {
		t.Errorf("go build of a program that imports an internal package: %v: %s", err, out)
	}
}

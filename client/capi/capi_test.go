package main

import (
	"bufio"
	"bytes"
	"encoding/xml"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

// built is the directory with the library, which TestMain removes at the end.
type built struct {
	dir string
	err error
}

// build runs make lib, once for all tests.
var build = sync.OnceValue(func() (b built) {
	if b.dir, b.err = os.MkdirTemp("", "penstock-capi"); b.err != nil {
		return b
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		return built{b.dir, err}
	}
	out, err := exec.Command("make", "-s", "-C", root, "lib", "LIB="+b.dir).CombinedOutput()
	if err != nil {
		b.err = &exec.Error{Name: "make lib: " + string(out), Err: err}
	}
	return b
})

func TestMain(m *testing.M) {
	code := m.Run()
	if _, err := exec.LookPath("gcc"); err == nil {
		os.RemoveAll(build().dir)
	}
	os.Exit(code)
}

// need skips a test that lacks a tool. Continuous integration installs the tools, so
// under CI=true the test fails.
func need(t *testing.T, tools ...string) {
	t.Helper()
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatalf("this test needs %s, which continuous integration must have: %v", tool, err)
			}
			t.Skipf("this test needs %s, which is not in PATH", tool)
		}
	}
}

// lib returns the directory with libpenstock.so and penstock.h.
func lib(t *testing.T) string {
	t.Helper()
	need(t, "gcc", "make")
	b := build()
	if b.err != nil {
		t.Fatal(b.err)
	}
	return b.dir
}

// compile compiles a C file and links it with the library.
func compile(t *testing.T, source string, flags ...string) string {
	t.Helper()
	dir := lib(t)
	program := filepath.Join(t.TempDir(), "program")
	args := append([]string{"-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-I" + dir, source, "-o", program, "-L" + dir, "-lpenstock", "-lpthread", "-Wl,-rpath," + dir}, flags...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	return program
}

// run runs a program and returns its output. It fails the test if the exit code is not 0.
func run(t *testing.T, env []string, program string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", filepath.Base(program), err, out)
	}
	return string(out)
}

// nodes starts the nodes and the planner of conformance.c and returns their addresses.
func nodes(t *testing.T) []string {
	t.Helper()
	var addrs []string
	for _, o := range []testnode.Options{{}, {BearerToken: "a token of the conformance test"}, {OtherVersion: true}} {
		addrs = append(addrs, testnode.Start(t, o).Addr)
	}
	plan := dualpath.Options{BlockTokens: 16, GroupTimeout: time.Hour}
	return append(addrs, testplanner.Start(t, testplanner.Options{Planner: planner.Options{Planner: plan}, TCP: true}).Addr)
}

// TestConformance tests the comments of penstock.h with a C program.
func TestConformance(t *testing.T) {
	run(t, nil, compile(t, "testdata/conformance.c"), nodes(t)...)
}

// TestConformanceSanitized runs the program of TestConformance under the sanitizers for
// addresses and undefined behaviour. The code of the library is not instrumented.
func TestConformanceSanitized(t *testing.T) {
	// Leak detection is off, because it reports memory of Go's runtime, which is never
	// unloaded.
	env := []string{"ASAN_OPTIONS=detect_leaks=0", "UBSAN_OPTIONS=halt_on_error=1"}
	run(t, env, compile(t, "testdata/conformance.c", "-fsanitize=address,undefined"), nodes(t)...)
}

// memcheck is the part of valgrind's XML output that TestConformanceValgrind reads.
type memcheck struct {
	Errors []memcheckError `xml:"error"`
	Status []struct {
		State string `xml:"state"`
	} `xml:"status"`
}

type memcheckError struct {
	Kind string   `xml:"kind"`
	What string   `xml:"what"`
	Leak string   `xml:"xwhat>text"`
	Aux  []string `xml:"auxwhat"`
	// Stack has the stack of the error first, then that of the block's allocation or end, or
	// of the allocation that left the value undefined.
	Stack []struct {
		Frames []struct {
			Function string `xml:"fn"`
			File     string `xml:"file"`
			Line     int    `xml:"line"`
		} `xml:"frame"`
	} `xml:"stack"`
}

// TestConformanceValgrind runs the program of TestConformance under memcheck, which also
// checks the C code of the library, and C memory that Go code uses or should free. Other
// errors in Go code are not errors of the library: Go's runtime switches between stacks that
// lie close to each other, and memcheck takes such a switch for the end of a stack frame. Then it takes
// memory between the stacks for not addressable or not initialized, Go's heap included, and what Go
// computes from it, also after Go has passed the result to C.
func TestConformanceValgrind(t *testing.T) {
	need(t, "valgrind")
	program := compile(t, "testdata/conformance.c")
	report := filepath.Join(t.TempDir(), "report.xml")
	args := []string{"--quiet", "--error-limit=no", "--track-origins=yes", "--leak-check=full", "--show-leak-kinds=definite", "--child-silent-after-fork=yes", "--xml=yes", "--xml-file=" + report, program}
	run(t, nil, "valgrind", append(args, nodes(t)...)...)
	text, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var got memcheck
	if err := xml.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if n := len(got.Status); n == 0 || got.Status[n-1].State != "FINISHED" {
		t.Fatalf("valgrind did not finish: %v", got.Status)
	}
	errors := 0
	for _, e := range got.Errors {
		if e.ofGo() {
			continue
		}
		if errors++; errors <= 10 {
			t.Errorf("%s: %s%s %q, stacks %+v", e.Kind, e.What, e.Leak, e.Aux, e.Stack)
		}
	}
	if errors > 10 {
		t.Errorf("%d more errors", errors-10)
	}
}

// ofGo reports whether memcheck found the error because of Go's stacks.
func (e *memcheckError) ofGo() bool {
	// Go's functions have no symbols in the library.
	inGo := func(at int) bool {
		return at >= len(e.Stack) || len(e.Stack[at].Frames) == 0 || e.Stack[at].Frames[0].Function == ""
	}
	aux := strings.Join(e.Aux, " ")
	switch {
	case strings.Contains(aux, "is in a rw- anonymous segment"):
		// Go's heap. Memory of malloc, stacks of C and memory that is not mapped are reported otherwise.
		return true
	case strings.HasPrefix(e.Kind, "Uninit") && !strings.Contains(aux, "created by"):
		// A value whose origin is an allocation of C has its place.
		return true
	case strings.Contains(aux, "created by a stack allocation"):
		return inGo(1)
	}
	return inGo(0) && !strings.Contains(aux, "block of size")
}

// TestExample: the example of the documentation stores a prefix in the first run and finds
// it in the second.
func TestExample(t *testing.T) {
	program, node := compile(t, "example/prefix.c"), testnode.Start(t, testnode.Options{})
	for turn, want := range []string{"0 of 4 blocks were stored, 4 are now\n", "4 of 4 blocks were stored, 4 are now\n"} {
		if got := run(t, nil, program, node.Addr); got != want {
			t.Errorf("run %d printed %q; want %q", turn+1, got, want)
		}
	}
}

// TestSymbols: the library exports exactly the functions that penstock.h declares.
func TestSymbols(t *testing.T) {
	need(t, "nm")
	out, err := exec.Command("nm", "-D", "--defined-only", filepath.Join(lib(t), "libpenstock.so")).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		if f := strings.Fields(s.Text()); f[1] != "A" { // A is the symbol of the version's name
			got = append(got, strings.TrimSuffix(f[2], "@@PENSTOCK_1"))
		}
	}
	slices.Sort(got)
	list, err := os.ReadFile("testdata/symbols.txt")
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Fields(string(list)); !slices.Equal(got, want) {
		t.Errorf("the library exports\n%s\nand testdata/symbols.txt lists\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	header, err := os.ReadFile("penstock.h")
	if err != nil {
		t.Fatal(err)
	}
	var declared []string
	for _, m := range regexp.MustCompile(`(?m)^u?int32_t (penstock_\w+)\(`).FindAllSubmatch(header, -1) {
		declared = append(declared, string(m[1]))
	}
	if slices.Sort(declared); !slices.Equal(got, declared) {
		t.Errorf("the library exports\n%s\nand penstock.h declares\n%s", strings.Join(got, "\n"), strings.Join(declared, "\n"))
	}
}

// TestPython: the library does not change how a Python process handles signals, faults and
// forks.
func TestPython(t *testing.T) {
	need(t, "python3")
	run(t, nil, "python3", "testdata/process.py", filepath.Join(lib(t), "libpenstock.so"))
}

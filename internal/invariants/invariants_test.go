package invariants

import (
	"bytes"
	"strings"
	"testing"
)

// panicOf runs f and returns the value of its panic as text, or "".
func panicOf(f func()) (msg string) {
	defer func() {
		if r := recover(); r != nil {
			msg = r.(string)
		}
	}()
	f()
	return ""
}

func TestMangle(t *testing.T) {
	buf := []byte("payload")
	Mangle(buf)
	if got := bytes.Count(buf, []byte{MangleByte}) == len(buf); got != Enabled {
		t.Errorf("mangled = %v in a build with Enabled = %v; buffer is % x", got, Enabled, buf)
	}
	Mangle(nil)
}

func TestAssert(t *testing.T) {
	if msg := panicOf(func() { Assert(true, "unused") }); msg != "" {
		t.Errorf("a true assertion panicked: %q", msg)
	}
	msg := panicOf(func() { Assert(false, "refs %d", -1) })
	if want := "invariant violated: refs -1"; Enabled && msg != want {
		t.Errorf("panic %q; want %q", msg, want)
	}
	if !Enabled && msg != "" {
		t.Errorf("panic %q in a build without the tag", msg)
	}
}

func TestSometimes(t *testing.T) {
	if Sometimes(0) {
		t.Error("Sometimes(0) is true")
	}
	if got := Sometimes(100); got != Enabled {
		t.Errorf("Sometimes(100) = %v with Enabled = %v", got, Enabled)
	}
}

func TestCloseChecker(t *testing.T) {
	var c CloseChecker
	c.AssertNotClosed()
	for _, step := range []struct {
		name, want string
		do         func()
	}{
		{"assert closed while open", "not closed", c.AssertClosed},
		{"first close", "", c.Close},
		{"assert closed", "", c.AssertClosed},
		{"use after close", "used after it was closed", c.AssertNotClosed},
		{"second close", "closed twice", c.Close},
	} {
		msg := panicOf(step.do)
		if !Enabled {
			step.want = ""
		}
		if (step.want == "") != (msg == "") || !strings.Contains(msg, step.want) {
			t.Errorf("%s: panic %q; want one with %q", step.name, msg, step.want)
		}
	}
}

func TestValue(t *testing.T) {
	var v Value[int]
	v.Set(7)
	if got := v.Get() == 7; got != Enabled {
		t.Errorf("Get() = %d with Enabled = %v", v.Get(), Enabled)
	}
}

func TestNoAllocations(t *testing.T) {
	if Enabled {
		t.Skip("the claim is about builds without the tag invariants")
	}
	buf := make([]byte, 8)
	var c CloseChecker
	if n := testing.AllocsPerRun(100, func() { Mangle(buf); c.AssertNotClosed(); _ = Sometimes(50) }); n != 0 {
		t.Errorf("%v allocations per run; want 0", n)
	}
}

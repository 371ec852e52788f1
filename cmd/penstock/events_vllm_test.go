package main

import (
	"os"
	"os/exec"
	"testing"
)

// TestEventsOfVLLM: what is published is decoded by libzmq, msgspec and vLLM's own
// classes, whose encoder writes the same bytes. It needs a Python with the modules of
// testdata/kv_events_consumer.lock, and vllm/distributed/kv_events.py of vLLM 0.32.
func TestEventsOfVLLM(t *testing.T) {
	python, classes := os.Getenv("PENSTOCK_KVEVENTS_PYTHON"), os.Getenv("PENSTOCK_KVEVENTS_VLLM")
	if python == "" || classes == "" {
		if os.Getenv("CI") == "true" {
			t.Fatal("CI without PENSTOCK_KVEVENTS_PYTHON and PENSTOCK_KVEVENTS_VLLM")
		}
		t.Skip("needs PENSTOCK_KVEVENTS_PYTHON, a Python with pyzmq and msgspec, and PENSTOCK_KVEVENTS_VLLM, the path of vLLM's kv_events.py")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/kv_events_consumer.py", classes, self)
	cmd.Env = append(os.Environ(), childEnv)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

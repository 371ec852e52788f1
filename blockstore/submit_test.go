package blockstore

import (
	"testing"

	"github.com/penstock-kv/penstock/io/blockio"
)

// TestSmallReadPaysForItself: a submission that was large before clears only the elements that the
// current read used.
func TestSmallReadPaysForItself(t *testing.T) {
	var m submission
	m.reset(blockio.Read, 4096)
	for i := range m.jobs {
		m.jobs[i].bytes = 1
	}
	m.drop()
	for i, j := range m.jobs {
		if j.bytes != 0 {
			t.Fatalf("job %d was not cleared", i)
		}
	}
	m.reset(blockio.Read, 2)
	beyond := &m.jobs[:4096][2048]
	beyond.bytes = 1 // shows whether the element is written to
	m.drop()
	if beyond.bytes == 0 {
		t.Error("a read of one piece cleared the jobs of an earlier one of 2048")
	}
}

//go:build !cuda || !cgo || !linux

package copier

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

// TestWithoutCUDA: the error names the build options that are needed.
func TestWithoutCUDA(t *testing.T) {
	if _, err := NewCUDA(CUDAOptions{}); !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "-tags=cuda") {
		t.Errorf("%v", err)
	}
}

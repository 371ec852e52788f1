package reload

import (
	"errors"
	"testing"
	"time"
)

// TestSettling: files are used when two reads in a row agree, so a file that is being written is not
// used while each read finds more of it.
func TestSettling(t *testing.T) {
	var s settling
	first, second := &contents{tokens: []string{"a"}}, &contents{tokens: []string{"a", "b"}}
	cut, other := errors.New("half a certificate"), errors.New("no certificate")
	for i, read := range []struct {
		files *contents
		err   error
		want  bool
	}{
		{first, nil, false},
		{second, nil, false},
		{&contents{tokens: []string{"a", "b"}}, nil, true},
		{second, nil, false}, // the next change begins anew
		{nil, cut, false},
		{nil, other, false},
		{first, nil, false},
		{nil, other, false},
		{nil, other, true},
		{nil, other, false},
		{first, nil, false},
		{first, nil, true},
	} {
		s.begin(time.Hour)
		if s.due == nil {
			t.Fatalf("read %d is not scheduled", i)
		}
		if got := s.agrees(read.files, read.err); got != read.want || s.due != nil {
			t.Errorf("read %d agrees: %v, want %v", i, got, read.want)
		}
	}
}

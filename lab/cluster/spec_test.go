package cluster

import (
	"strings"
	"testing"
)

func TestSpec(t *testing.T) {
	var s Spec
	s.EnsureDefaults()
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	// Blocks of 8 layers of 32 tokens of 256 bytes in 256 MiB, and NICs of 200 Mbit/s.
	if s.Shape() != "1P1D" || s.CNICBits != 1600e6 || s.blockBytes() != 64<<10 || s.blocks(8) != 4096 || s.blocks(2) != 16384 || s.ReadTokens() != 200e6/8/2048 {
		t.Errorf("%+v has %d blocks of %d bytes, and reads %v tokens a second", s, s.blocks(8), s.blockBytes(), s.ReadTokens())
	}
	s.Oracle = true
	if s.blockBytes() != 256 || s.blocks(8) != 4096 {
		t.Errorf("the oracle has %d blocks of %d bytes", s.blocks(8), s.blockBytes())
	}
	for word, change := range map[string]func(*Spec){
		"33 prefill":  func(s *Spec) { s.Prefill = 33 },
		"-1 decode":   func(s *Spec) { s.Decode = -1 },
		"1000 bit/s":  func(s *Spec) { s.SNICBits = 1000 },
		"window of 9": func(s *Spec) { s.Window = 9 },
		"layers":      func(s *Spec) { s.Layers, s.Window = 1<<20, 1 },
		"8 layers":    func(s *Spec) { s.Model.Layers = -8 },
	} {
		s := Spec{}
		s.EnsureDefaults()
		change(&s)
		err := s.Validate()
		if err == nil {
			t.Errorf("%s: no error", word)
			continue
		}
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", word, err)
		}
	}
}

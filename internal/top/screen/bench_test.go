package screen

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/top"
)

// BenchmarkLines draws a screen of 10,000 namespaces.
func BenchmarkLines(b *testing.B) {
	s := New(Namespaces, Order{}, 0, time.Second)
	s.Taken = now
	for i := range 10_000 {
		s.Frame.Namespaces = append(s.Frame.Namespaces, top.NamespaceRow{
			Name: fmt.Sprintf("tenant-%d/model", i), Epoch: 3, LowestEpoch: 3, EpochSince: now, LiveEpochs: 1,
			Rates: top.Rates{ReadBytes: top.Known(float64(i * 7919 % 10_007))},
		})
	}
	for b.Loop() {
		s.Lines(160, 50)
	}
}

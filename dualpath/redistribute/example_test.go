package redistribute_test

import (
	"fmt"

	"github.com/penstock-kv/penstock/dualpath/redistribute"
)

// A scheduler calls Decide for each chunk of a request that another instance holds.
func ExampleModel_Decide() {
	fabric, err := redistribute.FabricNamed("h100-ibgda")
	if err != nil {
		panic(err)
	}
	model := redistribute.H100(fabric)
	for _, r := range []redistribute.Request{
		{Rows: 256, Tokens: 2048},                                          // a decoding step
		{Rows: 256, Tokens: 2048, Steps: 500},                              // many steps on one instance
		{Rows: 1, Tokens: 50, NoRoute: true},                               // a short chunk, a holder that cannot compute
		{Rows: 64, Tokens: 2048, Reuse: redistribute.Selected, Holders: 7}, // selected by an indexer
	} {
		d, err := model.Decide(r)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%v: %.2f ms\n", d.Winner, d.Costs[d.Winner].Seconds*1e3)
	}
	// Output:
	// route: 0.09 ms
	// fetch: 5.55 ms
	// local: 1.35 ms
	// route: 0.10 ms
}

// The constants of a fabric are fitted to measured round trips.
func ExampleCalibrate() {
	payload := redistribute.DeepSeekV2Lite()
	var trips []redistribute.Sample
	for rows, seconds := range map[int]float64{1: 25e-6, 256: 47.6e-6, 1024: 115.5e-6, 4096: 387e-6} {
		trips = append(trips, redistribute.Sample{Bytes: payload.RouteBytes(rows, 1), Seconds: seconds})
	}
	fit, err := redistribute.Calibrate(trips)
	if err != nil {
		panic(err)
	}
	fabric := fit.Fabric("rack 4", 16e-6)
	fmt.Printf("probe %.0f us, turnaround %.0f us, %.1f GB/s\n", fabric.Probe*1e6, fabric.Turnaround*1e6, fabric.Bandwidth/1e9)
	// Output: probe 16 us, turnaround 9 us, 24.7 GB/s
}

package netcost_test

import (
	"fmt"

	"github.com/penstock-kv/penstock/dualpath/netcost"
)

// The worked example of NetKV §III-D: a warm instance across pods has a lower cost than one in the
// same pod with half the prefix, until the core is congested.
func Example() {
	oracle, err := netcost.NewOracle(netcost.Model{}, netcost.Snapshot[string]{
		Fabric:     netcost.FatTree(),
		Congestion: netcost.Congestion{netcost.SamePod: 0.2, netcost.CrossPod: 0.2},
		Places: map[string]netcost.Place{
			"prefill-0": {Pod: "a", Rack: "a1", Node: "n1"},
			"decode-0":  {Pod: "a", Rack: "a2", Node: "n7"},
			"decode-1":  {Pod: "b", Rack: "b1", Node: "n9"},
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	chooser, err := netcost.NewChooser(netcost.Full, netcost.Weights{}, oracle)
	if err != nil {
		fmt.Println(err)
		return
	}
	request := netcost.Request[string]{From: "prefill-0", Tokens: 32768, Bytes: 10e9}
	candidates := []netcost.Candidate[string]{
		{ID: "decode-0", Hit: 16384, Free: 100e9},
		{ID: "decode-1", Hit: 29491, Free: 100e9},
	}
	choose := func() {
		d, err := chooser.Choose(&request, candidates)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s (%v): %.1f GB in %.2f s\n", d.Intent.To, d.Cost.Tier, d.Cost.Bytes/1e9, d.Cost.Transfer)
	}
	choose()
	_ = oracle.Measured(netcost.Congestion{netcost.SamePod: 0.2, netcost.CrossPod: 0.92}, 0)
	choose()
	// Output:
	// decode-1 (cross pod): 1.0 GB in 0.40 s
	// decode-0 (same pod): 5.0 GB in 1.00 s
}
